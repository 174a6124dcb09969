// What differs between CUDA, HIP and the host runs of tests/simt, apart from the number of lanes (wave.cuh).
// One source for nvcc, HIP's clang and g++: no hipify step, and no torch header in device code.
//
// Each branch has bf16, fp16, from_float<T>(value), rounded to nearest even, and pack2<T>(low, high), two in a word.
#pragma once

#include <string.h>

#include <cstdint>

#if defined(__HIP__)

#include <hip/hip_runtime.h>

namespace fusedce {
using bf16 = __bf16;
using fp16 = _Float16;
using gpuStream = hipStream_t;
template <typename T>
__device__ inline T from_float(float value) {
  return static_cast<T>(value);
}
template <typename T>
__device__ inline std::uint32_t pack2(float low, float high) {
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  std::uint32_t word;
  memcpy(&word, pair, sizeof(word));
  return word;
}
inline const char* last_error() {
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}
}  // namespace fusedce

#elif defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace fusedce {
using bf16 = __nv_bfloat16;
using fp16 = __half;
using gpuStream = cudaStream_t;
template <typename T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline bf16 from_float<bf16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline fp16 from_float<fp16>(float value) {
  return __float2half_rn(value);
}
template <typename T>
__device__ std::uint32_t pack2(float low, float high);
template <>
__device__ inline std::uint32_t pack2<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);  // one instruction for both
  std::uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
template <>
__device__ inline std::uint32_t pack2<fp16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  std::uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
inline const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
}  // namespace fusedce

#elif defined(FUSEDCE_SIMT)

#include "simt.h"

namespace fusedce {
using simt::bf16;
using simt::fp16;
using simt::from_float;
using simt::pack2;
}  // namespace fusedce

#else
#error "compile this with nvcc, with clang -x hip, or as tests/simt does"
#endif

namespace fusedce {

constexpr std::int64_t kGridWidth = 1 << 20;  // times 1,024 threads stays below 2³², the most that HIP starts along x

/// This block's number. The last row of the grid may hold more blocks than were asked for: they must return at once.
__device__ inline std::int64_t block_index() { return static_cast<std::int64_t>(blockIdx.y) * gridDim.x + blockIdx.x; }

/// Starts at least `num_blocks` blocks of `kernel` on `stream`. nullptr, or what the runtime says is wrong.
template <typename... Parameters, typename... Arguments>
const char* launch(void (*kernel)(Parameters...), std::int64_t num_blocks, int num_threads, void* stream,
                   Arguments... arguments) {
  if (num_blocks == 0) return nullptr;
  const std::int64_t width = num_blocks < kGridWidth ? num_blocks : kGridWidth;
  const dim3 grid(static_cast<unsigned>(width), static_cast<unsigned>((num_blocks + width - 1) / width));
#if defined(FUSEDCE_SIMT)
  return simt::launch(kernel, grid, num_threads, static_cast<Parameters>(arguments)...);
#else
  kernel<<<grid, num_threads, 0, static_cast<gpuStream>(stream)>>>(static_cast<Parameters>(arguments)...);
  return last_error();
#endif
}

}  // namespace fusedce
