// torch.ops.fusedce_native: Hopper's matrix products of linear cross-entropy that no seed plays a part in, and the
// merge of their sums, as ops that write into tensors they are given.
#include <torch/library.h>

#include "../kernels/linear_ce_sums.h"
#include "arguments.h"
#include "launch.h"

namespace fusedce {
namespace {

void logit_sums(const Tensor& hidden, const Tensor& weight, const optional<Tensor>& bias, const Tensor& target,
                const Tensor& inv_temperature, std::int64_t ignore_index, double softcap, Tensor& max, Tensor& exp,
                const optional<Tensor>& gap, Tensor& raw_target) {
  const Arguments arguments("logit_sums", weight.device());
  const auto chunk = Chunk{hidden, weight, bias, target, inv_temperature, ignore_index, softcap}.checked(arguments);
  const std::int64_t tiles = (chunk.vocab + hopper_vocab_tile() - 1) / hopper_vocab_tile();
  const LogitSumsOut out{arguments.dense<float>("max", max, {tiles, chunk.num_rows}),
                         arguments.dense<float>("exp", exp, {tiles, chunk.num_rows}),
                         arguments.dense<float>("gap", gap, {tiles, chunk.num_rows}),
                         arguments.dense<float>("raw_target", raw_target, {chunk.num_rows})};
  launch_on(weight.device(), "logit_sums", [&](void* s) {
    return launch_logit_sums(hidden_of(chunk), weight_of(chunk), terms_of(chunk), chunk.inv_temperature, out, s);
  });
}

void merged_sums(const Tensor& target, const Tensor& inv_temperature, std::int64_t ignore_index, const Tensor& max,
                 const Tensor& exp, const optional<Tensor>& gap, const Tensor& raw_target, Tensor& logprob,
                 const optional<Tensor>& entropy, Tensor& lse, Tensor& normalizer) {
  const Arguments arguments("merged_sums", target.device());
  TORCH_CHECK(max.dim() == 2, "fusedce_native.merged_sums: argument 'max' is no matrix");
  const auto tiles = max.size(0), num_rows = max.size(1);
  const TileSums sums{arguments.dense<const float>("max", max, {tiles, num_rows}),
                      arguments.dense<const float>("exp", exp, {tiles, num_rows}),
                      arguments.dense<const float>("gap", gap, {tiles, num_rows}), static_cast<int>(tiles)};
  const SummedRows rows{arguments.dense<const std::int64_t>("target", target, {num_rows}),
                        arguments.dense<const float>("inv_temperature", inv_temperature, {num_rows}),
                        arguments.dense<const float>("raw_target", raw_target, {num_rows}), num_rows, ignore_index};
  const RowResults out{
      arguments.dense<float>("logprob", logprob, {num_rows}), arguments.dense<float>("entropy", entropy, {num_rows}),
      arguments.dense<float>("lse", lse, {num_rows}), arguments.dense<float>("normalizer", normalizer, {num_rows, 2})};
  TORCH_CHECK(!gap || entropy, "fusedce_native.merged_sums: argument 'gap' is given, and 'entropy' is not");
  launch_on(target.device(), "merged_sums", [&](void* s) { return launch_merged_sums(sums, rows, out, s); });
}

void logit_gradient(const Tensor& hidden, const Tensor& weight, const optional<Tensor>& bias, const Tensor& target,
                    const Tensor& inv_temperature, std::int64_t ignore_index, double softcap, const Tensor& numbers,
                    bool with_entropy, Tensor& d_logits) {
  const Arguments arguments("logit_gradient", weight.device());
  const auto chunk = Chunk{hidden, weight, bias, target, inv_temperature, ignore_index, softcap}.checked(arguments);
  const float* of_rows = arguments.dense<const float>("numbers", numbers, {chunk.num_rows, 8});
  TORCH_CHECK(reinterpret_cast<std::uintptr_t>(of_rows) % 16 == 0,
              "fusedce_native.logit_gradient: argument 'numbers' starts at no multiple of 16 bytes");
  const Bf16Rows out = arguments.written("d_logits", d_logits, chunk.num_rows, chunk.vocab);
  launch_on(weight.device(), "logit_gradient", [&](void* s) {
    return launch_logit_gradient(hidden_of(chunk), weight_of(chunk), terms_of(chunk), of_rows, with_entropy, out, s);
  });
}

void d_hidden(const Tensor& d_logits, const Tensor& weight, const optional<Tensor>& factor, Tensor& out) {
  const Arguments arguments("d_hidden", weight.device());
  const auto vocab = weight.size(0);
  const auto num_rows = out.size(0);
  const Bf16Rows d = arguments.rows("d_logits", d_logits, num_rows, vocab);
  const Bf16Rows w = arguments.rows("weight", weight, vocab, weight.size(1));
  const Bf16Rows to = arguments.written("out", out, num_rows, weight.size(1));
  const float* scale = arguments.dense<const float>("factor", factor, {num_rows});
  launch_on(weight.device(), "d_hidden", [&](void* s) { return launch_d_hidden(d, w, scale, to, s); });
}

void d_weight(const Tensor& d_logits, const Tensor& hidden, Tensor& out, bool accumulate) {
  const Arguments arguments("d_weight", out.device());
  const auto vocab = out.size(0);
  const auto depth = out.size(1);
  const Bf16Rows d = arguments.rows("d_logits", d_logits, hidden.size(0), vocab);
  const Bf16Rows x = arguments.rows("hidden", hidden, hidden.size(0), depth);
  float* to = arguments.dense<float>("out", out, {vocab, depth});
  launch_on(out.device(), "d_weight", [&](void* s) { return launch_d_weight(d, x, to, accumulate, s); });
}

}  // namespace
}  // namespace fusedce

TORCH_LIBRARY_FRAGMENT(fusedce_native, m) {
  m.def("logit_sums(Tensor" FUSEDCE_CHUNK
        "Tensor(a!) max, Tensor(b!) exp, Tensor(c!)? gap, Tensor(d!) raw_target) -> ()");
  m.def(
      "merged_sums(Tensor target, Tensor inv_temperature, int ignore_index, Tensor max, Tensor exp, Tensor? gap, "
      "Tensor raw_target, Tensor(a!) logprob, Tensor(b!)? entropy, Tensor(c!) lse, Tensor(d!) normalizer) -> ()");
  m.def("logit_gradient(Tensor" FUSEDCE_CHUNK "Tensor numbers, bool with_entropy, Tensor(a!) d_logits) -> ()");
  m.def("d_hidden(Tensor d_logits, Tensor weight, Tensor? factor, Tensor(a!) out) -> ()");
  m.def("d_weight(Tensor d_logits, Tensor hidden, Tensor(a!) out, bool accumulate) -> ()");
}

// ROCm builds of torch dispatch on this key too; the matrix products refuse to run there.
TORCH_LIBRARY_IMPL(fusedce_native, CUDA, m) {
  m.impl("logit_sums", &fusedce::logit_sums);
  m.impl("merged_sums", &fusedce::merged_sums);
  m.impl("logit_gradient", &fusedce::logit_gradient);
  m.impl("d_hidden", &fusedce::d_hidden);
  m.impl("d_weight", &fusedce::d_weight);
}
