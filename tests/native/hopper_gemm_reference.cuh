// Random inputs and fp64 references for hopper_gemm_main.cu, and what compares whole matrices on the GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../csrc/kernels/linear_ce_hopper.h"

namespace {

using bf16 = __nv_bfloat16;
using i64 = std::int64_t;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(99);
}
void check(const char* error) {
  if (error == nullptr) return;
  std::printf("launch: %s\n", error);
  std::exit(98);
}

template <typename T>
struct Buffer {
  T* data = nullptr;
  i64 size;
  explicit Buffer(i64 n) : size(n) {
    check(cudaMalloc(&data, n * sizeof(T)), "cudaMalloc");
    poison();
  }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void poison() { check(cudaMemset(data, 0xff, size * sizeof(T)), "cudaMemset"); }  // NaN as bf16, fp32 and fp64
  std::vector<T> host() const {
    std::vector<T> copy(size);
    check(cudaMemcpy(copy.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return copy;
  }
};

// ── inputs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

__host__ __device__ std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}
__device__ float normal(std::uint64_t index) {
  const std::uint64_t bits = mixed(index + 0x9e3779b97f4a7c15u);
  const float u = ((bits >> 40) + 1) * 0x1p-24f;
  return sqrtf(-2.0f * logf(u)) * cospif((bits & 0xffffff) * 0x1p-23f);
}
__global__ void fill_rows(bf16* to, i64 rows, i64 columns, i64 stride, float scale, std::uint64_t seed) {
  for (i64 i = blockIdx.x * i64{blockDim.x} + threadIdx.x; i < rows * columns; i += i64{gridDim.x} * blockDim.x) {
    to[i / columns * stride + i % columns] = __float2bfloat16(scale * normal(i + (seed << 40)));
  }
}
__global__ void fill_row_inputs(float* inv_temperature, float* seed, i64* target, float* scale, i64 rows, i64 vocab) {
  const i64 i = blockIdx.x * i64{blockDim.x} + threadIdx.x;
  if (i >= rows) return;
  const float unit = (mixed(i + 77) >> 40) * 0x1p-24f;
  inv_temperature[i] = 1.0f / (0.7f + 0.6f * unit);
  seed[i] = 1.5f * normal(i + (i64{5} << 40));
  target[i] = i % 17 == 0 ? -1 : i % 17 == 1 ? vocab - 1 : static_cast<i64>(mixed(i) % vocab);
  scale[i] = 0.01f * normal(i + (i64{6} << 40));
}
__global__ void fill_numbers(float* numbers, const float* inv_temperature, const float* seed, i64 rows) {
  const i64 i = blockIdx.x * i64{blockDim.x} + threadIdx.x;
  if (i >= rows) return;
  float* of = numbers + 8 * i;
  of[0] = inv_temperature[i] * 1.44269504f, of[1] = seed[i] + 3.0f, of[2] = 2.5f;
  for (int k = 3; k < 6; ++k) of[k] = 0.1f * normal(i + (i64{8 + k} << 40));
  of[6] = 5.0f, of[7] = NAN;
}
__global__ void fill_bias(float* bias, i64 n) {
  const i64 i = blockIdx.x * i64{blockDim.x} + threadIdx.x;
  if (i < n) bias[i] = i % 1001 == 3 ? -INFINITY : 0.5f * normal(i + (i64{7} << 40));
}

// ── references ──────────────────────────────────────────────────────────────────────────────────────────────────────

struct Strided {
  const bf16* data;
  i64 mn;
  i64 k;
};
/// out[r, c] = Σ_k a[r·step, k]·b[c, k] in fp64.
__global__ void reference_product(Strided a, i64 step, Strided b, double* out, int rows, int columns, int depth) {
  __shared__ double tile_a[16][17], tile_b[16][17];
  const int x = threadIdx.x, y = threadIdx.y;
  const i64 r = blockIdx.y * 16 + y, c = i64{blockIdx.x} * 16 + x, c_of_y = i64{blockIdx.x} * 16 + y;
  double sum = 0;
  for (int k = 0; k < depth; k += 16) {
    const bool inside = k + x < depth;
    tile_a[y][x] = inside && r < rows ? double(__bfloat162float(a.data[r * step * a.mn + (k + x) * a.k])) : 0.0;
    tile_b[y][x] = inside && c_of_y < columns ? double(__bfloat162float(b.data[c_of_y * b.mn + (k + x) * b.k])) : 0.0;
    __syncthreads();
    for (int i = 0; i < 16; ++i) sum += tile_a[y][i] * tile_b[x][i];
    __syncthreads();
  }
  if (r < rows && c < columns) out[r * columns + c] = sum;
}
void reference(const Strided& a, i64 step, const Strided& b, Buffer<double>& out, i64 rows, i64 columns, i64 depth) {
  const dim3 grid(unsigned((columns + 15) / 16), unsigned((rows + 15) / 16));
  reference_product<<<grid, dim3(16, 16)>>>(a, step, b, out.data, int(rows), int(columns), int(depth));
  check(cudaGetLastError(), "reference_product");
}

struct RowFound {
  double exp, gap, worst;  // Σ e and Σ e·(z − seed) by the formula, the largest error of what is stored
};
__device__ double block_sum(double value) {
  __shared__ double all[256];
  __syncthreads();
  all[threadIdx.x] = value;
  for (int n = 128; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) all[threadIdx.x] += all[threadIdx.x + n];
  }
  __syncthreads();
  return all[0];
}
/// A raw logit in fp64 and the softcap's slope there.
__device__ double raw_of(const fusedce::LogitTerms& terms, double product, int column, double* slope) {
  const double x = product + (terms.bias ? terms.bias[column] : 0.0f);
  *slope = 1;
  if (!(terms.softcap > 0)) return x;
  const double bent = tanh(x / terms.softcap);
  *slope = 1 - bent * bent;
  return terms.softcap * bent;
}
/// A block a sampled row. products: fp64, before the bias. numbers: of launch_logit_gradient, whose results are stored
/// then; or nullptr, and exponentials are, if any.
__global__ void reference_row(const double* products, i64 step, fusedce::LogitTerms terms, fusedce::LogitSeeds seeds,
                              const float* numbers, bool with_entropy, const bf16* stored, i64 stride, int vocab,
                              RowFound* found) {
  const i64 row = blockIdx.x * step;
  double exp_sum = 0, gap_sum = 0, bad = 0;
  __shared__ unsigned worst;
  worst = 0;
  __syncthreads();
  for (int j = threadIdx.x; j < vocab; j += 256) {
    double slope;
    const double raw = raw_of(terms, products[i64{blockIdx.x} * vocab + j], j, &slope);
    const double gap = (raw - seeds.seed[row]) * seeds.inv_temperature[row];
    const bool is_target = j == terms.target[row];
    const double e = is_target ? 0 : exp(gap);
    exp_sum += e;
    gap_sum += e == 0 ? 0 : e * gap;
    if (stored == nullptr) continue;
    double should = e * slope, size = e * (slope + 1e-3);
    if (numbers != nullptr) {
      const float* of = numbers + 8 * row;
      const double log_p = (raw - of[1]) * of[0] - of[2], p = exp2(log_p);
      const double surprise = with_entropy && p > 0 ? of[5] * (log_p + of[6]) : 0;
      should = (is_target ? of[4] : p * (of[3] - surprise)) * slope;
      // What cancels between on_probs and the surprise is known to the 1e-5 that a logit of fp32 products is.
      size = fabs(should) + (is_target ? 1e-3 : 1e-3 * p * fabs(of[3]));
      if (with_entropy && !is_target) size += 3e-2 * p * fabs(of[5]);
    }
    const double error = fabs(__bfloat162float(stored[row * stride + j]) - should) / (size + 1e-30);
    if (error == error)
      atomicMax(&worst, __float_as_uint(float(error)));
    else
      bad = 1;
  }
  exp_sum = block_sum(exp_sum);
  gap_sum = block_sum(gap_sum);
  bad = block_sum(bad);
  if (threadIdx.x == 0) found[blockIdx.x] = {exp_sum, gap_sum, bad > 0 ? NAN : __uint_as_float(worst)};
}
/// Σ of each row as it is stored, and how many of its columns from the next multiple of 8 on were written, or of those
/// before it with anything but 0.
__global__ void stored_sums(const bf16* stored, i64 stride, int columns, double* sums, int* written) {
  double sum = 0;
  for (int j = threadIdx.x; j < columns; j += 256) sum += __bfloat162float(stored[blockIdx.x * stride + j]);
  for (int j = columns + threadIdx.x; j < stride; j += 256) {
    const bf16 value = stored[blockIdx.x * stride + j];
    if (!(__hisnan(value) || (j < (columns + 7) / 8 * 8 && __bfloat162float(value) == 0))) atomicAdd(written, 1);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
__global__ void poison_padding(bf16* rows, i64 stride, int columns) {
  for (int j = columns + threadIdx.x; j < stride; j += 256) rows[blockIdx.x * stride + j] = __float2bfloat16(NAN);
}
/// Order-independent fingerprint of all words: equal bits, equal fingerprint.
__global__ void fingerprint(const std::uint32_t* words, i64 count, unsigned long long* out) {
  unsigned long long sum = 0;
  for (i64 i = blockIdx.x * i64{blockDim.x} + threadIdx.x; i < count; i += i64{gridDim.x} * blockDim.x) {
    sum += mixed(words[i] + (static_cast<std::uint64_t>(i) << 32));
  }
  atomicAdd(out, sum);
}
__device__ float as_float(float value) { return value; }
__device__ float as_float(bf16 value) { return __bfloat162float(value); }
template <typename T>
__global__ void count_not_finite(const T* values, i64 count, int* out) {
  for (i64 i = blockIdx.x * i64{blockDim.x} + threadIdx.x; i < count; i += i64{gridDim.x} * blockDim.x) {
    if (!isfinite(as_float(values[i]))) atomicAdd(out, 1);
  }
}
template <typename T>
bool all_finite(const Buffer<T>& buffer) {
  Buffer<int> out(1);
  check(cudaMemset(out.data, 0, 4), "cudaMemset");
  count_not_finite<<<1024, 256>>>(buffer.data, buffer.size, out.data);
  return out.host()[0] == 0;
}
/// Every step-th of a matrix's rows.
template <typename T>
std::vector<T> sampled(const Buffer<T>& matrix, i64 rows, i64 columns, i64 step) {
  std::vector<T> copy(rows * columns);
  check(cudaMemcpy2D(copy.data(), columns * sizeof(T), matrix.data, step * columns * sizeof(T), columns * sizeof(T),
                     rows, cudaMemcpyDeviceToHost),
        "cudaMemcpy2D");
  return copy;
}
template <typename T>
unsigned long long bits_of(const Buffer<T>& buffer) {
  Buffer<unsigned long long> out(1);
  check(cudaMemset(out.data, 0, 8), "cudaMemset");
  fingerprint<<<1024, 256>>>(reinterpret_cast<const std::uint32_t*>(buffer.data), buffer.size * sizeof(T) / 4,
                             out.data);
  return out.host()[0];
}

}  // namespace
