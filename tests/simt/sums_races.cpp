// Runs the merge of tile sums under the thread sanitizer, for tests/simt/test_linear_ce_sums.py.
#include <cstdio>

#include "linear_ce_sums.cu"

int main() {
  using namespace fusedce;
  constexpr int kRows = 5, kTiles = 19;
  std::vector<float> tiles(3 * kTiles * kRows, 1.0f), numbers(7 * kRows, 1.0f);
  const std::int64_t target[kRows] = {5, 69, -100, 7, 8};
  const auto of = [&](int i) { return &numbers[i * kRows]; };
  const TileSums sums{&tiles[0], &tiles[kTiles * kRows], &tiles[2 * kTiles * kRows], kTiles};
  const SummedRows rows{target, of(0), of(1), kRows, -100};
  const char* error = launch_merged_sums(sums, rows, {of(2), of(3), of(4), of(5)}, nullptr);
  std::printf("%s\n", error ? error : "ran");
  return error != nullptr;
}
