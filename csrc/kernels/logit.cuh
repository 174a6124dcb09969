// One raw logit, from what a GEMM has written, its bias and the softcap: shared by the kernels that read rows of
// logits.
#pragma once

#include <cmath>

#include "row.cuh"

namespace fusedce {

struct Logit {
  float raw;
  float slope;  // d_raw/dx
};

template <bool kSoftcap>
__device__ inline Logit logit_of(float plain, float bias, float softcap) {
  const float x = plain + bias;
  if (!kSoftcap) return {x, 1.0f};
  const float bent = tanhf(x * (1.0f / softcap));  // one division a thread, not one a logit
  return {softcap * bent, 1.0f - bent * bent};
}

/// The column of a label or an id, or −1 if it is out of range.
__device__ inline int column_of(std::int64_t target, int vocab) {
  return target >= 0 && target < vocab ? static_cast<int>(target) : -1;
}

/// bias: (vocab,) or nullptr, as in bias4_at().
__device__ inline float bias_at(const float* bias, int column) { return bias ? bias[column] : 0.0f; }

__device__ inline Logits4 bias4_at(const float* bias, int column) {
  if (!bias) return Logits4{};
  return load4(bias + column, is_aligned<float, kVectorWidth>(bias + column));
}

}  // namespace fusedce
