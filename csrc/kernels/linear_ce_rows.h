// The row kernels of linear cross-entropy, as plain functions: no CUDA, HIP or torch header is needed to call them.
#pragma once

#include <cstdint>

namespace fusedce {

/// The constants of the kernels, for build_info() and tile_table().
struct RowTile {
  int wave_size;     // lanes that run in step
  int threads;       // of a block, which owns a row at a time
  int vector_width;  // fp32 logits a load
  int unroll;        // loads a thread has in flight
};
RowTile linear_ce_row_tile();

/// What all kernels are given of a chunk: fp32 logits before bias, softcap and temperature, and the rows' labels.
struct LogitRows {
  const float* logits;           // (num_rows, vocab), rows `row_stride` words apart
  const std::int64_t* target;    // (num_rows,)
  const float* bias;             // (vocab,) or nullptr
  const float* inv_temperature;  // (num_rows,)
  std::int64_t num_rows;
  std::int64_t row_stride;
  std::int64_t ignore_index;
  int vocab;
  float softcap;  // 0: none
};

/// What the forward writes, fp32: logprob, entropy, lse (num_rows,); normalizer (num_rows, 2), the largest raw logit m
/// (after the softcap, before the temperature) and log Σ e^((raw − m)·inv_temperature).
struct RowStatistics {
  float* logprob;
  float* entropy;
  float* lse;
  float* normalizer;
};

/// What the backward reads beside the logits, fp32: three numbers a row, (num_rows,) each, of which
/// d_raw_j = p_j·(on_probs − on_surprise·(log p_j + entropy)), and on_target for the target; and the forward's entropy
/// and normalizer.
struct RowUpstream {
  const float* on_probs;
  const float* on_surprise;  // or nullptr for zeros; the entropy is not read then
  const float* on_target;
  const float* entropy;
  const float* normalizer;
};

enum class Dtype { kFloat32, kBFloat16, kFloat16 };

/// All return nullptr, or what the runtime says is wrong with the launch. stream: a cudaStream_t or hipStream_t.
const char* launch_logprob_rows(const LogitRows& rows, const RowStatistics& out, void* stream);
/// parts: (num_rows, 4) fp32 from a multiple of 16 bytes on: over all words but the target the maximum m of the raw
/// logits, Σ e^g and Σ e^g·g with g = (raw − m)·inv_temperature; and the target's raw logit, −inf where the label is no
/// column. Ignored rows get −inf, 0, 0, −inf.
const char* launch_parts_rows(const LogitRows& rows, float* parts, void* stream);
/// d_logits: (num_rows, vocab) of `dtype`, rows `out_stride` elements apart.
const char* launch_d_logits_rows(const LogitRows& rows, const RowUpstream& upstream, void* d_logits, Dtype dtype,
                                 std::int64_t out_stride, void* stream);

}  // namespace fusedce
