// Runs the kernels under the thread sanitizer, for tests/simt/test_races.py: a missing barrier is a data race.
#include <cstdio>

#include "linear_ce_rows.cu"

int main() {
  constexpr int kRows = 2, kVocab = 3001;
  std::vector<float> logits(kRows * kVocab), d_logits(logits.size()), row(6 * kRows, 1.0f), out(5 * kRows);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 37 % 101) / 10;
  const std::int64_t target[kRows] = {5, 3000};
  const fusedce::LogitRows rows{logits.data(), target, nullptr, &row[5 * kRows], kRows, kVocab, -100, kVocab, 0.0f};
  const fusedce::RowStatistics statistics{&out[0], &out[kRows], &out[2 * kRows], &out[3 * kRows]};
  const char* error = fusedce::launch_logprob_rows(rows, statistics, nullptr);
  alignas(16) float parts[4 * kRows];
  if (!error) error = fusedce::launch_parts_rows(rows, parts, nullptr);
  const fusedce::RowUpstream upstream{&row[0], &row[kRows], &row[2 * kRows], &out[kRows], &out[3 * kRows]};
  if (!error)
    error = fusedce::launch_d_logits_rows(rows, upstream, d_logits.data(), fusedce::Dtype::kFloat32, kVocab, nullptr);
  std::printf("%s\n", error ? error : "ran");
  return error != nullptr;
}
