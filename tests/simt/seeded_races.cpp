// Runs the row kernels of the seeded exponentials under the thread sanitizer, for tests/simt/test_linear_ce_seeded.py.
#include <cstdio>

#include "linear_ce_seeded.cu"

int main() {
  using namespace fusedce;
  constexpr int kRows = 5, kVocab = 70, kDepth = 16, kTiles = 3;
  std::vector<bf16> hidden(kRows * kDepth), weight(kVocab * kDepth), exponentials(kRows * kVocab);
  for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = from_float<bf16>(static_cast<float>(i * 37 % 101) / 50);
  for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] = weight[i];
  const std::int64_t target[kRows] = {5, 69, -100, 7, 8};
  std::vector<float> slopes(kRows, 1.0f), numbers(8 * kRows);
  std::vector<float> partial(kTiles * kRows, 1e30f);  // so large that rows are made again
  const SeededChunk chunk{hidden.data(), weight.data(), nullptr, target, slopes.data(), kRows,
                          kDepth,        kDepth,        -100,    kVocab, kDepth,        0.0f};
  const auto of = [&](int i) { return &numbers[i * kRows]; };
  const SeededRows rows{of(0), of(1), of(2), of(3), of(4)};
  const Exponentials out{exponentials.data(), kVocab};
  const char* error = launch_target_logits(chunk, rows, nullptr);
  if (!error) error = launch_seeded_statistics(chunk, rows, partial.data(), kTiles, out, nullptr);
  if (!error) error = launch_seeded_scale(chunk, rows, {of(5), of(6), of(7)}, out, nullptr);
  std::printf("%s\n", error ? error : "ran");
  return error != nullptr;
}
