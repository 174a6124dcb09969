// Linear cross-entropy on a chunk of fp32 logits that a vendor GEMM has written: its row statistics, and its gradient.
//
// With x a plain logit, z = softcap·tanh((x + bias)/softcap)/T, m the row's maximum and p = e^(z−m) / Σ e^(z−m).
// A block owns a row and sums it in an order that its length and alignment alone decide: the bits repeat, and rows do
// not feel one another. Row offsets are int64: rows × row_stride may pass 2³¹; columns are int.
#include <cmath>

#include "linear_ce_rows.h"
#include "row.cuh"
#include "wave.cuh"

namespace fusedce {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 4;
constexpr int kMinBlocks = 2;  // a unit (SM or CU): 1,024 threads with four loads each hide the memory's latency

// ── one logit ───────────────────────────────────────────────────────────────────────────────────────────────────────

struct Logit {
  float z;
  float slope;  // dz/dx
};

template <bool kSoftcap>
__device__ inline Logit logit_of(float plain, float bias, const LogitRows& rows) {
  const float x = plain + bias;
  if (!kSoftcap) return {x * rows.inv_temperature, rows.inv_temperature};
  const float bent = tanhf(x * (1.0f / rows.softcap));  // one division a thread, not one a logit
  return {rows.softcap * rows.inv_temperature * bent, (1.0f - bent * bent) * rows.inv_temperature};
}

__device__ inline float bias_at(const LogitRows& rows, int column) { return rows.bias ? rows.bias[column] : 0.0f; }

__device__ inline Logits4 bias4_at(const LogitRows& rows, int column) {
  if (!rows.bias) return Logits4{};
  return load4(rows.bias + column, is_aligned<float, kVectorWidth>(rows.bias + column));
}

// ── the running-max online log-sum-exp ──────────────────────────────────────────────────────────────────────────────

/// Sums over logits, about their maximum m. Gaps z − m, not logits, are summed: they keep their digits where all logits
/// are large.
struct OnlineSums {
  float max;
  float exp;  // Σ e^(z−m)
  float gap;  // Σ e^(z−m)·(z−m)
};

__device__ inline OnlineSums no_sums() { return {-INFINITY, 0.0f, 0.0f}; }

/// What is subtracted from logits: their maximum, but 0 while there is none, because −inf − (−inf) is NaN.
__device__ inline float shift_of(float max) { return max == -INFINITY ? 0.0f : max; }

/// The same sums about `max`, which is no smaller than their own.
__device__ inline OnlineSums about(const OnlineSums& sums, float max) {
  const float moved = sums.max == -INFINITY ? 0.0f : sums.max - max;
  const float factor = expf(moved);
  // Select: where the factor is 0, `moved` may be −inf.
  return {max, sums.exp * factor, factor == 0.0f ? 0.0f : (sums.gap + sums.exp * moved) * factor};
}

__device__ inline OnlineSums merged(const OnlineSums& left, const OnlineSums& right) {
  const float max = fmaxf(left.max, right.max);
  const OnlineSums a = about(left, max);
  const OnlineSums b = about(right, max);
  return {max, a.exp + b.exp, a.gap + b.gap};
}

template <int kCount>
__device__ inline void add_logits(OnlineSums& sums, const float (&z)[kCount]) {
  float max = sums.max;
#pragma unroll
  for (int i = 0; i < kCount; ++i) max = fmaxf(max, z[i]);
  if (max > sums.max) sums = about(sums, max);
  const float shift = shift_of(max);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float gap = z[i] - shift;
    const float exp = expf(gap);
    sums.exp += exp;
    sums.gap += exp == 0.0f ? 0.0f : exp * gap;  // a word of probability 0 adds 0, also where its logit is −inf
  }
}

/// This thread's share of a row: at most one word of its head and tail, and every kThreads-th vector.
template <bool kSoftcap>
__device__ inline OnlineSums thread_sums(const float* __restrict__ row, const LogitRows& rows) {
  const RowSplit split(row, rows.vocab);
  const int thread = static_cast<int>(threadIdx.x);
  OnlineSums sums = no_sums();
  if (thread < split.num_edges) {
    const int column = split.edge_column(thread);
    const float z[1] = {logit_of<kSoftcap>(row[column], bias_at(rows, column), rows).z};
    add_logits(sums, z);
  }
  for (int first = thread; first < split.num_vectors; first += kThreads * kUnroll) {
    Logits4 plain[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * kThreads;
      if (v < split.num_vectors) plain[i] = load4(row + split.vector_column(v), true);
    }
    float z[kUnroll * kVectorWidth];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * kThreads;
      const bool inside = v < split.num_vectors;
      const Logits4 bias = inside ? bias4_at(rows, split.vector_column(v)) : Logits4{};
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) {
        // −inf past the end: it adds nothing
        z[i * kVectorWidth + j] = inside ? logit_of<kSoftcap>(plain[i].at[j], bias.at[j], rows).z : -INFINITY;
      }
    }
    add_logits(sums, z);
  }
  return sums;
}

/// Reads each row once, 4·vocab bytes, plus 4·vocab of bias from L2; writes 20 bytes a row. Ignored rows are not read.
template <bool kSoftcap>
__global__ void __launch_bounds__(kThreads, kMinBlocks) logprob_rows_kernel(LogitRows rows, RowStatistics out) {
  const std::int64_t row = block_index();
  if (row >= rows.num_rows) return;
  const std::int64_t target = rows.target[row];
  if (target == rows.ignore_index) {
    if (threadIdx.x == 0) {
      out.logprob[row] = out.entropy[row] = out.lse[row] = 0.0f;
      out.normalizer[2 * row] = out.normalizer[2 * row + 1] = 0.0f;
    }
    return;
  }
  if (rows.row_inv_temperature) rows.inv_temperature = rows.row_inv_temperature[row];
  const float* logits = rows.logits + row * rows.row_stride;
  const OnlineSums sums = block_reduce<kThreads>(thread_sums<kSoftcap>(logits, rows), no_sums(), merged);
  if (threadIdx.x == 0) {
    const bool inside = target >= 0 && target < rows.vocab;
    const int column = inside ? static_cast<int>(target) : 0;
    const float z_target = logit_of<kSoftcap>(logits[column], bias_at(rows, column), rows).z;
    const float shift = shift_of(sums.max);
    // Labels out of range are reported elsewhere; their rows are NaN, so that nothing plausible comes out of them.
    const float log_sum = inside ? logf(sums.exp) : NAN;
    out.logprob[row] = (z_target - shift) - log_sum;
    out.entropy[row] = log_sum - sums.gap / sums.exp;
    out.lse[row] = shift + log_sum;
    out.normalizer[2 * row] = shift;
    out.normalizer[2 * row + 1] = log_sum;
  }
}

// ── the gradient ────────────────────────────────────────────────────────────────────────────────────────────────────

/// One row's numbers for dz = p·(d_lse − d_entropy·(log p + H)) + d_logprob·([column = target] − p), the upstream
/// gradients divided by `scale` already.
struct RowGradient {
  float d_logprob;
  float d_entropy;
  float d_lse;
  float entropy;
  float shift;
  float log_sum;
  int target;  // its column, −1 for a label out of range

  __device__ RowGradient(const RowUpstream& upstream, std::int64_t row, int target_column) : target(target_column) {
    const float scale = *upstream.scale;
    d_logprob = upstream.d_logprob[row] / scale;
    d_entropy = upstream.d_entropy[row] / scale;
    d_lse = upstream.d_lse[row] / scale;
    entropy = upstream.entropy[row];
    shift = upstream.normalizer[2 * row];
    log_sum = upstream.normalizer[2 * row + 1];
  }
  __device__ float at(const Logit& logit, int column) const {
    const float log_p = (logit.z - shift) - log_sum;
    const float p = expf(log_p);
    const float surprise = p == 0.0f ? 0.0f : log_p + entropy;  // p·log p is 0 where p is 0
    // 1 − p is exact where p is near 1; p·(… − d_logprob) + d_logprob would round there.
    const float d_z = p * (d_lse - d_entropy * surprise) + d_logprob * ((column == target ? 1.0f : 0.0f) - p);
    return d_z * logit.slope;
  }
};

/// Writes of(plain logit, bias, column) to the vectors of a row of `out`. Without kRead the logits are not looked at.
template <typename T, bool kRead, bool kAligned, typename Function>
__device__ inline void write_vectors(const float* __restrict__ row, const LogitRows& rows, const RowSplit& split,
                                     T* __restrict__ out, Function of) {
  for (int first = threadIdx.x; first < split.num_vectors; first += kThreads * kUnroll) {
    Logits4 plain[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * kThreads;
      if (kRead && v < split.num_vectors) plain[i] = load4(row + split.vector_column(v), true);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * kThreads;
      if (v >= split.num_vectors) break;
      const int column = split.vector_column(v);
      const Logits4 bias = kRead ? bias4_at(rows, column) : Logits4{};
      Logits4 values;
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) values.at[j] = of(plain[i].at[j], bias.at[j], column + j);
      store4<T, kAligned>(out + column, values);
    }
  }
}

/// The whole row: head and tail, then the vectors of the logits, which need not be aligned in `out`.
template <typename T, bool kRead, typename Function>
__device__ inline void write_row(const float* __restrict__ row, const LogitRows& rows, T* __restrict__ out,
                                 Function of) {
  const RowSplit split(row, rows.vocab);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < split.num_edges) {
    const int column = split.edge_column(thread);
    out[column] = from_float<T>(of(kRead ? row[column] : 0.0f, kRead ? bias_at(rows, column) : 0.0f, column));
  }
  if (is_aligned<T, kVectorWidth>(out + split.head)) {
    write_vectors<T, kRead, true>(row, rows, split, out, of);
  } else {
    write_vectors<T, kRead, false>(row, rows, split, out, of);
  }
}

/// Reads each row once, 4·vocab bytes, plus 4·vocab of bias from L2, and writes sizeof(T)·vocab; of ignored rows it
/// only writes the zeros.
template <typename T, bool kSoftcap>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    d_logits_rows_kernel(LogitRows rows, RowUpstream upstream, T* d_logits, std::int64_t out_stride) {
  const std::int64_t row = block_index();
  if (row >= rows.num_rows) return;
  const float* logits = rows.logits + row * rows.row_stride;
  T* out = d_logits + row * out_stride;
  const std::int64_t target = rows.target[row];
  if (target == rows.ignore_index) {
    // Zeros are written, not multiplied in: an ignored row may hold NaN or inf.
    write_row<T, false>(logits, rows, out, [](float, float, int) { return 0.0f; });
    return;
  }
  if (rows.row_inv_temperature) rows.inv_temperature = rows.row_inv_temperature[row];
  const bool inside = target >= 0 && target < rows.vocab;
  const RowGradient gradient(upstream, row, inside ? static_cast<int>(target) : -1);
  write_row<T, true>(logits, rows, out, [&](float plain, float bias, int column) {
    return gradient.at(logit_of<kSoftcap>(plain, bias, rows), column);
  });
}

template <typename T>
const char* launch_d_logits(const LogitRows& rows, const RowUpstream& upstream, void* d_logits, std::int64_t out_stride,
                            void* stream) {
  auto* kernel = rows.softcap > 0.0f ? d_logits_rows_kernel<T, true> : d_logits_rows_kernel<T, false>;
  return launch(kernel, rows.num_rows, kThreads, stream, rows, upstream, static_cast<T*>(d_logits), out_stride);
}

}  // namespace

RowTile linear_ce_row_tile() { return {kWaveSize, kThreads, kVectorWidth, kUnroll}; }

const char* launch_logprob_rows(const LogitRows& rows, const RowStatistics& out, void* stream) {
  auto* kernel = rows.softcap > 0.0f ? logprob_rows_kernel<true> : logprob_rows_kernel<false>;
  return launch(kernel, rows.num_rows, kThreads, stream, rows, out);
}

const char* launch_d_logits_rows(const LogitRows& rows, const RowUpstream& upstream, void* d_logits, Dtype dtype,
                                 std::int64_t out_stride, void* stream) {
  switch (dtype) {
    case Dtype::kFloat32:
      return launch_d_logits<float>(rows, upstream, d_logits, out_stride, stream);
    case Dtype::kBFloat16:
      return launch_d_logits<bf16>(rows, upstream, d_logits, out_stride, stream);
    case Dtype::kFloat16:
      return launch_d_logits<fp16>(rows, upstream, d_logits, out_stride, stream);
  }
  return "unknown dtype";
}

}  // namespace fusedce
