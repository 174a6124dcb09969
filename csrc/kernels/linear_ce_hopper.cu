// Linear cross-entropy's three matrix products on Hopper: one template, an epilogue each.
#include "linear_ce_hopper.h"

#if defined(__HIP__)

namespace fusedce {
namespace {
constexpr const char* kNoHopper = "this build is for AMD GPUs";
}
int hopper_vocab_tile() { return 0; }
const char* launch_logit_sums(const Bf16Rows&, const Bf16Rows&, const LogitTerms&, const float*, const LogitSumsOut&,
                              void*) {
  return kNoHopper;
}
const char* launch_logit_gradient(const Bf16Rows&, const Bf16Rows&, const LogitTerms&, const float*, bool,
                                  const Bf16Rows&, void*) {
  return kNoHopper;
}
const char* launch_seeded_exponentials(const Bf16Rows&, const Bf16Rows&, const LogitTerms&, const LogitSeeds&,
                                       const Bf16Rows&, float*, void*) {
  return kNoHopper;
}
const char* launch_d_hidden(const Bf16Rows&, const Bf16Rows&, const float*, const Bf16Rows&, void*) {
  return kNoHopper;
}
const char* launch_d_weight(const Bf16Rows&, const Bf16Rows&, float*, bool, void*) { return kNoHopper; }
}  // namespace fusedce

#else

#include "hopper_logits.cuh"

namespace fusedce {
namespace hopper {

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
    for (int h = 0; h < 2; ++h)
      scale_[h] = args.scale && at.row + 8 * h < args.num_rows ? args.scale[at.row + 8 * h] : 1.0f;
  }
  __device__ void prepare(float (&)[kAccumulators]) const {}
  __device__ void apply(float* d, int) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i] *= scale_[i % 4 / 2];
  }
  template <int kPart>
  __device__ void end_part(float (&)[kAccumulators]) const {}
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
  template <int kPart>
  __device__ void end_part(float (&)[kAccumulators]) const {}
  __device__ void finish() const {}
};

inline Matrix matrix(const Bf16Rows& rows) { return {rows.data, rows.rows, rows.columns, rows.stride}; }

/// Turns the launch's choices into a kernel's flags, one after the other.
template <template <bool...> class Epilogue, bool... kFlags, typename Args, std::size_t kCount>
const char* launch_logits(const bool (&choices)[kCount], const Bf16Rows& hidden, const Bf16Rows& weight,
                          const Bf16Rows& out, const Args& args, void* stream) {
  if constexpr (sizeof...(kFlags) == kCount) {
    // Neighbours in time share a tile of the vocabulary: the rows of hidden stay in L2, and weight is read once.
    using G = Gemm<Major::kK, Major::kK, true, Epilogue<kFlags...>>;
    return launch_gemm<G>(matrix(hidden), matrix(weight), matrix(out), args, stream);
  } else {
    return choices[sizeof...(kFlags)]
               ? launch_logits<Epilogue, kFlags..., true>(choices, hidden, weight, out, args, stream)
               : launch_logits<Epilogue, kFlags..., false>(choices, hidden, weight, out, args, stream);
  }
}

inline LogitsArgs logits_args(const LogitTerms& terms, const Bf16Rows& hidden, const Bf16Rows& weight) {
  return {terms, hidden.rows, static_cast<int>(weight.rows)};
}

}  // namespace hopper

int hopper_vocab_tile() { return hopper::kTileN; }

const char* launch_logit_sums(const Bf16Rows& hidden, const Bf16Rows& weight, const LogitTerms& terms,
                              const float* inv_temperature, const LogitSumsOut& out, void* stream) {
  using namespace hopper;
  const LogitSumsArgs args{logits_args(terms, hidden, weight), inv_temperature, out};
  return launch_logits<LogitSums>({terms.bias != nullptr, terms.softcap > 0.0f, out.gap != nullptr}, hidden, weight, {},
                                  args, stream);
}

const char* launch_logit_gradient(const Bf16Rows& hidden, const Bf16Rows& weight, const LogitTerms& terms,
                                  const float* numbers, bool with_entropy, const Bf16Rows& d_logits, void* stream) {
  using namespace hopper;
  const LogitGradientArgs args{logits_args(terms, hidden, weight), numbers};
  return launch_logits<LogitGradient>({terms.bias != nullptr, terms.softcap > 0.0f, with_entropy}, hidden, weight,
                                      d_logits, args, stream);
}

const char* launch_seeded_exponentials(const Bf16Rows& hidden, const Bf16Rows& weight, const LogitTerms& terms,
                                       const LogitSeeds& seeds, const Bf16Rows& exponentials, float* sums,
                                       void* stream) {
  using namespace hopper;
  const SeededArgs args{logits_args(terms, hidden, weight), seeds, sums};
  return launch_logits<SeededExponentials>({terms.bias != nullptr, terms.softcap > 0.0f}, hidden, weight, exponentials,
                                           args, stream);
}

const char* launch_d_hidden(const Bf16Rows& d_logits, const Bf16Rows& weight, const float* row_scale,
                            const Bf16Rows& d_hidden, void* stream) {
  using namespace hopper;
  using G = Gemm<Major::kK, Major::kMN, true, ScaledRows>;
  return launch_gemm<G>(matrix(d_logits), matrix(weight), matrix(d_hidden), {row_scale, d_logits.rows}, stream);
}

const char* launch_d_weight(const Bf16Rows& d_logits, const Bf16Rows& hidden, float* d_weight, bool accumulate,
                            void* stream) {
  using namespace hopper;
  // Neighbours in time share the columns of d_logits: they are read once, and hidden stays in L2.
  const Matrix out{d_weight, d_logits.columns, hidden.columns, hidden.columns};
  if (accumulate) {
    using G = Gemm<Major::kMN, Major::kMN, false, Plain<true>>;
    return launch_gemm<G>(matrix(d_logits), matrix(hidden), out, {}, stream);
  }
  using G = Gemm<Major::kMN, Major::kMN, false, Plain<false>>;
  return launch_gemm<G>(matrix(d_logits), matrix(hidden), out, {}, stream);
}

}  // namespace fusedce

#endif
