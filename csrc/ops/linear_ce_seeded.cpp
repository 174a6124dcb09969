// torch.ops.fusedce_native: linear cross-entropy about a seed, as ops that write into tensors they are given.
#include <torch/library.h>

#include "arguments.h"
#include "launch.h"

namespace fusedce {
namespace {

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
  const LogitSeeds seeds{chunk.inv_temperature, arguments.dense<const float>("seed", seed, {chunk.num_rows})};
  float* sums = arguments.dense<float>("partial", partial, {tiles, chunk.num_rows});
  const Bf16Rows out = arguments.written("exponentials", exponentials, chunk.num_rows, chunk.vocab);
  launch_on(weight.device(), "seeded_exponentials", [&](void* s) {
    return launch_seeded_exponentials(hidden_of(chunk), weight_of(chunk), terms_of(chunk), seeds, out, sums, s);
  });
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

TORCH_LIBRARY_FRAGMENT(fusedce_native, m) {
  m.def("target_logits(Tensor" FUSEDCE_CHUNK "Tensor(a!) raw_target, Tensor(b!) seed) -> ()");
  m.def("seeded_exponentials(Tensor" FUSEDCE_CHUNK "Tensor seed, Tensor(a!) exponentials, Tensor(b!) partial) -> ()");
  m.def("seeded_statistics(Tensor" FUSEDCE_CHUNK
        "Tensor partial, Tensor raw_target, Tensor(a!) seed, Tensor(b!) exponentials, Tensor(c!) rest, "
        "Tensor(d!) logprob, Tensor(e!) lse) -> ()");
  m.def("seeded_scale(Tensor(a!)" FUSEDCE_CHUNK
        "Tensor raw_target, Tensor seed, Tensor rest, Tensor d_logprob, Tensor? d_lse, Tensor(b!) exponentials, "
        "Tensor(c!) factor) -> ()");
  m.def("scaled(Tensor matrix, Tensor scale, Tensor(a!) out) -> ()");
}

// ROCm builds of torch dispatch on this key too; the matrix products refuse to run there.
TORCH_LIBRARY_IMPL(fusedce_native, CUDA, m) {
  m.impl("target_logits", &fusedce::target_logits);
  m.impl("seeded_exponentials", &fusedce::seeded_exponentials);
  m.impl("seeded_statistics", &fusedce::seeded_statistics);
  m.impl("seeded_scale", &fusedce::seeded_scale);
  m.impl("scaled", &fusedce::scaled);
}
