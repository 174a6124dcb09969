// The sums of a row's vocab tiles merged: linear_ce_sums.h says what they are.
//
// Every row is merged in an order that the number of tiles alone decides: the bits repeat, and rows do not feel one
// another. Offsets are int64.
#include "linear_ce_sums.h"

#include "online_sums.cuh"

namespace fusedce {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 32;  // of a block: neighbouring threads read 128 bytes of a tile's rows
constexpr int kParts = kThreads / kRows;
constexpr int kUnroll = 4;  // tiles whose loads are in flight together

/// The tiles first, first + kParts, … of a row.
template <bool kGaps>
__device__ inline OnlineSums part_sums(const TileSums& tiles, std::int64_t num_rows, std::int64_t row, int first,
                                       float slope) {
  OnlineSums sums = no_sums();
  for (int tile = first; tile < tiles.num_tiles; tile += kUnroll * kParts) {
    OnlineSums next[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      next[i] = no_sums();
      if (tile + i * kParts >= tiles.num_tiles) continue;
      const std::int64_t at = (tile + i * kParts) * num_rows + row;
      next[i] = {tiles.max[at], tiles.exp[at], kGaps ? tiles.gap[at] : 0.0f};
    }
#pragma unroll
    for (const OnlineSums& more : next) sums = merged(sums, more, slope);
  }
  return sums;
}

/// A block owns kRows rows.
template <bool kGaps>
__global__ void __launch_bounds__(kThreads) merged_sums_kernel(TileSums tiles, SummedRows rows, RowResults out) {
  __shared__ OnlineSums of_part[kParts][kRows];
  const int inside = static_cast<int>(threadIdx.x) % kRows;
  const int part = static_cast<int>(threadIdx.x) / kRows;
  const std::int64_t row = block_index() * kRows + inside;
  const bool exists = row < rows.num_rows;
  const float slope = exists ? rows.inv_temperature[row] : 0.0f;
  of_part[part][inside] = exists ? part_sums<kGaps>(tiles, rows.num_rows, row, part, slope) : no_sums();
  __syncthreads();
  if (part != 0 || !exists) return;
  RowResult result{0.0f, 0.0f, 0.0f, INFINITY, 0.0f};
  if (rows.target[row] != rows.ignore_index) {
    OnlineSums sums = of_part[0][inside];
#pragma unroll 1  // or all parts lie in registers at once
    for (int i = 1; i < kParts; ++i) sums = merged(sums, of_part[i][inside], slope);
    result = with_target(sums, rows.raw_target[row], slope);
  }
  out.logprob[row] = result.logprob;
  if (kGaps) out.entropy[row] = result.entropy;
  out.lse[row] = result.lse;
  out.normalizer[2 * row] = result.shift;
  out.normalizer[2 * row + 1] = result.log_sum;
}

}  // namespace

const char* launch_merged_sums(const TileSums& tiles, const SummedRows& rows, const RowResults& out, void* stream) {
  auto* kernel = tiles.gap ? merged_sums_kernel<true> : merged_sums_kernel<false>;
  return launch(kernel, (rows.num_rows + kRows - 1) / kRows, kThreads, stream, tiles, rows, out);
}

}  // namespace fusedce
