// torch.ops.fusedce_native: the row kernels of linear cross-entropy as ops that write into tensors they are given.
#include <torch/library.h>

#include "arguments.h"
#include "launch.h"

namespace fusedce {
namespace {

LogitRows logit_rows(const Arguments& arguments, const Tensor& logits, const Tensor& target,
                     const optional<Tensor>& bias, const Tensor& inv_temperature, std::int64_t ignore_index,
                     double softcap) {
  arguments.logits(logits);
  arguments.between("softcap", softcap, 0, std::numeric_limits<float>::max());
  const auto num_rows = logits.size(0);
  const auto vocab = logits.size(1);
  return {logits.const_data_ptr<float>(),
          arguments.dense<const std::int64_t>("target", target, {num_rows}),
          arguments.dense<const float>("bias", bias, {vocab}),
          arguments.dense<const float>("inv_temperature", inv_temperature, {num_rows}),
          num_rows,
          logits.stride(0),
          ignore_index,
          static_cast<int>(vocab),
          static_cast<float>(softcap)};
}

void logprob_rows(const Tensor& logits, const Tensor& target, const optional<Tensor>& bias,
                  const Tensor& inv_temperature, std::int64_t ignore_index, double softcap, Tensor& logprob,
                  Tensor& entropy, Tensor& lse, Tensor& normalizer) {
  const Arguments arguments("logprob_rows", logits.device());
  const LogitRows rows = logit_rows(arguments, logits, target, bias, inv_temperature, ignore_index, softcap);
  const RowStatistics out{arguments.dense<float>("logprob", logprob, {rows.num_rows}),
                          arguments.dense<float>("entropy", entropy, {rows.num_rows}),
                          arguments.dense<float>("lse", lse, {rows.num_rows}),
                          arguments.dense<float>("normalizer", normalizer, {rows.num_rows, 2})};
  launch_on(logits.device(), "logprob_rows", [&](void* s) { return launch_logprob_rows(rows, out, s); });
}

void parts_rows(const Tensor& logits, const Tensor& target, const optional<Tensor>& bias, const Tensor& inv_temperature,
                std::int64_t ignore_index, double softcap, Tensor& parts) {
  const Arguments arguments("parts_rows", logits.device());
  const LogitRows rows = logit_rows(arguments, logits, target, bias, inv_temperature, ignore_index, softcap);
  float* out = arguments.dense<float>("parts", parts, {rows.num_rows, 4});
  TORCH_CHECK(reinterpret_cast<std::uintptr_t>(out) % 16 == 0,
              "fusedce_native.parts_rows: argument 'parts' starts at no multiple of 16 bytes");
  launch_on(logits.device(), "parts_rows", [&](void* s) { return launch_parts_rows(rows, out, s); });
}

void d_logits_rows(const Tensor& logits, const Tensor& target, const optional<Tensor>& bias,
                   const Tensor& inv_temperature, std::int64_t ignore_index, double softcap, const Tensor& on_probs,
                   const optional<Tensor>& on_surprise, const Tensor& on_target, const Tensor& entropy,
                   const Tensor& normalizer, Tensor& d_logits) {
  const Arguments arguments("d_logits_rows", logits.device());
  const LogitRows rows = logit_rows(arguments, logits, target, bias, inv_temperature, ignore_index, softcap);
  const float* of_rows = on_surprise ? arguments.dense<const float>("entropy", entropy, {rows.num_rows}) : nullptr;
  const RowUpstream upstream{arguments.dense<const float>("on_probs", on_probs, {rows.num_rows}),
                             arguments.dense<const float>("on_surprise", on_surprise, {rows.num_rows}),
                             arguments.dense<const float>("on_target", on_target, {rows.num_rows}), of_rows,
                             arguments.dense<const float>("normalizer", normalizer, {rows.num_rows, 2})};
  const Dtype dtype = arguments.d_logits(d_logits, logits);
  launch_on(logits.device(), "d_logits_rows", [&](void* s) {
    return launch_d_logits_rows(rows, upstream, d_logits.mutable_data_ptr(), dtype, d_logits.stride(0), s);
  });
}

}  // namespace
}  // namespace fusedce

#define FUSEDCE_LOGITS \
  "Tensor logits, Tensor target, Tensor? bias, Tensor inv_temperature, int ignore_index, float softcap, "

TORCH_LIBRARY(fusedce_native, m) {
  m.def("logprob_rows(" FUSEDCE_LOGITS
        "Tensor(a!) logprob, Tensor(b!) entropy, Tensor(c!) lse, Tensor(d!) normalizer) -> ()");
  m.def("parts_rows(" FUSEDCE_LOGITS "Tensor(a!) parts) -> ()");
  m.def("d_logits_rows(" FUSEDCE_LOGITS
        "Tensor on_probs, Tensor? on_surprise, Tensor on_target, Tensor entropy, Tensor normalizer, "
        "Tensor(a!) d_logits) -> ()");
}

// ROCm builds of torch dispatch on this key too.
TORCH_LIBRARY_IMPL(fusedce_native, CUDA, m) {
  m.impl("logprob_rows", &fusedce::logprob_rows);
  m.impl("parts_rows", &fusedce::parts_rows);
  m.impl("d_logits_rows", &fusedce::d_logits_rows);
}
