// Small kernels that are right with kNone, and wrong in one way with each other fault: what the gates must catch.
#include <hip/hip_runtime.h>

#include <cstdint>

namespace {

// In the order of FAULTS in test_planted_faults.py.
enum Fault {
  kNone,
  kTreeOf32Lanes,
  kNoBarrier,
  kWaveLeavesEarly,
  kWordTooFar,
  kLdsNotWritten,
  kRescaleLost,
  kBallotOf32Bits,
  kNaiveRemap,
  kNoMask,
  kLdsStride,
  kHalvesSwapped,
  kMatrixLayout,
  kMatrixOneRowDown,
  kTwoWriters,
  kReadsNeighbour,
};

constexpr int kThreads = 256, kWave = 64;

/// Merges (maximum, Σ e^(x − maximum)) pairs.
template <int kFault>
__device__ void merge(float& most, float& sum, float other_most, float other_sum) {
  const float both = fmaxf(most, other_most);
  const float keep = kFault == kRescaleLost ? 1.0f : expf(most - both);
  sum = sum * keep + other_sum * expf(other_most - both);
  most = both;
}

/// out[row] = log Σ e^x of a row of n words; a block a row.
template <int kFault>
__global__ __launch_bounds__(kThreads) void log_sum_exp(const float* x, float* out, int n) {
  __shared__ float most_of[kThreads / kWave], sum_of[kThreads / kWave];
  const float* row = x + static_cast<std::int64_t>(blockIdx.x) * n;
  const int thread = threadIdx.x, wave = thread / kWave;
  float most = -1e30f, sum = 0.0f;
  for (int i = thread; i < (kFault == kWordTooFar ? n + 1 : n); i += kThreads) merge<kFault>(most, sum, row[i], 1.0f);
  for (int mask = kFault == kTreeOf32Lanes ? 16 : kWave / 2; mask > 0; mask /= 2) {
    merge<kNone>(most, sum, __shfl_xor(most, mask, kWave), __shfl_xor(sum, mask, kWave));
  }
  if (thread % kWave == 0 && !(kFault == kLdsNotWritten && wave == 3)) {
    most_of[wave] = most;
    sum_of[wave] = sum;
  }
  if (kFault == kWaveLeavesEarly && wave == 3) return;
  if constexpr (kFault != kNoBarrier) __syncthreads();
  if (thread == 0) {
    for (int other = 1; other < kThreads / kWave; ++other) merge<kNone>(most, sum, most_of[other], sum_of[other]);
    out[kFault == kTwoWriters ? blockIdx.x / 2 : blockIdx.x] = most + logf(sum);
  }
}

/// out[block] = how many of its 64 numbers are positive.
template <int kFault>
__global__ __launch_bounds__(kWave) void count_positive(const float* x, int* out) {
  const std::uint64_t lanes = __ballot(x[blockIdx.x * kWave + threadIdx.x] > 0.0f);
  if (threadIdx.x == 0) out[blockIdx.x] = __popcll(kFault == kBallotOf32Bits ? lanes & 0xffffffffull : lanes);
}

/// The block that program `id` of `count` takes, so that each of 8 dies has neighbours: the first count % 8 get one more.
template <int kFault>
__device__ int remapped(int id, int count) {
  const int die = id % 8, step = id / 8, each = count / 8, rest = count % 8;
  if (kFault == kNaiveRemap) return die * each + step;
  return die * each + (die < rest ? die : rest) + step;
}

/// out = x as bf16, 64 numbers a block; in pairs, each lane writes every other word.
template <int kFault>
__global__ __launch_bounds__(kWave) void to_bf16(const float* x, std::uint16_t* out, int n) {
  const int at = remapped<kFault>(blockIdx.x, gridDim.x) * kWave + threadIdx.x;
  const int from = kFault == kHalvesSwapped ? at ^ 1 : at;
  if (kFault == kNoMask || at < n) {
    const float value = from < n ? x[from] : 0.0f;
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    out[at] = static_cast<std::uint16_t>(bits >> 16);
  }
  if (kFault == kReadsNeighbour && at == n - 1) out[at] = out[0];
}

/// out (16,16) = xᵀ, by way of LDS, whose rows lie 17 words apart.
template <int kFault>
__global__ __launch_bounds__(kThreads) void transpose(const float* x, float* out) {
  constexpr int kStride = kFault == kLdsStride ? 15 : 17;
  __shared__ float tile[16 * 17];
  const int row = threadIdx.x / 16, column = threadIdx.x % 16;
  tile[row * kStride + column] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[column * kStride + row];
}

/// out (32,32) = a (32,k) · b (32,k)ᵀ in bf16, one wave.
template <int kFault>
__global__ __launch_bounds__(kWave) void product(const std::uint16_t* a, const std::uint16_t* b, float* out, int k) {
  using Halves = __attribute__((__vector_size__(8))) short;
  using Accumulators = __attribute__((__vector_size__(64))) float;
  const int column = threadIdx.x % 32, group = threadIdx.x / 32;
  Accumulators sum = {};
  for (int first = 4 * group; first < k; first += 8) {
    const Halves left = *reinterpret_cast<const Halves*>(a + column * k + first);
    const Halves right = *reinterpret_cast<const Halves*>(b + column * k + first);
    sum = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(left, right, sum, 0, 0, 0);
  }
  for (int i = 0; i < 16; ++i) {
    int row = 8 * (i / 4) + 4 * group + i % 4;
    if (kFault == kMatrixLayout) row = 16 * group + i;
    if (kFault == kMatrixOneRowDown) row += 1;
    out[row * 32 + column] = sum[i];
  }
}

template <int kFault>
void run_with(const char* kernel, const void* a, const void* b, void* out, int blocks, int n) {
  const auto* x = static_cast<const float*>(a);
  const auto* left = static_cast<const std::uint16_t*>(a);
  const auto* right = static_cast<const std::uint16_t*>(b);
  switch (kernel[0]) {
    case 'l':
      return log_sum_exp<kFault><<<blocks, kThreads>>>(x, static_cast<float*>(out), n);
    case 'c':
      return count_positive<kFault><<<blocks, kWave>>>(x, static_cast<int*>(out));
    case 'b':
      return to_bf16<kFault><<<blocks, kWave>>>(x, static_cast<std::uint16_t*>(out), n);
    case 't':
      return transpose<kFault><<<1, kThreads>>>(x, static_cast<float*>(out));
    default:
      return product<kFault><<<1, kWave>>>(left, right, static_cast<float*>(out), n);
  }
}

template <int... kFaults>
void run_any(int fault, std::integer_sequence<int, kFaults...>, const char* kernel, const void* a, const void* b,
             void* out, int blocks, int n) {
  ((fault == kFaults ? run_with<kFaults>(kernel, a, b, out, blocks, n) : void()), ...);
}

}  // namespace

/// kernel: its first letter, "b" for to_bf16.
extern "C" void run(int fault, const char* kernel, const void* a, const void* b, void* out, int blocks, int n) {
  run_any(fault, std::make_integer_sequence<int, kReadsNeighbour + 1>(), kernel, a, b, out, blocks, n);
}
