// A row's sums over each vocab tile (linear_ce_hopper.h), and its target, become its results, as a plain function: no
// CUDA, HIP or torch header is needed to call it.
#pragma once

#include <cstdint>

namespace fusedce {

/// Each (num_tiles, num_rows): LogitSumsOut of linear_ce_hopper.h.
struct TileSums {
  const float* max;
  const float* exp;
  const float* gap;  // or nullptr: no entropy
  int num_tiles;
};

/// What is known of the rows, (num_rows,) each.
struct SummedRows {
  const std::int64_t* target;
  const float* inv_temperature;
  const float* raw_target;  // NaN makes its row NaN
  std::int64_t num_rows;
  std::int64_t ignore_index;
};

/// Written, fp32: (num_rows,) each, normalizer (num_rows, 2). Rows that are ignored get zeros, and (+inf, 0), about
/// which all probabilities are 0.
struct RowResults {
  float* logprob;
  float* entropy;  // not looked at without gaps
  float* lse;
  float* normalizer;
};

/// nullptr, or what the runtime says is wrong with the launch. stream: a cudaStream_t or hipStream_t. Reads 8 or 12
/// bytes a row and tile, in the order of the tiles.
const char* launch_merged_sums(const TileSums& tiles, const SummedRows& rows, const RowResults& out, void* stream);

}  // namespace fusedce
