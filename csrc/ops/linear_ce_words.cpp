// torch.ops.fusedce_native: single words of rows of logits, as ops that write into tensors they are given.
#include <torch/library.h>

#include "../kernels/linear_ce_words.h"
#include "arguments.h"
#include "launch.h"

namespace fusedce {
namespace {

WordRows word_rows(const Arguments& arguments, const Tensor& logits, const optional<Tensor>& bias) {
  arguments.logits(logits);
  return {logits.const_data_ptr<float>(), arguments.dense<const float>("bias", bias, {logits.size(1)}), logits.size(0),
          logits.stride(0), static_cast<int>(logits.size(1))};
}

Slots slots_of(const Arguments& arguments, const Tensor& ids, std::int64_t num_rows, std::int64_t ignore_index,
               double softcap) {
  arguments.between("softcap", softcap, 0, std::numeric_limits<float>::max());
  const auto num_slots = ids.dim() == 2 ? ids.size(1) : 0;
  arguments.between("slots", static_cast<double>(num_slots), 1, static_cast<double>(kMaxVocab));
  return {arguments.dense<const std::int64_t>("ids", ids, {num_rows, num_slots}), ignore_index,
          static_cast<int>(num_slots), static_cast<float>(softcap)};
}

void argmax_rows(const Tensor& logits, const optional<Tensor>& bias, Tensor& words) {
  const Arguments arguments("argmax_rows", logits.device());
  const WordRows rows = word_rows(arguments, logits, bias);
  auto* out = arguments.dense<std::int64_t>("words", words, {rows.num_rows});
  launch_on(logits.device(), "argmax_rows", [&](void* s) { return launch_argmax_rows(rows, out, s); });
}

void selected_logits(const Tensor& logits, const optional<Tensor>& bias, const Tensor& ids, std::int64_t ignore_index,
                     double softcap, Tensor& raw) {
  const Arguments arguments("selected_logits", logits.device());
  const WordRows rows = word_rows(arguments, logits, bias);
  const Slots slots = slots_of(arguments, ids, rows.num_rows, ignore_index, softcap);
  float* out = arguments.dense<float>("raw", raw, {rows.num_rows, slots.num_slots});
  launch_on(logits.device(), "selected_logits", [&](void* s) { return launch_selected_logits(rows, slots, out, s); });
}

void selected_gradient(const Tensor& logits, const optional<Tensor>& bias, const Tensor& ids, std::int64_t ignore_index,
                       double softcap, const Tensor& upstream, const Tensor& logprob, const Tensor& complement,
                       const Tensor& on_probs, Tensor& d_logits) {
  const Arguments arguments("selected_gradient", logits.device());
  const WordRows rows = word_rows(arguments, logits, bias);
  const Slots slots = slots_of(arguments, ids, rows.num_rows, ignore_index, softcap);
  const auto sizes = {rows.num_rows, std::int64_t{slots.num_slots}};
  const SlotGradients gradients{arguments.dense<const float>("upstream", upstream, sizes),
                                arguments.dense<const float>("logprob", logprob, sizes),
                                arguments.dense<const float>("complement", complement, sizes),
                                arguments.dense<const float>("on_probs", on_probs, {rows.num_rows})};
  const Dtype dtype = arguments.d_logits(d_logits, logits);
  launch_on(logits.device(), "selected_gradient", [&](void* s) {
    return launch_selected_gradient(rows, slots, gradients, d_logits.mutable_data_ptr(), dtype, d_logits.stride(0), s);
  });
}

}  // namespace
}  // namespace fusedce

#define FUSEDCE_SLOTS "Tensor logits, Tensor? bias, Tensor ids, int ignore_index, float softcap, "

TORCH_LIBRARY_FRAGMENT(fusedce_native, m) {
  m.def("argmax_rows(Tensor logits, Tensor? bias, Tensor(a!) words) -> ()");
  m.def("selected_logits(" FUSEDCE_SLOTS "Tensor(a!) raw) -> ()");
  m.def("selected_gradient(" FUSEDCE_SLOTS
        "Tensor upstream, Tensor logprob, Tensor complement, Tensor on_probs, Tensor(a!) d_logits) -> ()");
}

// ROCm builds of torch dispatch on this key too.
TORCH_LIBRARY_IMPL(fusedce_native, CUDA, m) {
  m.impl("argmax_rows", &fusedce::argmax_rows);
  m.impl("selected_logits", &fusedce::selected_logits);
  m.impl("selected_gradient", &fusedce::selected_gradient);
}
