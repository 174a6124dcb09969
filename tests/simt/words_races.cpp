// Runs the kernels of single words under the thread sanitizer, for tests/simt/test_linear_ce_words.py. Both rows name a
// word several times: one thread alone may write its entry.
#include <cstdio>

#include "linear_ce_words.cu"

int main() {
  using namespace fusedce;
  constexpr int kRows = 2, kVocab = 3001, kSlots = 150;
  std::vector<float> logits(kRows * kVocab), d_logits(logits.size()), numbers(4 * kRows * kSlots, 0.5f);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 37 % 101) / 10;
  std::vector<std::int64_t> ids(kRows * kSlots), words(kRows);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * 7 % 40);
  const WordRows rows{logits.data(), nullptr, kRows, kVocab, kVocab};
  const Slots slots{ids.data(), -100, kSlots, 2.0f};
  const auto of = [&](int i) { return &numbers[i * kRows * kSlots]; };
  const SlotGradients gradients{of(0), of(1), of(2), of(3)};
  const char* error = launch_argmax_rows(rows, words.data(), nullptr);
  if (!error) error = launch_selected_logits(rows, slots, of(1), nullptr);
  if (!error)
    error = launch_selected_gradient(rows, slots, gradients, d_logits.data(), Dtype::kFloat32, kVocab, nullptr);
  std::printf("%s\n", error ? error : "ran");
  return error != nullptr;
}
