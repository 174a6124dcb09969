// What the native ops of linear cross-entropy look at before a launch: an error names the op and the argument.
#pragma once

#include <ATen/ATen.h>

#include <limits>
#include <optional>
#include <type_traits>

#include "../kernels/linear_ce_hopper.h"
#include "../kernels/linear_ce_rows.h"
#include "../kernels/linear_ce_seeded.h"

namespace fusedce {

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

  /// A matrix on the device whose rows are dense and do not overlap.
  void dense_rows(const char* name, const Tensor& matrix) const {
    TORCH_CHECK(matrix.dim() == 2 && (matrix.size(1) <= 1 || matrix.stride(1) == 1) &&
                    (matrix.size(0) <= 1 || matrix.stride(0) >= matrix.size(1)),
                "fusedce_native.", op_, ": argument '", name, "' has shape ", matrix.sizes(), " and strides ",
                matrix.strides(), "; expected a matrix with dense rows");
    on_device(name, matrix);
  }

  /// d_logits, of logits' sizes: its dtype.
  Dtype d_logits(const Tensor& d_logits, const Tensor& logits) const {
    dense_rows("d_logits", d_logits);
    TORCH_CHECK(d_logits.sizes() == logits.sizes(), "fusedce_native.", op_, ": argument 'd_logits' has shape ",
                d_logits.sizes(), "; expected ", logits.sizes());
    switch (d_logits.scalar_type()) {
      case at::kFloat:
        return Dtype::kFloat32;
      case at::kBFloat16:
        return Dtype::kBFloat16;
      case at::kHalf:
        return Dtype::kFloat16;
      default:
        TORCH_CHECK(false, "fusedce_native.", op_, ": argument 'd_logits' has dtype ", d_logits.scalar_type(),
                    "; expected Float, BFloat16 or Half");
    }
  }

  /// fp32 logits of 1 to kMaxVocab words.
  void logits(const Tensor& logits) const {
    dense_rows("logits", logits);
    TORCH_CHECK(logits.scalar_type() == at::kFloat, "fusedce_native.", op_, ": argument 'logits' has dtype ",
                logits.scalar_type(), "; expected Float");
    between("vocab", static_cast<double>(logits.size(1)), 1, static_cast<double>(kMaxVocab));
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

inline Bf16Rows hidden_of(const SeededChunk& c) { return {c.hidden, c.num_rows, c.depth, c.hidden_stride}; }
inline Bf16Rows weight_of(const SeededChunk& c) { return {c.weight, c.vocab, c.depth, c.weight_stride}; }
inline LogitTerms terms_of(const SeededChunk& c) { return {c.bias, c.target, c.softcap}; }

}  // namespace fusedce

// What `Chunk` is made of, in a schema, after "Tensor" or "Tensor(a!)".
#define FUSEDCE_CHUNK \
  " hidden, Tensor weight, Tensor? bias, Tensor target, Tensor inv_temperature, int ignore_index, float softcap, "
