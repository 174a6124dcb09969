// The rows of linear cross-entropy between its three matrix products about a seed: linear_ce_seeded.h has the formulas.
//
// Every sum is in an order that the sizes alone decide, and rows do not feel one another: the bits repeat. Offsets of
// rows and words are int64, since rows × vocab may pass 2³¹; columns are int.
#include "linear_ce_seeded.h"

#include <cmath>

#include "row.cuh"
#include "wave.cuh"

namespace fusedce {
namespace {

constexpr int kThreads = 256;
constexpr int kWaves = kThreads / kWaveSize;  // rows of a block, where a wave owns one
constexpr int kSumRows = 32;                  // rows of a block that adds partial sums: 128 bytes of each tile's
constexpr int kSumParts = kThreads / kSumRows;
constexpr int kRescueThreads = 1024;  // one row has the whole block: all it can have in flight
constexpr int kRescueWaves = kRescueThreads / kWaveSize;
constexpr int kRescueColumns = 2;  // words of a wave at a time, which share their loads of hidden

// Above it the products of a row's exponentials with weight could pass 2^127, fp32's end.
constexpr float kLargestSum = 18446744073709551616.0f;  // 2^64
// About it every exponential is 0. Finite: −inf − (−inf) would be NaN.
constexpr float kIgnoredSeed = 1.2676506e30f;  // 2^100
// A factor of 0 beside a gradient at the target would lose the latter; 2^-40 of it is nothing beside rounding.
constexpr float kSmallestPart = 9.094947e-13f;  // 2^-40

__device__ inline int wave() { return static_cast<int>(threadIdx.x) / kWaveSize; }
__device__ inline int lane() { return static_cast<int>(threadIdx.x) % kWaveSize; }
__device__ inline float sum_of(float left, float right) { return left + right; }
__device__ inline float largest_of(float left, float right) { return fmaxf(left, right); }

// ── bf16 rows, 16 bytes a load ──────────────────────────────────────────────────────────────────────────────────────

constexpr int kEight = 8;  // bf16 in 16 bytes
using Words = Vec<std::uint32_t, kEight / 2>;

struct Eight {
  float at[kEight];
};

__device__ inline float float_of_bits(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/// A bf16 is the upper half of the float that it stands for.
__device__ inline Eight load8(const bf16* from) {
  const Words words = *reinterpret_cast<const Words*>(from);
  Eight values;
#pragma unroll
  for (int i = 0; i < kEight / 2; ++i) {
    values.at[2 * i] = float_of_bits(words.at[i] << 16);
    values.at[2 * i + 1] = float_of_bits(words.at[i] & 0xffff0000u);
  }
  return values;
}

__device__ inline void store8(bf16* to, const Eight& values) {
  Words words;
#pragma unroll
  for (int i = 0; i < kEight / 2; ++i) words.at[i] = pack2<bf16>(values.at[2 * i], values.at[2 * i + 1]);
  *reinterpret_cast<Words*>(to) = words;
}

__device__ inline bf16* hidden_row(const SeededChunk& chunk, std::int64_t row) {
  return static_cast<bf16*>(chunk.hidden) + row * chunk.hidden_stride;
}
__device__ inline const bf16* weight_row(const SeededChunk& chunk, int column) {
  return static_cast<const bf16*>(chunk.weight) + column * chunk.weight_stride;
}

/// products[i] = hidden_row · weight's row first + i, by a wave; lane 0 has them. Words past the vocabulary give 0.
template <int kCount>
__device__ inline void wave_products(const SeededChunk& chunk, const bf16* hidden, int first,
                                     float (&products)[kCount]) {
#pragma unroll
  for (float& product : products) product = 0.0f;
  for (int d = lane() * kEight; d < chunk.depth; d += kWaveSize * kEight) {
    const Eight a = load8(hidden + d);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first + i >= chunk.vocab) break;
      const Eight b = load8(weight_row(chunk, first + i) + d);
#pragma unroll
      for (int j = 0; j < kEight; ++j) products[i] = fmaf(a.at[j], b.at[j], products[i]);
    }
  }
#pragma unroll
  for (float& product : products) product = wave_reduce(product, sum_of);
}

// ── one row's numbers ───────────────────────────────────────────────────────────────────────────────────────────────

/// The target's column, or −1 if the label is out of range.
__device__ inline int column_of(std::int64_t target, int vocab) {
  return target >= 0 && target < vocab ? static_cast<int>(target) : -1;
}

/// A raw logit from the product, and its slope d_raw/d_x.
struct Logit {
  float raw;
  float slope;
};

__device__ inline Logit logit_of(const SeededChunk& chunk, float product, int column) {
  const float x = chunk.bias ? product + chunk.bias[column] : product;
  if (!(chunk.softcap > 0.0f)) return {x, 1.0f};
  const float bent = tanhf(x / chunk.softcap);
  return {chunk.softcap * bent, 1.0f - bent * bent};
}

/// Whether the exponentials about the target's logit are of no use: too large, or there is no such logit.
__device__ inline bool needs_rescue(float rest, float raw_target) {
  return rest > kLargestSum || raw_target == -INFINITY;
}

/// log p and the log-sum-exp, from the row's seed and the sum about it.
__device__ inline void write_statistics(const SeededChunk& chunk, const SeededRows& rows, std::int64_t row,
                                        float rest) {
  const float seed = rows.seed[row];
  const float raw = rows.raw_target[row];
  const float gap = (raw - seed) * chunk.inv_temperature[row];
  const float of_target = expf(gap);
  // Where the target is likely, 1 − p keeps its digits; else the log-sum-exp does without it, which may be far below.
  const bool likely = of_target >= rest;
  const float log_sum = likely ? log1pf(rest / of_target) : logf(rest + of_target);
  rows.rest[row] = rest;
  rows.logprob[row] = likely ? -log_sum : gap - log_sum;
  rows.lse[row] = (likely ? raw : seed) * chunk.inv_temperature[row] + log_sum;
}

// ── before the exponentials ─────────────────────────────────────────────────────────────────────────────────────────

/// A wave owns a row: reads depth numbers of hidden and of weight, unless the row is ignored, and writes 8 bytes.
__global__ void __launch_bounds__(kThreads) target_logits_kernel(SeededChunk chunk, SeededRows rows) {
  const std::int64_t row = block_index() * kWaves + wave();
  if (row >= chunk.num_rows) return;
  const std::int64_t target = chunk.target[row];
  float raw = INFINITY;
  float seed = kIgnoredSeed;
  if (target != chunk.ignore_index) {
    const int column = column_of(target, chunk.vocab);
    float products[1] = {0.0f};
    if (column >= 0) wave_products(chunk, hidden_row(chunk, row), column, products);
    raw = column >= 0 ? logit_of(chunk, products[0], column).raw : NAN;
    seed = raw == -INFINITY ? 0.0f : raw;
  }
  if (lane() == 0) {
    rows.raw_target[row] = raw;
    rows.seed[row] = seed;
  }
}

// ── between the exponentials and the upstream gradients ─────────────────────────────────────────────────────────────

/// A block owns kSumRows rows. Reads 4 bytes a row and tile, writes 12 a row.
__global__ void __launch_bounds__(kThreads)
    seeded_sums_kernel(SeededChunk chunk, SeededRows rows, const float* partial, int num_tiles) {
  __shared__ float of_part[kSumParts][kSumRows];
  const int inside = static_cast<int>(threadIdx.x) % kSumRows;
  const int part = static_cast<int>(threadIdx.x) / kSumRows;
  const std::int64_t row = block_index() * kSumRows + inside;
  float sum = 0.0f;
  if (row < chunk.num_rows) {
#pragma unroll 4
    for (int tile = part; tile < num_tiles; tile += kSumParts) sum += partial[tile * chunk.num_rows + row];
  }
  of_part[part][inside] = sum;
  __syncthreads();
  if (part != 0 || row >= chunk.num_rows) return;
  if (chunk.target[row] == chunk.ignore_index) {
    rows.rest[row] = rows.logprob[row] = rows.lse[row] = 0.0f;
    return;
  }
#pragma unroll
  for (int i = 1; i < kSumParts; ++i) sum += of_part[i][inside];
  write_statistics(chunk, rows, row, sum);
}

/// kRescueColumns words from `first` on; lane 0 has them. −inf past the vocabulary.
__device__ inline void wave_logits(const SeededChunk& chunk, const bf16* hidden, int first,
                                   Logit (&logits)[kRescueColumns]) {
  float products[kRescueColumns];
  wave_products(chunk, hidden, first, products);
#pragma unroll
  for (int i = 0; i < kRescueColumns; ++i) {
    logits[i] = {-INFINITY, 0.0f};
    if (first + i < chunk.vocab) logits[i] = logit_of(chunk, products[i], first + i);
  }
}

/// A block owns a row, and returns at once unless it is one to rescue. The target is counted among the others, beside
/// which it is nothing. What this costs does not matter: such a target is a wrong label, or a word that the bias
/// forbids.
__global__ void __launch_bounds__(kRescueThreads)
    rescue_kernel(SeededChunk chunk, SeededRows rows, bf16* exponentials, std::int64_t stride) {
  __shared__ float of_block;
  const std::int64_t row = block_index();
  if (row >= chunk.num_rows || chunk.target[row] == chunk.ignore_index) return;
  if (!needs_rescue(rows.rest[row], rows.raw_target[row])) return;
  const bf16* hidden = hidden_row(chunk, row);
  const float inv_temperature = chunk.inv_temperature[row];
  Logit logits[kRescueColumns];
  float largest = -INFINITY;
  for (int first = wave() * kRescueColumns; first < chunk.vocab; first += kRescueWaves * kRescueColumns) {
    wave_logits(chunk, hidden, first, logits);
    if (lane() != 0) continue;
#pragma unroll
    for (const Logit& logit : logits) largest = fmaxf(largest, logit.raw);
  }
  largest = block_reduce<kRescueThreads>(largest, -INFINITY, largest_of);
  if (threadIdx.x == 0) of_block = largest;
  __syncthreads();
  const float seed = of_block;
  float rest = 0.0f;
  for (int first = wave() * kRescueColumns; first < chunk.vocab; first += kRescueWaves * kRescueColumns) {
    wave_logits(chunk, hidden, first, logits);
    if (lane() != 0) continue;
#pragma unroll
    for (int i = 0; i < kRescueColumns; ++i) {
      const int column = first + i;
      if (column >= chunk.vocab) break;
      const float e = expf((logits[i].raw - seed) * inv_temperature);
      rest += e;
      exponentials[row * stride + column] = from_float<bf16>(e * logits[i].slope);
    }
  }
  rest = block_reduce<kRescueThreads>(rest, 0.0f, sum_of);
  if (threadIdx.x == 0) {
    rows.seed[row] = seed;
    write_statistics(chunk, rows, row, rest);
  }
}

// ── before the gradients' products ──────────────────────────────────────────────────────────────────────────────────

/// What a row's exponentials are to be multiplied with, and what stands for the target's: factor · entry is
/// (d_lse·p_y + d_logprob·(1 − p_y)) · inv_temperature, the gradient of raw_y, times the softcap's slope.
struct Scaled {
  float factor;
  float entry;
};

__device__ inline Scaled scaled_row(const SeededChunk& chunk, const SeededRows& rows, const SeededUpstream& upstream,
                                    std::int64_t row) {
  const float raw = rows.raw_target[row];
  const float rest = rows.rest[row];
  const float inv_temperature = chunk.inv_temperature[row];
  const float of_target = expf((raw - rows.seed[row]) * inv_temperature);
  const float total = rest + of_target;
  const float d_logprob = upstream.d_logprob[row];
  const float d_lse = upstream.d_lse ? upstream.d_lse[row] : 0.0f;
  const float on_target = d_lse * of_target + d_logprob * rest;
  float on_probs = d_lse - d_logprob;
  const float least = fabsf(on_target / total) * kSmallestPart;
  if (fabsf(on_probs) < least) on_probs = least;
  const float bent = chunk.softcap > 0.0f ? raw / chunk.softcap : 0.0f;
  const float entry = on_probs == 0.0f ? 0.0f : on_target / on_probs * (1.0f - bent * bent);
  return {on_probs / total * inv_temperature, entry};
}

/// A wave owns a row: reads and writes depth numbers of hidden, and writes the factor and one exponential.
__global__ void __launch_bounds__(kThreads)
    seeded_scale_kernel(SeededChunk chunk, SeededRows rows, SeededUpstream upstream, bf16* exponentials,
                        std::int64_t stride) {
  const std::int64_t row = block_index() * kWaves + wave();
  if (row >= chunk.num_rows) return;
  const std::int64_t target = chunk.target[row];
  Scaled scaled{0.0f, 0.0f};
  if (target != chunk.ignore_index) {
    scaled = scaled_row(chunk, rows, upstream, row);
    const int column = column_of(target, chunk.vocab);
    if (lane() == 0 && column >= 0) exponentials[row * stride + column] = from_float<bf16>(scaled.entry);
  }
  if (lane() == 0) upstream.factor[row] = scaled.factor;
  bf16* hidden = hidden_row(chunk, row);
  for (int d = lane() * kEight; d < chunk.depth; d += kWaveSize * kEight) {
    Eight values = load8(hidden + d);
#pragma unroll
    for (float& value : values.at) value *= scaled.factor;
    store8(hidden + d, values);
  }
}

// ── after them ──────────────────────────────────────────────────────────────────────────────────────────────────────

/// A thread owns 8 elements: reads them once and writes them once.
__global__ void __launch_bounds__(kThreads)
    scaled_kernel(const bf16* in, const float* scale, bf16* out, std::int64_t count) {
  const std::int64_t first = (block_index() * kThreads + threadIdx.x) * kEight;
  if (first >= count) return;
  Eight values = load8(in + first);
  const float factor = *scale;
#pragma unroll
  for (float& value : values.at) value *= factor;
  store8(out + first, values);
}

std::int64_t blocks_of(std::int64_t count, int of_block) { return (count + of_block - 1) / of_block; }

}  // namespace

const char* launch_target_logits(const SeededChunk& chunk, const SeededRows& rows, void* stream) {
  return launch(target_logits_kernel, blocks_of(chunk.num_rows, kWaves), kThreads, stream, chunk, rows);
}

const char* launch_seeded_statistics(const SeededChunk& chunk, const SeededRows& rows, const float* partial,
                                     int num_tiles, const Exponentials& exponentials, void* stream) {
  const std::int64_t blocks = blocks_of(chunk.num_rows, kSumRows);
  const char* error = launch(seeded_sums_kernel, blocks, kThreads, stream, chunk, rows, partial, num_tiles);
  if (error != nullptr) return error;
  // Which rows it has work for is known on the GPU alone, and nothing waits for that.
  return launch(rescue_kernel, chunk.num_rows, kRescueThreads, stream, chunk, rows,
                static_cast<bf16*>(exponentials.data), exponentials.stride);
}

const char* launch_seeded_scale(const SeededChunk& chunk, const SeededRows& rows, const SeededUpstream& upstream,
                                const Exponentials& exponentials, void* stream) {
  return launch(seeded_scale_kernel, blocks_of(chunk.num_rows, kWaves), kThreads, stream, chunk, rows, upstream,
                static_cast<bf16*>(exponentials.data), exponentials.stride);
}

const char* launch_scaled(const void* in, const float* scale, void* out, std::int64_t count, void* stream) {
  return launch(scaled_kernel, blocks_of(count, kThreads * kEight), kThreads, stream, static_cast<const bf16*>(in),
                scale, static_cast<bf16*>(out), count);
}

}  // namespace fusedce
