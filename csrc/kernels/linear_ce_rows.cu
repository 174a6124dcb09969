// Linear cross-entropy on a chunk of fp32 logits that a vendor GEMM has written: its row statistics, and its gradient.
//
// With x a plain logit, raw = softcap·tanh((x + bias)/softcap) or x + bias, z = raw·inv_temperature.
// A block owns a row and sums it in an order that its length and alignment alone decide: the bits repeat, and rows do
// not feel one another. Row offsets are int64: rows × row_stride may pass 2³¹; columns are int.
#include "linear_ce_rows.h"

#include "logit.cuh"
#include "online_sums.cuh"
#include "wave.cuh"

namespace fusedce {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 4;
constexpr int kMinBlocks = 2;  // a unit (SM or CU): 1,024 threads with four loads each hide the memory's latency

// ── the log-prob ────────────────────────────────────────────────────────────────────────────────────────────────────

template <int kCount>
__device__ inline void add_logits(OnlineSums& sums, const float (&raw)[kCount], float slope) {
  float max = sums.max;
#pragma unroll
  for (int i = 0; i < kCount; ++i) max = fmaxf(max, raw[i]);
  if (max > sums.max) sums = about(sums, max, slope);
  const float shift = shift_of(max);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float gap = (raw[i] - shift) * slope;
    const float exp = expf(gap);
    sums.exp += exp;
    sums.gap += exp == 0.0f ? 0.0f : exp * gap;  // a word of probability 0 adds 0, also where its logit is −inf
  }
}

/// This thread's share of a row without its target: at most one word of its head and tail, and every kThreads-th
/// vector.
template <bool kSoftcap>
__device__ inline OnlineSums thread_sums(const float* __restrict__ row, const LogitRows& rows, int target,
                                         float slope) {
  const RowSplit split(row, rows.vocab);
  const int thread = static_cast<int>(threadIdx.x);
  OnlineSums sums = no_sums();
  if (thread < split.num_edges && split.edge_column(thread) != target) {
    const int column = split.edge_column(thread);
    const float raw[1] = {logit_of<kSoftcap>(row[column], bias_at(rows.bias, column), rows.softcap).raw};
    add_logits(sums, raw, slope);
  }
  for (int first = thread; first < split.num_vectors; first += kThreads * kUnroll) {
    Logits4 plain[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * kThreads;
      if (v < split.num_vectors) plain[i] = load4(row + split.vector_column(v), true);
    }
    float raw[kUnroll * kVectorWidth];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * kThreads;
      const int column = split.vector_column(v);
      const bool inside = v < split.num_vectors;
      const Logits4 bias = inside ? bias4_at(rows.bias, column) : Logits4{};
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) {
        // −inf adds nothing
        const bool counts = inside && column + j != target;
        raw[i * kVectorWidth + j] =
            counts ? logit_of<kSoftcap>(plain[i].at[j], bias.at[j], rows.softcap).raw : -INFINITY;
      }
    }
    add_logits(sums, raw, slope);
  }
  return sums;
}

__device__ inline void write_result(const RowStatistics& out, std::int64_t row, const RowResult& result) {
  out.logprob[row] = result.logprob;
  out.entropy[row] = result.entropy;
  out.lse[row] = result.lse;
  out.normalizer[2 * row] = result.shift;
  out.normalizer[2 * row + 1] = result.log_sum;
}

/// Reads each row once, 4·vocab bytes, plus 4·vocab of bias from L2; writes 20 bytes a row. Ignored rows are not read.
template <bool kSoftcap>
__global__ void __launch_bounds__(kThreads, kMinBlocks) logprob_rows_kernel(LogitRows rows, RowStatistics out) {
  const std::int64_t row = block_index();
  if (row >= rows.num_rows) return;
  if (rows.target[row] == rows.ignore_index) {
    // Shifted by +inf, every probability of an ignored row is 0.
    if (threadIdx.x == 0) write_result(out, row, {0.0f, 0.0f, 0.0f, INFINITY, 0.0f});
    return;
  }
  const int target = column_of(rows.target[row], rows.vocab);
  const float slope = rows.inv_temperature[row];
  const float* logits = rows.logits + row * rows.row_stride;
  const OnlineSums of_thread = thread_sums<kSoftcap>(logits, rows, target, slope);
  const OnlineSums others = block_reduce<kThreads>(of_thread, no_sums(), MergeSums{slope});
  if (threadIdx.x == 0) {
    // Labels out of range are reported elsewhere; their rows are NaN, so that nothing plausible comes out of them.
    const float raw =
        target < 0 ? NAN : logit_of<kSoftcap>(logits[target], bias_at(rows.bias, target), rows.softcap).raw;
    write_result(out, row, with_target(others, raw, slope));
  }
}

/// What a shard of the vocabulary knows of its rows: `thread_sums`' of the words but the target, and the target's
/// logit, −inf where the row has it in another shard. Reads and ignores rows as logprob_rows_kernel; writes 16 bytes a
/// row.
template <bool kSoftcap>
__global__ void __launch_bounds__(kThreads, kMinBlocks) parts_rows_kernel(LogitRows rows, float* parts) {
  const std::int64_t row = block_index();
  if (row >= rows.num_rows) return;
  Logits4 part{{-INFINITY, 0.0f, 0.0f, -INFINITY}};
  if (rows.target[row] != rows.ignore_index) {
    const int target = column_of(rows.target[row], rows.vocab);
    const float slope = rows.inv_temperature[row];
    const float* logits = rows.logits + row * rows.row_stride;
    const OnlineSums of_thread = thread_sums<kSoftcap>(logits, rows, target, slope);
    const OnlineSums others = block_reduce<kThreads>(of_thread, no_sums(), MergeSums{slope});
    part = {{others.max, others.exp, others.gap, -INFINITY}};
    if (target >= 0) part.at[3] = logit_of<kSoftcap>(logits[target], bias_at(rows.bias, target), rows.softcap).raw;
  }
  if (threadIdx.x == 0) store4<float, true>(parts + 4 * row, part);
}

// ── the gradient ────────────────────────────────────────────────────────────────────────────────────────────────────

/// One row's numbers for d_raw = p·(on_probs − on_surprise·(log p + H)), and on_target at the target.
struct RowGradient {
  float inv_temperature;
  float on_probs;
  float on_surprise;
  float on_target;
  float entropy;
  float shift;
  float log_sum;
  int target;  // its column, −1 for a label out of range

  __device__ RowGradient(const LogitRows& rows, const RowUpstream& upstream, std::int64_t row)
      : inv_temperature(rows.inv_temperature[row]),
        on_probs(upstream.on_probs[row]),
        on_surprise(upstream.on_surprise ? upstream.on_surprise[row] : 0.0f),
        on_target(upstream.on_target[row]),
        entropy(upstream.on_surprise ? upstream.entropy[row] : 0.0f),
        shift(upstream.normalizer[2 * row]),
        log_sum(upstream.normalizer[2 * row + 1]),
        target(column_of(rows.target[row], rows.vocab)) {}

  __device__ float at(const Logit& logit, int column) const {
    if (column == target) return on_target * logit.slope;
    const float log_p = (logit.raw - shift) * inv_temperature - log_sum;
    const float p = expf(log_p);
    const float surprise = p == 0.0f ? 0.0f : log_p + entropy;  // p·log p is 0 where p is 0
    return p * (on_probs - on_surprise * surprise) * logit.slope;
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
      const Logits4 bias = kRead ? bias4_at(rows.bias, column) : Logits4{};
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
    out[column] = from_float<T>(of(kRead ? row[column] : 0.0f, kRead ? bias_at(rows.bias, column) : 0.0f, column));
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
  if (rows.target[row] == rows.ignore_index) {
    // Zeros are written, not multiplied in: an ignored row may hold NaN or inf.
    write_row<T, false>(logits, rows, out, [](float, float, int) { return 0.0f; });
    return;
  }
  const RowGradient gradient(rows, upstream, row);
  write_row<T, true>(logits, rows, out, [&](float plain, float bias, int column) {
    return gradient.at(logit_of<kSoftcap>(plain, bias, rows.softcap), column);
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

const char* launch_parts_rows(const LogitRows& rows, float* parts, void* stream) {
  auto* kernel = rows.softcap > 0.0f ? parts_rows_kernel<true> : parts_rows_kernel<false>;
  return launch(kernel, rows.num_rows, kThreads, stream, rows, parts);
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
