// The only place that knows how many lanes run in step: 32 (a CUDA warp) or 64 (a wavefront of AMD's gfx9).
#pragma once

#include "gpu.h"

namespace fusedce {

#if defined(__HIP__)
#if defined(__HIP_DEVICE_COMPILE__) && !defined(__GFX9__)
#error "the reductions are written for the 64 lanes of gfx9"
#endif
constexpr int kWaveSize = 64;
__device__ inline int shuffle_xor(int word, int lane_mask) { return __shfl_xor(word, lane_mask, kWaveSize); }
#elif defined(__CUDACC__)
constexpr int kWaveSize = 32;
__device__ inline int shuffle_xor(int word, int lane_mask) { return __shfl_xor_sync(0xffffffffu, word, lane_mask); }
#else
constexpr int kWaveSize = simt::kWaveSize;
inline int shuffle_xor(int word, int lane_mask) { return simt::shuffle_xor(word, lane_mask); }
#endif

/// The `value` of the lane whose number differs by `lane_mask`. Every lane of the wave must call it.
template <typename T>
__device__ inline T from_other_lane(const T& value, int lane_mask) {
  static_assert(sizeof(T) % sizeof(int) == 0, "lanes exchange whole words");
  int words[sizeof(T) / sizeof(int)];
  memcpy(words, &value, sizeof(T));
#pragma unroll
  for (int& word : words) word = shuffle_xor(word, lane_mask);
  T other;
  memcpy(&other, words, sizeof(T));
  return other;
}

/// All lanes' values merged in a fixed tree. Lane 0 has the result.
template <typename T, typename Merge>
__device__ inline T wave_reduce(T value, Merge merge) {
#pragma unroll
  for (int lane_mask = kWaveSize / 2; lane_mask > 0; lane_mask /= 2) {
    value = merge(value, from_other_lane(value, lane_mask));
  }
  return value;
}

/// All threads' values merged in a fixed tree: lanes, then waves. Thread 0 has the result; `nothing` changes no value
/// it is merged with. Every thread of the block must call it, and may do so again.
template <int kThreads, typename T, typename Merge>
__device__ inline T block_reduce(T value, T nothing, Merge merge) {
  constexpr int kWaves = kThreads / kWaveSize;
  static_assert(kThreads % kWaveSize == 0 && kWaves <= kWaveSize, "one wave merges what the waves found");
  __shared__ T of_wave[kWaves];
  const int thread = static_cast<int>(threadIdx.x);
  value = wave_reduce(value, merge);
  __syncthreads();  // what an earlier call left in of_wave has been read
  if (thread % kWaveSize == 0) of_wave[thread / kWaveSize] = value;
  __syncthreads();
  value = nothing;
  if (thread < kWaves) value = of_wave[thread];
  if (thread < kWaveSize) value = wave_reduce(value, merge);
  return value;
}

}  // namespace fusedce
