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

/// What both kernels are given of a chunk: fp32 logits before bias, softcap and temperature, and the rows' labels.
struct LogitRows {
  const float* logits;         // (num_rows, vocab), rows `row_stride` words apart
  const std::int64_t* target;  // (num_rows,)
  const float* bias;           // (vocab,) or nullptr
  std::int64_t num_rows;
  std::int64_t row_stride;
  std::int64_t ignore_index;
  int vocab;
  float inv_temperature;
  float softcap;                              // 0: none
  const float* row_inv_temperature{nullptr};  // (num_rows,), in the place of inv_temperature, or nullptr
};

/// What the forward writes, fp32: logprob, entropy, lse (num_rows,); normalizer (num_rows, 2).
struct RowStatistics {
  float* logprob;
  float* entropy;
  float* lse;
  float* normalizer;
};

/// What the backward reads beside the logits, fp32: the upstream gradients (num_rows,), the forward's entropy and
/// normalizer, and the one number by which d_logits is divided.
struct RowUpstream {
  const float* d_logprob;
  const float* d_entropy;
  const float* d_lse;
  const float* entropy;
  const float* normalizer;
  const float* scale;
};

enum class Dtype { kFloat32, kBFloat16, kFloat16 };

/// Both return nullptr, or what the runtime says is wrong with the launch. stream: a cudaStream_t or hipStream_t.
const char* launch_logprob_rows(const LogitRows& rows, const RowStatistics& out, void* stream);
/// d_logits: (num_rows, vocab) of `dtype`, rows `out_stride` elements apart.
const char* launch_d_logits_rows(const LogitRows& rows, const RowUpstream& upstream, void* d_logits, Dtype dtype,
                                 std::int64_t out_stride, void* stream);

}  // namespace fusedce
