// Single words of rows of fp32 logits that a vendor GEMM has written: linear_ce_words.h says which.
//
// A row's results come in an order that its length and alignment alone decide, and rows do not feel one another.
// Offsets of rows and slots are int64; columns are int.
#include "linear_ce_words.h"

#include "logit.cuh"
#include "wave.cuh"

namespace fusedce {
namespace {

// ── the largest logit ───────────────────────────────────────────────────────────────────────────────────────────────

constexpr int kThreads = 512;
constexpr int kUnroll = 4;
constexpr int kMinBlocks = 2;  // a unit (SM or CU), as in linear_ce_rows.cu

constexpr std::uint32_t kOrderedInfinity = 0xff800000u;

/// A logit and its word as one number: larger for the larger logit, of equal ones for the lower word, and above 0. NaN
/// counts as +inf, since softmax makes NaN of both rows.
__device__ inline std::uint64_t key_of(float logit, int word) {
  const float number = logit == logit ? logit + 0.0f : INFINITY;  // −0 is 0
  std::uint32_t bits;
  memcpy(&bits, &number, sizeof(bits));
  const std::uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<std::uint64_t>(ordered) << 32 | ~static_cast<std::uint32_t>(word);
}

struct LargerKey {
  __device__ std::uint64_t operator()(std::uint64_t left, std::uint64_t right) const {
    return left > right ? left : right;
  }
};

/// A block owns a row. Reads it once, 4·vocab bytes, plus 4·vocab of bias from L2; writes 8 bytes.
__global__ void __launch_bounds__(kThreads, kMinBlocks) argmax_rows_kernel(WordRows rows, std::int64_t* words) {
  const std::int64_t index = block_index();
  if (index >= rows.num_rows) return;
  const float* row = rows.logits + index * rows.row_stride;
  const RowSplit split(row, rows.vocab);
  const int thread = static_cast<int>(threadIdx.x);
  std::uint64_t best = 0;
  if (thread < split.num_edges) {
    const int column = split.edge_column(thread);
    best = key_of(row[column] + bias_at(rows.bias, column), column);
  }
  for (int first = thread; first < split.num_vectors; first += kThreads * kUnroll) {
    Logits4 plain[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * kThreads;
      if (v < split.num_vectors) plain[i] = load4(row + split.vector_column(v), true);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = first + i * kThreads;
      if (v >= split.num_vectors) break;
      const int column = split.vector_column(v);
      const Logits4 bias = bias4_at(rows.bias, column);
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) best = LargerKey()(best, key_of(plain[i].at[j] + bias.at[j], column + j));
    }
  }
  best = block_reduce<kThreads>(best, std::uint64_t{0}, LargerKey());
  if (threadIdx.x != 0) return;
  words[index] = best >> 32 == kOrderedInfinity ? -1 : static_cast<std::int64_t>(~static_cast<std::uint32_t>(best));
}

// ── words by their ids ──────────────────────────────────────────────────────────────────────────────────────────────

constexpr int kSlotThreads = 128;

/// A thread owns a slot: reads its id, one logit and its bias; writes 4 bytes.
template <bool kSoftcap>
__global__ void __launch_bounds__(kSlotThreads) selected_logits_kernel(WordRows rows, Slots slots, float* raw) {
  const std::int64_t slot = block_index() * kSlotThreads + threadIdx.x;
  if (slot >= rows.num_rows * slots.num_slots) return;
  const std::int64_t id = slots.ids[slot];
  const int column = id == slots.ignore_index ? -1 : column_of(id, rows.vocab);
  float value = NAN;
  if (column >= 0) {
    const float plain = rows.logits[slot / slots.num_slots * rows.row_stride + column];
    value = logit_of<kSoftcap>(plain, bias_at(rows.bias, column), slots.softcap).raw;
  }
  raw[slot] = value;
}

/// A block owns a row. Reads its slots' numbers, num_slots² ids from L1, a logit a slot; writes an element a word. The
/// first slot of a word writes it, with what all of them have.
template <typename T, bool kSoftcap>
__global__ void __launch_bounds__(kSlotThreads)
    selected_gradient_kernel(WordRows rows, Slots slots, SlotGradients gradients, T* d_logits,
                             std::int64_t out_stride) {
  const std::int64_t row = block_index();
  if (row >= rows.num_rows) return;
  const std::int64_t start = row * slots.num_slots;
  const std::int64_t* ids = slots.ids + start;
  for (int k = static_cast<int>(threadIdx.x); k < slots.num_slots; k += kSlotThreads) {
    const int column = ids[k] == slots.ignore_index ? -1 : column_of(ids[k], rows.vocab);
    float same = 0.0f;
    bool writes = column >= 0;
    for (int other = 0; other < slots.num_slots; ++other) {
      if (ids[other] != ids[k]) continue;
      if (other < k) writes = false;
      same += gradients.upstream[start + other];
    }
    if (!writes) continue;
    const float p = expf(gradients.logprob[start + k]);
    const float entry = same * gradients.complement[start + k] + p * (gradients.on_probs[row] + same);
    const float plain = kSoftcap ? rows.logits[row * rows.row_stride + column] : 0.0f;
    const float slope = logit_of<kSoftcap>(plain, kSoftcap ? bias_at(rows.bias, column) : 0.0f, slots.softcap).slope;
    d_logits[row * out_stride + column] = from_float<T>(entry * slope);
  }
}

template <typename T>
const char* launch_gradient(const WordRows& rows, const Slots& slots, const SlotGradients& gradients, void* d_logits,
                            std::int64_t out_stride, void* stream) {
  auto* kernel = slots.softcap > 0.0f ? selected_gradient_kernel<T, true> : selected_gradient_kernel<T, false>;
  return launch(kernel, rows.num_rows, kSlotThreads, stream, rows, slots, gradients, static_cast<T*>(d_logits),
                out_stride);
}

}  // namespace

const char* launch_argmax_rows(const WordRows& rows, std::int64_t* words, void* stream) {
  return launch(argmax_rows_kernel, rows.num_rows, kThreads, stream, rows, words);
}

const char* launch_selected_logits(const WordRows& rows, const Slots& slots, float* raw, void* stream) {
  const std::int64_t blocks = (rows.num_rows * slots.num_slots + kSlotThreads - 1) / kSlotThreads;
  auto* kernel = slots.softcap > 0.0f ? selected_logits_kernel<true> : selected_logits_kernel<false>;
  return launch(kernel, blocks, kSlotThreads, stream, rows, slots, raw);
}

const char* launch_selected_gradient(const WordRows& rows, const Slots& slots, const SlotGradients& gradients,
                                     void* d_logits, Dtype dtype, std::int64_t out_stride, void* stream) {
  switch (dtype) {
    case Dtype::kFloat32:
      return launch_gradient<float>(rows, slots, gradients, d_logits, out_stride, stream);
    case Dtype::kBFloat16:
      return launch_gradient<bf16>(rows, slots, gradients, d_logits, out_stride, stream);
    case Dtype::kFloat16:
      return launch_gradient<fp16>(rows, slots, gradients, d_logits, out_stride, stream);
  }
  return "unknown dtype";
}

}  // namespace fusedce
