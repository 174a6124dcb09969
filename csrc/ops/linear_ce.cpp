// torch.ops.fusedce_native: the row kernels of linear cross-entropy as ops that write into tensors they are given.
#include <torch/library.h>

#include <optional>

#include "../kernels/linear_ce_rows.h"
#include "launch.h"

namespace fusedce {
namespace {

using at::Tensor;

constexpr std::int64_t kMaxVocab = std::int64_t{1} << 30;  // columns are int, with room for a block's last step

/// A dense tensor of these sizes on `device`, or an error that names the argument.
void check(const char* op, const char* name, const Tensor& tensor, at::ScalarType dtype, at::IntArrayRef sizes,
           c10::Device device) {
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.sizes() == sizes && tensor.is_contiguous(), "fusedce_native.", op,
              ": argument '", name, "' has shape ", tensor.sizes(), ", strides ", tensor.strides(), " and dtype ",
              tensor.scalar_type(), "; expected contiguous ", sizes, " of ", dtype);
  TORCH_CHECK(tensor.device() == device, "fusedce_native.", op, ": argument '", name, "' is on ", tensor.device(),
              ", argument 'logits' on ", device, "; expected one device");
}

/// A matrix whose rows are dense and do not overlap.
void check_rows(const char* op, const char* name, const Tensor& matrix) {
  TORCH_CHECK(matrix.dim() == 2 && (matrix.size(1) <= 1 || matrix.stride(1) == 1) &&
                  (matrix.size(0) <= 1 || matrix.stride(0) >= matrix.size(1)),
              "fusedce_native.", op, ": argument '", name, "' has shape ", matrix.sizes(), " and strides ",
              matrix.strides(), "; expected a matrix with dense rows");
}

LogitRows logit_rows(const char* op, const Tensor& logits, const Tensor& target, const std::optional<Tensor>& bias,
                     const Tensor& inv_temperature, std::int64_t ignore_index, double softcap) {
  check_rows(op, "logits", logits);
  const auto num_rows = logits.size(0);
  const auto vocab = logits.size(1);
  TORCH_CHECK(logits.scalar_type() == at::kFloat, "fusedce_native.", op, ": argument 'logits' has dtype ",
              logits.scalar_type(), "; expected Float");
  TORCH_CHECK(vocab >= 1 && vocab <= kMaxVocab, "fusedce_native.", op, ": vocab is ", vocab, "; expected 1 to ",
              kMaxVocab);
  TORCH_CHECK(softcap >= 0, "fusedce_native.", op, ": softcap is ", softcap, "; expected at least 0");
  check(op, "target", target, at::kLong, {num_rows}, logits.device());
  check(op, "inv_temperature", inv_temperature, at::kFloat, {num_rows}, logits.device());
  if (bias) check(op, "bias", *bias, at::kFloat, {vocab}, logits.device());
  return {logits.const_data_ptr<float>(),
          target.const_data_ptr<std::int64_t>(),
          bias ? bias->const_data_ptr<float>() : nullptr,
          inv_temperature.const_data_ptr<float>(),
          num_rows,
          logits.stride(0),
          ignore_index,
          static_cast<int>(vocab),
          static_cast<float>(softcap)};
}

void logprob_rows(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& bias,
                  const Tensor& inv_temperature, std::int64_t ignore_index, double softcap, Tensor& logprob,
                  Tensor& entropy, Tensor& lse, Tensor& normalizer) {
  const char* op = "logprob_rows";
  const LogitRows rows = logit_rows(op, logits, target, bias, inv_temperature, ignore_index, softcap);
  const auto device = logits.device();
  check(op, "logprob", logprob, at::kFloat, {rows.num_rows}, device);
  check(op, "entropy", entropy, at::kFloat, {rows.num_rows}, device);
  check(op, "lse", lse, at::kFloat, {rows.num_rows}, device);
  check(op, "normalizer", normalizer, at::kFloat, {rows.num_rows, 2}, device);
  const RowStatistics out{logprob.mutable_data_ptr<float>(), entropy.mutable_data_ptr<float>(),
                          lse.mutable_data_ptr<float>(), normalizer.mutable_data_ptr<float>()};
  launch_on(device, op, [&](void* stream) { return launch_logprob_rows(rows, out, stream); });
}

Dtype dtype_of(const char* op, const Tensor& d_logits) {
  switch (d_logits.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kHalf:
      return Dtype::kFloat16;
    default:
      TORCH_CHECK(false, "fusedce_native.", op, ": argument 'd_logits' has dtype ", d_logits.scalar_type(),
                  "; expected Float, BFloat16 or Half");
  }
}

void d_logits_rows(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& bias,
                   const Tensor& inv_temperature, std::int64_t ignore_index, double softcap, const Tensor& on_probs,
                   const std::optional<Tensor>& on_surprise, const Tensor& on_target, const Tensor& entropy,
                   const Tensor& normalizer, Tensor& d_logits) {
  const char* op = "d_logits_rows";
  const LogitRows rows = logit_rows(op, logits, target, bias, inv_temperature, ignore_index, softcap);
  const auto device = logits.device();
  check(op, "on_probs", on_probs, at::kFloat, {rows.num_rows}, device);
  check(op, "on_target", on_target, at::kFloat, {rows.num_rows}, device);
  check(op, "normalizer", normalizer, at::kFloat, {rows.num_rows, 2}, device);
  if (on_surprise) {
    check(op, "on_surprise", *on_surprise, at::kFloat, {rows.num_rows}, device);
    check(op, "entropy", entropy, at::kFloat, {rows.num_rows}, device);
  }
  check_rows(op, "d_logits", d_logits);
  TORCH_CHECK(d_logits.sizes() == logits.sizes() && d_logits.device() == device, "fusedce_native.", op,
              ": argument 'd_logits' has shape ", d_logits.sizes(), " on ", d_logits.device(), "; expected ",
              logits.sizes(), " on ", device);
  const Dtype dtype = dtype_of(op, d_logits);
  const RowUpstream upstream{on_probs.const_data_ptr<float>(),
                             on_surprise ? on_surprise->const_data_ptr<float>() : nullptr,
                             on_target.const_data_ptr<float>(), on_surprise ? entropy.const_data_ptr<float>() : nullptr,
                             normalizer.const_data_ptr<float>()};
  launch_on(device, op, [&](void* stream) {
    return launch_d_logits_rows(rows, upstream, d_logits.mutable_data_ptr(), dtype, d_logits.stride(0), stream);
  });
}

}  // namespace
}  // namespace fusedce

#define FUSEDCE_LOGITS \
  "Tensor logits, Tensor target, Tensor? bias, Tensor inv_temperature, int ignore_index, float softcap, "

TORCH_LIBRARY(fusedce_native, m) {
  m.def("logprob_rows(" FUSEDCE_LOGITS
        "Tensor(a!) logprob, Tensor(b!) entropy, Tensor(c!) lse, Tensor(d!) normalizer) -> ()");
  m.def("d_logits_rows(" FUSEDCE_LOGITS
        "Tensor on_probs, Tensor? on_surprise, Tensor on_target, Tensor entropy, Tensor normalizer, "
        "Tensor(a!) d_logits) -> ()");
}

// ROCm builds of torch dispatch on this key too.
TORCH_LIBRARY_IMPL(fusedce_native, CUDA, m) {
  m.impl("logprob_rows", &fusedce::logprob_rows);
  m.impl("d_logits_rows", &fusedce::d_logits_rows);
}
