// torch.ops.fusedce_native: linear cross-entropy about a seed, Hopper's matrix products and the rows between them, as
// ops that write into tensors they are given.
#include <torch/library.h>

#include <limits>
#include <optional>
#include <type_traits>

#include "../kernels/linear_ce_hopper.h"
#include "../kernels/linear_ce_seeded.h"
#include "launch.h"

namespace fusedce {
namespace {

using at::Tensor;
using std::optional;

constexpr std::int64_t kMaxVocab = std::int64_t{1} << 30;  // columns are int, with room for a block's last step

/// The arguments of one call, looked at by name: each check is an error that names op and argument.
class Arguments {
 public:
  Arguments(const char* op, c10::Device device) : op_(op), device_(device) {}

  /// A dense tensor of these sizes.
  template <typename T>
  T* dense(const char* name, const Tensor& tensor, at::IntArrayRef sizes) const {
    constexpr auto kDtype = c10::CppTypeToScalarType<std::remove_const_t<T>>::value;
    TORCH_CHECK(tensor.scalar_type() == kDtype && tensor.sizes() == sizes && tensor.is_contiguous(), "fusedce_native.",
                op_, ": argument '", name, "' has shape ", tensor.sizes(), ", strides ", tensor.strides(),
                " and dtype ", tensor.scalar_type(), "; expected contiguous ", sizes, " of ", kDtype);
    on_device(name, tensor);
    if constexpr (std::is_const_v<T>) {
      return tensor.const_data_ptr<std::remove_const_t<T>>();
    } else {
      return tensor.mutable_data_ptr<T>();
    }
  }

  template <typename T>
  T* dense(const char* name, const optional<Tensor>& tensor, at::IntArrayRef sizes) const {
    return tensor ? dense<T>(name, *tensor, sizes) : nullptr;
  }

  /// A bf16 matrix of these sizes, of which a copy engine can move tiles: dense rows that start at multiples of 16
  /// bytes and do not overlap.
  Bf16Rows rows(const char* name, const Tensor& matrix, std::int64_t num_rows, std::int64_t columns) const {
    TORCH_CHECK(matrix.scalar_type() == at::kBFloat16 && matrix.sizes() == at::IntArrayRef({num_rows, columns}) &&
                    num_rows >= 1 && columns >= 1,
                "fusedce_native.", op_, ": argument '", name, "' has shape ", matrix.sizes(), " and dtype ",
                matrix.scalar_type(), "; expected (", num_rows, ", ", columns, "), not empty, of ", at::kBFloat16);
    TORCH_CHECK((columns == 1 || matrix.stride(1) == 1) && matrix.stride(0) >= columns && matrix.stride(0) % 8 == 0 &&
                    reinterpret_cast<std::uintptr_t>(matrix.const_data_ptr()) % 16 == 0,
                "fusedce_native.", op_, ": argument '", name, "' has strides ", matrix.strides(),
                "; expected dense rows that start at multiples of 16 bytes");
    on_device(name, matrix);
    return {matrix.const_data_ptr(), num_rows, columns, matrix.stride(0)};
  }

  /// The same of a matrix that is written.
  Bf16Rows written(const char* name, Tensor& matrix, std::int64_t num_rows, std::int64_t columns) const {
    Bf16Rows out = rows(name, matrix, num_rows, columns);
    out.data = matrix.mutable_data_ptr();
    return out;
  }

  void between(const char* name, double value, double least, double most) const {
    TORCH_CHECK(value >= least && value <= most, "fusedce_native.", op_, ": ", name, " is ", value, "; expected ",
                least, " to ", most);
  }

 private:
  void on_device(const char* name, const Tensor& tensor) const {
    TORCH_CHECK(tensor.device() == device_, "fusedce_native.", op_, ": argument '", name, "' is on ", tensor.device(),
                ", expected ", device_);
  }

  const char* op_;
  c10::Device device_;
};

/// What all ops but the gradients' products are given of a chunk.
struct Chunk {
  const Tensor& hidden;
  const Tensor& weight;
  const optional<Tensor>& bias;
  const Tensor& target;
  const Tensor& inv_temperature;
  std::int64_t ignore_index;
  double softcap;

  SeededChunk checked(const Arguments& arguments) const {
    TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2, "fusedce_native: hidden and weight are no matrices");
    const auto num_rows = hidden.size(0);
    const auto depth = hidden.size(1);
    const auto vocab = weight.size(0);
    arguments.between("vocab", static_cast<double>(vocab), 1, static_cast<double>(kMaxVocab));
    arguments.between("softcap", softcap, 0, std::numeric_limits<float>::max());
    TORCH_CHECK(depth % 8 == 0, "fusedce_native: hidden has ", depth, " columns; expected a multiple of 8");
    const Bf16Rows x = arguments.rows("hidden", hidden, num_rows, depth);
    const Bf16Rows w = arguments.rows("weight", weight, vocab, depth);
    return {const_cast<void*>(x.data),  // seeded_scale alone writes it, and puts its own pointer here
            w.data,
            arguments.dense<const float>("bias", bias, {vocab}),
            arguments.dense<const std::int64_t>("target", target, {num_rows}),
            arguments.dense<const float>("inv_temperature", inv_temperature, {num_rows}),
            num_rows,
            x.stride,
            w.stride,
            ignore_index,
            static_cast<int>(vocab),
            static_cast<int>(depth),
            static_cast<float>(softcap)};
  }
};

void target_logits(const Tensor& hidden, const Tensor& weight, const optional<Tensor>& bias, const Tensor& target,
                   const Tensor& inv_temperature, std::int64_t ignore_index, double softcap, Tensor& raw_target,
                   Tensor& seed) {
  const Arguments arguments("target_logits", weight.device());
  const auto chunk = Chunk{hidden, weight, bias, target, inv_temperature, ignore_index, softcap}.checked(arguments);
  const SeededRows rows{arguments.dense<float>("raw_target", raw_target, {chunk.num_rows}),
                        arguments.dense<float>("seed", seed, {chunk.num_rows}), nullptr, nullptr, nullptr};
  launch_on(weight.device(), "target_logits", [&](void* s) { return launch_target_logits(chunk, rows, s); });
}

void seeded_exponentials(const Tensor& hidden, const Tensor& weight, const optional<Tensor>& bias, const Tensor& target,
                         const Tensor& inv_temperature, std::int64_t ignore_index, double softcap, const Tensor& seed,
                         Tensor& exponentials, Tensor& partial) {
  const Arguments arguments("seeded_exponentials", weight.device());
  const auto chunk = Chunk{hidden, weight, bias, target, inv_temperature, ignore_index, softcap}.checked(arguments);
  const std::int64_t tiles = (chunk.vocab + hopper_vocab_tile() - 1) / hopper_vocab_tile();
  const LogitSeeds seeds{chunk.bias, chunk.inv_temperature,
                         arguments.dense<const float>("seed", seed, {chunk.num_rows}), chunk.target, chunk.softcap};
  const PartialSums sums{arguments.dense<float>("partial", partial, {tiles, chunk.num_rows}), nullptr};
  const Bf16Rows x{chunk.hidden, chunk.num_rows, chunk.depth, chunk.hidden_stride};
  const Bf16Rows w{chunk.weight, chunk.vocab, chunk.depth, chunk.weight_stride};
  const Bf16Rows out = arguments.written("exponentials", exponentials, chunk.num_rows, chunk.vocab);
  launch_on(weight.device(), "seeded_exponentials",
            [&](void* s) { return launch_seeded_exponentials(x, w, seeds, out, sums, s); });
}

void seeded_statistics(const Tensor& hidden, const Tensor& weight, const optional<Tensor>& bias, const Tensor& target,
                       const Tensor& inv_temperature, std::int64_t ignore_index, double softcap, const Tensor& partial,
                       const Tensor& raw_target, Tensor& seed, Tensor& exponentials, Tensor& rest, Tensor& logprob,
                       Tensor& lse) {
  const Arguments arguments("seeded_statistics", weight.device());
  const auto chunk = Chunk{hidden, weight, bias, target, inv_temperature, ignore_index, softcap}.checked(arguments);
  const auto num_rows = chunk.num_rows;
  const SeededRows rows{
      const_cast<float*>(arguments.dense<const float>("raw_target", raw_target, {num_rows})),
      arguments.dense<float>("seed", seed, {num_rows}), arguments.dense<float>("rest", rest, {num_rows}),
      arguments.dense<float>("logprob", logprob, {num_rows}), arguments.dense<float>("lse", lse, {num_rows})};
  const auto num_tiles = partial.dim() == 2 ? partial.size(0) : 0;
  const float* sums = arguments.dense<const float>("partial", partial, {num_tiles, num_rows});
  const Bf16Rows out = arguments.written("exponentials", exponentials, num_rows, chunk.vocab);
  launch_on(weight.device(), "seeded_statistics", [&](void* s) {
    return launch_seeded_statistics(chunk, rows, sums, static_cast<int>(num_tiles),
                                    {const_cast<void*>(out.data), out.stride}, s);
  });
}

void seeded_scale(Tensor& hidden, const Tensor& weight, const optional<Tensor>& bias, const Tensor& target,
                  const Tensor& inv_temperature, std::int64_t ignore_index, double softcap, const Tensor& raw_target,
                  const Tensor& seed, const Tensor& rest, const Tensor& d_logprob, const optional<Tensor>& d_lse,
                  Tensor& exponentials, Tensor& factor) {
  const Arguments arguments("seeded_scale", weight.device());
  auto chunk = Chunk{hidden, weight, bias, target, inv_temperature, ignore_index, softcap}.checked(arguments);
  chunk.hidden = hidden.mutable_data_ptr();
  const auto num_rows = chunk.num_rows;
  const SeededRows rows{const_cast<float*>(arguments.dense<const float>("raw_target", raw_target, {num_rows})),
                        const_cast<float*>(arguments.dense<const float>("seed", seed, {num_rows})),
                        const_cast<float*>(arguments.dense<const float>("rest", rest, {num_rows})), nullptr, nullptr};
  const SeededUpstream upstream{arguments.dense<const float>("d_logprob", d_logprob, {num_rows}),
                                arguments.dense<const float>("d_lse", d_lse, {num_rows}),
                                arguments.dense<float>("factor", factor, {num_rows})};
  const Bf16Rows out = arguments.written("exponentials", exponentials, num_rows, chunk.vocab);
  launch_on(weight.device(), "seeded_scale", [&](void* s) {
    return launch_seeded_scale(chunk, rows, upstream, {const_cast<void*>(out.data), out.stride}, s);
  });
}

void seeded_d_hidden(const Tensor& exponentials, const Tensor& weight, const Tensor& factor, Tensor& d_hidden) {
  const Arguments arguments("seeded_d_hidden", weight.device());
  const auto vocab = weight.size(0);
  const auto num_rows = factor.size(0);
  const Bf16Rows e = arguments.rows("exponentials", exponentials, num_rows, vocab);
  const Bf16Rows w = arguments.rows("weight", weight, vocab, weight.size(1));
  const Bf16Rows out = arguments.written("d_hidden", d_hidden, num_rows, weight.size(1));
  const float* scale = arguments.dense<const float>("factor", factor, {num_rows});
  launch_on(weight.device(), "seeded_d_hidden", [&](void* s) { return launch_d_hidden(e, w, scale, out, s); });
}

void seeded_d_weight(const Tensor& exponentials, const Tensor& hidden, Tensor& d_weight, bool accumulate) {
  const Arguments arguments("seeded_d_weight", d_weight.device());
  const auto vocab = d_weight.size(0);
  const auto depth = d_weight.size(1);
  const Bf16Rows e = arguments.rows("exponentials", exponentials, hidden.size(0), vocab);
  const Bf16Rows x = arguments.rows("hidden", hidden, hidden.size(0), depth);
  float* out = arguments.dense<float>("d_weight", d_weight, {vocab, depth});
  launch_on(d_weight.device(), "seeded_d_weight", [&](void* s) { return launch_d_weight(e, x, out, accumulate, s); });
}

void scaled(const Tensor& matrix, const Tensor& scale, Tensor& out) {
  const Arguments arguments("scaled", matrix.device());
  const auto* from = arguments.dense<const at::BFloat16>("matrix", matrix, matrix.sizes());
  auto* to = arguments.dense<at::BFloat16>("out", out, matrix.sizes());
  const float* factor = arguments.dense<const float>("scale", scale, {});
  const auto misaligned = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to);
  TORCH_CHECK(misaligned % 16 == 0 && matrix.numel() % 8 == 0, "fusedce_native.scaled: ", matrix.numel(),
              " elements; expected a multiple of 8, from multiples of 16 bytes on");
  launch_on(matrix.device(), "scaled", [&](void* s) { return launch_scaled(from, factor, to, matrix.numel(), s); });
}

}  // namespace
}  // namespace fusedce

#define FUSEDCE_CHUNK \
  " hidden, Tensor weight, Tensor? bias, Tensor target, Tensor inv_temperature, int ignore_index, float softcap, "

TORCH_LIBRARY_FRAGMENT(fusedce_native, m) {
  m.def("target_logits(Tensor" FUSEDCE_CHUNK "Tensor(a!) raw_target, Tensor(b!) seed) -> ()");
  m.def("seeded_exponentials(Tensor" FUSEDCE_CHUNK "Tensor seed, Tensor(a!) exponentials, Tensor(b!) partial) -> ()");
  m.def("seeded_statistics(Tensor" FUSEDCE_CHUNK
        "Tensor partial, Tensor raw_target, Tensor(a!) seed, Tensor(b!) exponentials, Tensor(c!) rest, "
        "Tensor(d!) logprob, Tensor(e!) lse) -> ()");
  m.def("seeded_scale(Tensor(a!)" FUSEDCE_CHUNK
        "Tensor raw_target, Tensor seed, Tensor rest, Tensor d_logprob, Tensor? d_lse, Tensor(b!) exponentials, "
        "Tensor(c!) factor) -> ()");
  m.def("seeded_d_hidden(Tensor exponentials, Tensor weight, Tensor factor, Tensor(a!) d_hidden) -> ()");
  m.def("seeded_d_weight(Tensor exponentials, Tensor hidden, Tensor(a!) d_weight, bool accumulate) -> ()");
  m.def("scaled(Tensor matrix, Tensor scale, Tensor(a!) out) -> ()");
}

// ROCm builds of torch dispatch on this key too; the matrix products refuse to run there.
TORCH_LIBRARY_IMPL(fusedce_native, CUDA, m) {
  m.impl("target_logits", &fusedce::target_logits);
  m.impl("seeded_exponentials", &fusedce::seeded_exponentials);
  m.impl("seeded_statistics", &fusedce::seeded_statistics);
  m.impl("seeded_scale", &fusedce::seeded_scale);
  m.impl("seeded_d_hidden", &fusedce::seeded_d_hidden);
  m.impl("seeded_d_weight", &fusedce::seeded_d_weight);
  m.impl("scaled", &fusedce::scaled);
}
