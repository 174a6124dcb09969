// The running-max online log-sum-exp of one row, and what becomes of it: shared by the kernels that reduce logits.
//
// A logit is "raw" here: after bias and softcap, before the temperature. With slope = 1/temperature, gaps
// (raw − m)·slope to the maximum m are summed, not logits: they keep their digits where all logits are large. The
// target is left out of the sums and joins them last: log p_y = −log(1 + rest / e^(z_y)) is exact where p_y is near 1,
// and never above 0.
#pragma once

#include <cmath>

#include "gpu.h"

namespace fusedce {

/// Sums over logits about their maximum m.
struct OnlineSums {
  float max;
  float exp;  // Σ e^g, with g = (raw − m)·slope
  float gap;  // Σ e^g·g
};

__device__ inline OnlineSums no_sums() { return {-INFINITY, 0.0f, 0.0f}; }

/// What is subtracted from logits: their maximum, but 0 while there is none, because −inf − (−inf) is NaN.
__device__ inline float shift_of(float max) { return max == -INFINITY ? 0.0f : max; }

/// The same sums about `max`, which is no smaller than their own.
__device__ inline OnlineSums about(const OnlineSums& sums, float max, float slope) {
  const float moved = sums.max == -INFINITY ? 0.0f : (sums.max - max) * slope;
  const float factor = expf(moved);
  // Select: where the factor is 0, `moved` may be −inf.
  return {max, sums.exp * factor, factor == 0.0f ? 0.0f : (sums.gap + sums.exp * moved) * factor};
}

__device__ inline OnlineSums merged(const OnlineSums& left, const OnlineSums& right, float slope) {
  const float max = fmaxf(left.max, right.max);
  const OnlineSums a = about(left, max, slope);
  const OnlineSums b = about(right, max, slope);
  return {max, a.exp + b.exp, a.gap + b.gap};
}

/// `merged` of one row, for block_reduce().
struct MergeSums {
  float slope;
  __device__ OnlineSums operator()(const OnlineSums& left, const OnlineSums& right) const {
    return merged(left, right, slope);
  }
};

/// A row's results. Probabilities of its words are e^((raw − shift)·slope − log_sum).
struct RowResult {
  float logprob;
  float entropy;
  float lse;
  float shift;
  float log_sum;
};

/// From the sums over all words but the target, and the target's raw logit: NaN makes all of it NaN.
__device__ inline RowResult with_target(const OnlineSums& others, float raw_target, float slope) {
  const float shift = shift_of(fmaxf(others.max, raw_target));
  const OnlineSums rest = about(others, shift, slope);
  const float gap = (raw_target - shift) * slope;
  const float of_target = expf(gap);
  const float total = rest.exp + of_target;
  const bool likely = of_target >= rest.exp && of_target > 0.0f;
  const float log1p_rest = log1pf(rest.exp / of_target);
  const float log_sum = likely ? log1p_rest + gap : logf(total);
  const float gaps = rest.gap + (of_target == 0.0f ? 0.0f : of_target * gap);
  return {likely ? -log1p_rest : gap - log_sum, log_sum - gaps / total, shift * slope + log_sum, shift, log_sum};
}

}  // namespace fusedce
