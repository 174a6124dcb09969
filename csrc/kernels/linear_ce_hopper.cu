// Linear cross-entropy's three matrix products on Hopper: one template, three epilogues.
#include "linear_ce_hopper.h"

#include <cfloat>
#include <cmath>

#if defined(__HIP__)

namespace fusedce {
namespace {
constexpr const char* kNoHopper = "this build is for AMD GPUs";
}
int hopper_vocab_tile() { return 0; }
const char* launch_seeded_exponentials(const Bf16Rows&, const Bf16Rows&, const LogitSeeds&, const Bf16Rows&,
                                       const PartialSums&, void*) {
  return kNoHopper;
}
const char* launch_d_hidden(const Bf16Rows&, const Bf16Rows&, const float*, const Bf16Rows&, void*) {
  return kNoHopper;
}
const char* launch_d_weight(const Bf16Rows&, const Bf16Rows&, float*, bool, void*) { return kNoHopper; }
}  // namespace fusedce

#else

#include "hopper_gemm.cuh"

namespace fusedce {
namespace hopper {

struct SeededArgs {
  LogitSeeds seeds;
  PartialSums sums;
  std::int64_t num_rows;
  int vocab;
};

/// Products → E and its sums. In base 2: e = 2^(x·scale + offset), one multiply-add and one special-function
/// instruction where there is no softcap.
template <bool kBias, bool kSoftcap, bool kStore, bool kGaps>
class SeededExponentials {
 public:
  using Args = SeededArgs;
  using Element = bf16;
  static constexpr Write kWrite = kStore ? Write::kStore : Write::kNone;
  static constexpr float kLog2E = 1.4426950408889634f;
  static constexpr float kLn2 = 0.6931471805599453f;

  __device__ SeededExponentials(const Args& args, const Fragment& at) : args_(args), at_(at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t row = at.row + 8 * h;
      const bool inside = row < args.num_rows;
      scale_[h] = inside ? args.seeds.inv_temperature[row] * kLog2E : 0.0f;
      offset_[h] = inside ? -args.seeds.seed[row] * kLog2E : 0.0f;
      const std::int64_t target = (inside ? args.seeds.target[row] : -1) - at.column;
      target_[h] = target >= 0 && target < kTileN ? static_cast<int>(target) : -1;
    }
    if constexpr (kBias) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = at.tile_n * kTileN + at.thread + i * kGroup;
        bias_[i] = column < args.vocab ? args.seeds.bias[column] : 0.0f;
      }
    }
  }

  /// A product of −inf makes an exponential of 0: the target's, and those past the vocabulary.
  __device__ void prepare(float (&d)[kAccumulators]) const {
    if constexpr (kBias) {
      sync_named(at_.barrier, kGroup);  // the tile before has been read
#pragma unroll
      for (int i = 0; i < 2; ++i) at_.scratch[at_.thread + i * kGroup] = bias_[i];
      sync_named(at_.barrier, kGroup);
    }
    const int last = args_.vocab - at_.column;  // the first column past the end, counted from this thread's
    if (target_[0] < 0 && target_[1] < 0 && last >= kTileN) return;
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      const int column = i / 4 * 8 + i % 2;
      if (column == target_[i % 4 / 2] || column >= last) d[i] = -INFINITY;
    }
  }

  __device__ void apply(float* d, int j) {
    float bias[2] = {0.0f, 0.0f};
    if constexpr (kBias) {
#pragma unroll
      for (int b = 0; b < 2; ++b) bias[b] = at_.scratch[8 * j + at_.column % 8 + b];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kSoftcap) {
        capped(&d[2 * h], bias, h);
      } else {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          float& x = d[2 * h + b];
          x = exponential(fmaf(kBias ? x + bias[b] : x, scale_[h], offset_[h]), h);
        }
      }
    }
  }

  /// Sums of exponentials are never negative. To ask makes the compiler end one part before it begins the next: with
  /// all at once it would run out of registers where nothing is stored between them.
  __device__ void end_part() const {
    if (!kStore && (exp_[0] < 0.0f || exp_[1] < 0.0f)) __trap();
  }

  /// Over the four threads that hold a row's columns; one writes.
  __device__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float exp = over_row(exp_[h]);
      const float gap = kGaps ? over_row(gap_[h]) * kLn2 : 0.0f;
      const std::int64_t row = at_.row + 8 * h;
      if (threadIdx.x % 4 != 0 || row >= args_.num_rows) continue;
      args_.sums.exp[at_.tile_n * args_.num_rows + row] = exp;
      if (kGaps) args_.sums.gap[at_.tile_n * args_.num_rows + row] = gap;
    }
  }

 private:
  /// tanh(u) = 1 − y with y = 2/(e^2u + 1), and its slope is 1 − tanh² = y·(2 − y). Two columns share a reciprocal: the
  /// special-function unit is what this waits for.
  __device__ void capped(float* d, const float (&bias)[2], int h) {
    const float to_exponent = 2.0f * kLog2E / args_.seeds.softcap;
    float y[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      y[b] = exp2_fast(min_or_nan((kBias ? d[b] + bias[b] : d[b]) * to_exponent, 60.0f)) + 1.0f;
    }
    const float inverse = 2.0f * reciprocal_fast(y[0] * y[1]);
    const float swapped[2] = {inverse * y[1], inverse * y[0]};
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float exponent = fmaf((1.0f - swapped[b]) * args_.seeds.softcap, scale_[h], offset_[h]);
      d[b] = exponential(d[b] == -INFINITY ? -INFINITY : exponent, h) * (swapped[b] * (2.0f - swapped[b]));
    }
  }

  __device__ float exponential(float exponent, int h) {
    const float e = exp2_fast(exponent);
    exp_[h] += e;
    if constexpr (kGaps) gap_[h] = fmaf(e, fmaxf(exponent, -FLT_MAX), gap_[h]);  // 0·−inf would be NaN
    return e;
  }

  static __device__ float over_row(float sum) {
    sum += from_other_lane(sum, 1);
    return sum + from_other_lane(sum, 2);
  }

  const Args& args_;
  Fragment at_;
  float scale_[2];
  float offset_[2];
  int target_[2];
  float bias_[2];  // of columns `thread` and `thread + kGroup` of the tile
  float exp_[2] = {0.0f, 0.0f};
  float gap_[2] = {0.0f, 0.0f};
};

/// Products times a factor of their row, as bf16.
class ScaledRows {
 public:
  struct Args {
    const float* scale;
    std::int64_t num_rows;
  };
  using Element = bf16;
  static constexpr Write kWrite = Write::kStore;

  __device__ ScaledRows(const Args& args, const Fragment& at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) scale_[h] = at.row + 8 * h < args.num_rows ? args.scale[at.row + 8 * h] : 0.0f;
  }
  __device__ void prepare(float (&)[kAccumulators]) const {}
  __device__ void apply(float* d, int) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] *= scale_[i / 2];
  }
  __device__ void end_part() const {}
  __device__ void finish() const {}

 private:
  float scale_[2];
};

/// The products themselves, fp32.
template <bool kAccumulate>
class Plain {
 public:
  struct Args {};
  using Element = float;
  static constexpr Write kWrite = kAccumulate ? Write::kAdd : Write::kStore;

  __device__ Plain(const Args&, const Fragment&) {}
  __device__ void prepare(float (&)[kAccumulators]) const {}
  __device__ void apply(float*, int) const {}
  __device__ void end_part() const {}
  __device__ void finish() const {}
};

inline Matrix matrix(const Bf16Rows& rows) { return {rows.data, rows.rows, rows.columns, rows.stride}; }

/// Turns the launch's choices into a kernel's flags, one after the other.
template <bool... kFlags>
const char* launch_seeded(const Bf16Rows& hidden, const Bf16Rows& weight, const Bf16Rows& out, const SeededArgs& args,
                          void* stream) {
  if constexpr (sizeof...(kFlags) == 4) {
    // Neighbours in time share a tile of the vocabulary: the rows of hidden stay in L2, and weight is read once.
    using G = Gemm<Major::kK, Major::kK, true, SeededExponentials<kFlags...>>;
    return launch_gemm<G>(matrix(hidden), matrix(weight), matrix(out), args, stream);
  } else {
    const bool choices[4] = {args.seeds.bias != nullptr, args.seeds.softcap > 0.0f, out.data != nullptr,
                             args.sums.gap != nullptr};
    return choices[sizeof...(kFlags)] ? launch_seeded<kFlags..., true>(hidden, weight, out, args, stream)
                                      : launch_seeded<kFlags..., false>(hidden, weight, out, args, stream);
  }
}

}  // namespace hopper

int hopper_vocab_tile() { return hopper::kTileN; }

const char* launch_seeded_exponentials(const Bf16Rows& hidden, const Bf16Rows& weight, const LogitSeeds& seeds,
                                       const Bf16Rows& exponentials, const PartialSums& sums, void* stream) {
  return hopper::launch_seeded<>(hidden, weight, exponentials,
                                 {seeds, sums, hidden.rows, static_cast<int>(weight.rows)}, stream);
}

const char* launch_d_hidden(const Bf16Rows& exponentials, const Bf16Rows& weight, const float* row_scale,
                            const Bf16Rows& d_hidden, void* stream) {
  using namespace hopper;
  using G = Gemm<Major::kK, Major::kMN, true, ScaledRows>;
  return launch_gemm<G>(matrix(exponentials), matrix(weight), matrix(d_hidden), {row_scale, exponentials.rows}, stream);
}

const char* launch_d_weight(const Bf16Rows& exponentials, const Bf16Rows& hidden, float* d_weight, bool accumulate,
                            void* stream) {
  using namespace hopper;
  // Neighbours in time share the columns of E: they are read once, and hidden stays in L2.
  const Matrix out{d_weight, exponentials.columns, hidden.columns, hidden.columns};
  if (accumulate) {
    using G = Gemm<Major::kMN, Major::kMN, false, Plain<true>>;
    return launch_gemm<G>(matrix(exponentials), matrix(hidden), out, {}, stream);
  }
  using G = Gemm<Major::kMN, Major::kMN, false, Plain<false>>;
  return launch_gemm<G>(matrix(exponentials), matrix(hidden), out, {}, stream);
}

}  // namespace fusedce

#endif
