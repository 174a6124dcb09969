// Epilogues of hopper_gemm.cuh for which a product is a logit: bias and softcap make it "raw", and then it is summed,
// or turned into its gradient, or into an exponential about a seed. What reaches past the vocabulary, and the row's
// target, are rare: a tile that has neither does not look at columns.
//
// Exponentials are to base 2, of (raw − reference)·slope2 with slope2 = log₂e·inv_temperature: subtracted first, logits
// with a large common offset keep their digits.
#pragma once

#include <cmath>

#include "hopper_gemm.cuh"
#include "linear_ce_hopper.h"

namespace fusedce {
namespace hopper {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kNoExponent = -200.0f;  // 2^−200 is 0 in fp32, and 0·(−200) is 0 where 0·(−inf) is not

struct LogitsArgs {
  LogitTerms terms;
  std::int64_t num_rows;
  int vocab;
};

/// Over the four threads that hold a row's columns.
template <typename Merge>
__device__ inline float over_row(float value, Merge merge) {
  value = merge(value, from_other_lane(value, 1));
  return merge(value, from_other_lane(value, 2));
}

/// Raw logits of a thread's accumulators, 16 columns of the tile at a time.
template <bool kBias, bool kSoftcap>
class RawLogits {
 public:
  __device__ RawLogits(const LogitsArgs& args, const Fragment& at)
      : args_(args), at_(at), last_(args.vocab - at.column) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t row = at.row + 8 * h;
      const std::int64_t label = row < args.num_rows ? args.terms.target[row] : -1;
      const std::int64_t target = label - at.column;
      // A label past the vocabulary lies in the last tile's columns: it is no target, or its row would look right.
      target_[h] = label < args.vocab && target >= 0 && target < kTileN ? static_cast<int>(target) : -1;
    }
    if constexpr (kBias) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = at.tile_n * kTileN + at.thread + i * kGroup;
        bias_[i] = column < args.vocab ? args.terms.bias[column] : 0.0f;
      }
    }
  }

  /// Before the first of the functions below: the group's threads share the bias of the tile's columns.
  __device__ void share_bias() const {
    if constexpr (kBias) {
      sync_named(at_.barrier, kGroup);  // the tile before has been read
#pragma unroll
      for (int i = 0; i < 2; ++i) at_.scratch[at_.thread + i * kGroup] = bias_[i];
      sync_named(at_.barrier, kGroup);
    }
  }

  /// d: 8 accumulators, of columns 8j to 8j + 15. They become raw; slope: d_raw/dx, untouched without a softcap.
  __device__ void make_raw(float* d, int j, float (&slope)[8]) const {
    if constexpr (kBias) {
#pragma unroll
      for (int i = 0; i < 8; ++i) d[i] += at_.scratch[8 * (j + i / 4) + at_.column % 8 + i % 2];
    }
    if constexpr (kSoftcap) {
#pragma unroll
      for (int h = 0; h < 2; ++h) cap(d, slope, 2 * h);
    }
  }

  /// Whether a column past the vocabulary or a row's target may be among this thread's.
  __device__ bool has_special() const { return target_[0] >= 0 || target_[1] >= 0 || last_ < kTileN; }
  /// Of accumulator i of the tile: row + 8h.
  static __device__ constexpr int half(int i) { return i % 4 / 2; }
  __device__ bool is_target(int i) const { return column(i) == target_[half(i)]; }
  __device__ bool is_outside(int i) const { return column(i) >= last_; }

 private:
  static __device__ constexpr int column(int i) { return i / 4 * 8 + i % 2; }  // counted from the thread's first

  /// The four words of a row, from `first` on. tanh(u) = 1 − s with s = 2/(e^2u + 1), and its slope is s·(2 − s). They
  /// share a reciprocal: the special-function unit is what this waits for. e^2u ends at 2^31, where s is below half a
  /// unit in 1's last place, so that the product of four is a float.
  __device__ void cap(float* d, float (&slope)[8], int first) const {
    const float to_exponent = 2.0f * kLog2E / args_.terms.softcap;
    constexpr int kWords[4] = {0, 1, 4, 5};
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = exp2_fast(min_or_nan(d[first + kWords[i]] * to_exponent, 31.0f)) + 1.0f;
    const float left = y[0] * y[1], right = y[2] * y[3];
    const float inverse = 2.0f * reciprocal_fast(left * right);
    const float of_left = inverse * right, of_right = inverse * left;
    const float s[4] = {of_left * y[1], of_left * y[0], of_right * y[3], of_right * y[2]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      d[first + kWords[i]] = fmaf(-s[i], args_.terms.softcap, args_.terms.softcap);
      slope[first + kWords[i]] = s[i] * (2.0f - s[i]);
    }
  }

  const LogitsArgs& args_;
  Fragment at_;
  int last_;       // the first column past the end, counted from this thread's
  int target_[2];  // likewise, or −1
  float bias_[2];  // of columns `thread` and `thread + kGroup` of the tile
};

// ── sums ────────────────────────────────────────────────────────────────────────────────────────────────────────────

struct LogitSumsArgs {
  LogitsArgs logits;
  const float* inv_temperature;
  LogitSumsOut out;
};

/// Products → a row's maximum over the tile, and its sums about that, without the target.
template <bool kBias, bool kSoftcap, bool kGaps>
class LogitSums {
 public:
  using Args = LogitSumsArgs;
  using Element = bf16;
  static constexpr Write kWrite = Write::kNone;

  __device__ LogitSums(const Args& args, const Fragment& at) : args_(args), at_(at), logits_(args.logits, at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t row = at.row + 8 * h;
      slope2_[h] = row < args.logits.num_rows ? args.inv_temperature[row] * kLog2E : 0.0f;
    }
  }

  __device__ void prepare(float (&d)[kAccumulators]) {
    logits_.share_bias();
    float unused[8];
#pragma unroll
    for (int j = 0; j < kAccumulators / 4; j += 2) logits_.make_raw(&d[4 * j], j, unused);
    if (logits_.has_special()) leave_out(d);
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) max_[logits_.half(i)] = fmaxf(max_[logits_.half(i)], d[i]);
#pragma unroll
    for (float& max : max_) max = over_row(max, [](float x, float y) { return fmaxf(x, y); });
  }

  __device__ void apply(float* d, int) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int h = logits_.half(i);
      // −inf − (−inf) would be NaN where a row has nothing but −inf
      const float gap = (d[i] - (max_[h] == -INFINITY ? 0.0f : max_[h])) * slope2_[h];
      const float e = exp2_fast(gap);
      exp_[h] += e;
      if constexpr (kGaps) gap_[h] = fmaf(e, fmaxf(gap, kNoExponent), gap_[h]);
    }
  }

  /// Sums of exponentials are never negative. To ask makes the compiler end one part before it begins the next: with
  /// all at once it would run out of registers, since nothing is stored between them.
  template <int kPart>
  __device__ void end_part(float (&)[kAccumulators]) const {
    if (exp_[0] < 0.0f || exp_[1] < 0.0f) __trap();
  }

  __device__ void finish() const {
    const auto sum = [](float x, float y) { return x + y; };
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float exp = over_row(exp_[h], sum);
      const float gap = kGaps ? over_row(gap_[h], sum) * kLn2 : 0.0f;
      const std::int64_t row = at_.row + 8 * h;
      if (threadIdx.x % 4 != 0 || row >= args_.logits.num_rows) continue;
      const std::int64_t at = at_.tile_n * args_.logits.num_rows + row;
      args_.out.max[at] = max_[h];
      args_.out.exp[at] = exp;
      if (kGaps) args_.out.gap[at] = gap;
    }
  }

 private:
  __device__ void leave_out(float (&d)[kAccumulators]) const {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      if (logits_.is_target(i)) args_.out.raw_target[at_.row + 8 * logits_.half(i)] = d[i];
      if (logits_.is_target(i) || logits_.is_outside(i)) d[i] = -INFINITY;
    }
  }

  const Args& args_;
  Fragment at_;
  RawLogits<kBias, kSoftcap> logits_;
  float slope2_[2];
  float max_[2] = {-INFINITY, -INFINITY};
  float exp_[2] = {0.0f, 0.0f};
  float gap_[2] = {0.0f, 0.0f};
};

// ── the gradient ────────────────────────────────────────────────────────────────────────────────────────────────────

struct LogitGradientArgs {
  LogitsArgs logits;
  const float* numbers;
};

/// Products → the loss's gradient in them.
template <bool kBias, bool kSoftcap, bool kEntropy>
class LogitGradient {
 public:
  using Args = LogitGradientArgs;
  using Element = bf16;
  static constexpr Write kWrite = Write::kStore;

  __device__ LogitGradient(const Args& args, const Fragment& at) : logits_(args.logits, at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t row = at.row + 8 * h;
      const bool inside = row < args.logits.num_rows;
      const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const float4* numbers = reinterpret_cast<const float4*>(args.numbers) + 2 * row;
      const float4 first = inside ? numbers[0] : none;
      const float4 second = inside ? numbers[1] : none;
      slope2_[h] = first.x, shift_[h] = first.y, log_sum_[h] = first.z, on_probs_[h] = first.w;
      on_target_[h] = second.x, on_surprise_[h] = second.y, entropy_[h] = second.z;
    }
  }

  __device__ void prepare(float (&d)[kAccumulators]) {
    logits_.share_bias();
    if constexpr (kSoftcap) {
      if (logits_.has_special()) bend_target(d);
    }
  }

  __device__ void apply(float* d, int j) const {
    float slope[8];
    logits_.make_raw(d, j, slope);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int h = logits_.half(i);
      const float log_p = fmaf(d[i] - shift_[h], slope2_[h], -log_sum_[h]);
      float on_p = on_probs_[h];
      if constexpr (kEntropy) on_p = fmaf(-on_surprise_[h], fmaxf(log_p, kNoExponent) + entropy_[h], on_p);
      d[i] = exp2_fast(log_p) * (kSoftcap ? on_p * slope[i] : on_p);
    }
  }

  template <int kPart>
  __device__ void end_part(float (&d)[kAccumulators]) const {
    if (!logits_.has_special()) return;
#pragma unroll
    for (int i = kPart * 32; i < (kPart + 1) * 32; ++i) {
      if (logits_.is_target(i)) d[i] = on_target_[logits_.half(i)];
      if (logits_.is_outside(i)) d[i] = 0.0f;
    }
  }

  __device__ void finish() const {}

 private:
  /// on_target is a gradient after the softcap.
  __device__ void bend_target(const float (&d)[kAccumulators]) {
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 8) {
      float words[8], slope[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) words[k] = d[i + k];
      logits_.make_raw(words, i / 4, slope);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (logits_.is_target(i + k)) on_target_[logits_.half(k)] *= slope[k];
      }
    }
  }

  RawLogits<kBias, kSoftcap> logits_;
  float slope2_[2], shift_[2], log_sum_[2], on_probs_[2], on_target_[2], on_surprise_[2], entropy_[2];
};

// ── exponentials ────────────────────────────────────────────────────────────────────────────────────────────────────

struct SeededArgs {
  LogitsArgs logits;
  LogitSeeds seeds;
  float* sums;
};

/// Products → E and its sums, without the target.
template <bool kBias, bool kSoftcap>
class SeededExponentials {
 public:
  using Args = SeededArgs;
  using Element = bf16;
  static constexpr Write kWrite = Write::kStore;

  __device__ SeededExponentials(const Args& args, const Fragment& at) : args_(args), at_(at), logits_(args.logits, at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t row = at.row + 8 * h;
      const bool inside = row < args.logits.num_rows;
      slope2_[h] = inside ? args.seeds.inv_temperature[row] * kLog2E : 0.0f;
      seed_[h] = inside ? args.seeds.seed[row] : 0.0f;
    }
  }

  /// A logit of −inf makes an exponential of 0. A softcap would bring it back: there it is put in later.
  __device__ void prepare(float (&d)[kAccumulators]) const {
    logits_.share_bias();
    if constexpr (!kSoftcap) {
      if (logits_.has_special()) {
#pragma unroll
        for (int j = 0; j < kAccumulators / 4; j += 2) leave_out(&d[4 * j], j);
      }
    }
  }

  __device__ void apply(float* d, int j) {
    float slope[8];
    logits_.make_raw(d, j, slope);
    if constexpr (kSoftcap) {
      if (logits_.has_special()) leave_out(d, j);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int h = logits_.half(i);
      const float e = exp2_fast((d[i] - seed_[h]) * slope2_[h]);
      exp_[h] += e;
      d[i] = kSoftcap ? e * slope[i] : e;
    }
  }

  template <int kPart>
  __device__ void end_part(float (&)[kAccumulators]) const {}

  __device__ void finish() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float exp = over_row(exp_[h], [](float x, float y) { return x + y; });
      const std::int64_t row = at_.row + 8 * h;
      if (threadIdx.x % 4 != 0 || row >= args_.logits.num_rows) continue;
      args_.sums[at_.tile_n * args_.logits.num_rows + row] = exp;
    }
  }

 private:
  __device__ void leave_out(float* d, int j) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (logits_.is_target(4 * j + i) || logits_.is_outside(4 * j + i)) d[i] = -INFINITY;
    }
  }

  const Args& args_;
  Fragment at_;
  RawLogits<kBias, kSoftcap> logits_;
  float slope2_[2];
  float seed_[2];
  float exp_[2] = {0.0f, 0.0f};
};

}  // namespace hopper
}  // namespace fusedce
