// The rows of linear cross-entropy between its three matrix products about a seed (linear_ce_hopper.h), as plain
// functions: no CUDA, HIP or torch header is needed to call them.
//
// Of a row, x = hidden·weightᵀ + bias, raw = softcap·tanh(x/softcap) or x. The seed is the target's raw logit, so that
// E = e^((raw − seed)·inv_temperature) needs no maximum over the vocabulary. With y the target and
// S = Σ_{j≠y} e_j + e_y: p_j = e_j / S.
#pragma once

#include <cstdint>

namespace fusedce {

/// What all kernels are given of a chunk. Matrices are bf16, start at multiples of 16 bytes and have dense rows, a
/// multiple of 8 elements apart; depth is a multiple of 8.
struct SeededChunk {
  void* hidden;                  // (num_rows, depth), finite where the row is not ignored; scaled in place at the end
  const void* weight;            // (vocab, depth)
  const float* bias;             // (vocab,) or nullptr
  const std::int64_t* target;    // (num_rows,)
  const float* inv_temperature;  // (num_rows,)
  std::int64_t num_rows;
  std::int64_t hidden_stride;
  std::int64_t weight_stride;
  std::int64_t ignore_index;
  int vocab;
  int depth;
  float softcap;  // 0: none
};

/// What is known of each row, fp32 (num_rows,).
struct SeededRows {
  float* raw_target;  // +inf of ignored rows, NaN where the label is out of range
  float* seed;
  float* rest;  // Σ e over all words but the target
  float* logprob;
  float* lse;
};

/// The exponentials of linear_ce_hopper.h, (num_rows, vocab) bf16, rows `stride` elements apart.
struct Exponentials {
  void* data;
  std::int64_t stride;
};

/// Upstream gradients and what becomes of them, fp32 (num_rows,).
struct SeededUpstream {
  const float* d_logprob;
  const float* d_lse;  // or nullptr for zeros
  float* factor;
};

// All return nullptr, or what the runtime says is wrong with the launch. stream: a cudaStream_t or hipStream_t.

/// Fills raw_target and seed. Ignored rows get a seed about which every exponential is 0; a label out of range gets
/// NaN, so that nothing plausible comes out of its row; a target at −inf gets 0.
const char* launch_target_logits(const SeededChunk& chunk, const SeededRows& rows, void* stream);

/// Fills rest, logprob and lse from the sums (num_tiles, num_rows) of each vocab tile, in the order of the tiles. A row
/// whose target has a probability below 2^-64 or none gets the maximum of the others as its seed instead, and its
/// exponentials are made again, each by its own dot product: 4·vocab·depth FLOP by one block, twice over weight.
const char* launch_seeded_statistics(const SeededChunk& chunk, const SeededRows& rows, const float* partial,
                                     int num_tiles, const Exponentials& exponentials, void* stream);

/// Writes the target's exponential and the factor with which d_raw = factor · exponentials, and multiplies hidden's
/// rows by it. factor = (d_lse − d_logprob)·inv_temperature / S, and 0 for ignored rows.
const char* launch_seeded_scale(const SeededChunk& chunk, const SeededRows& rows, const SeededUpstream& upstream,
                                const Exponentials& exponentials, void* stream);

/// out = in · *scale, rounded once, of `count` bf16 from multiples of 16 bytes on; count is a multiple of 8.
const char* launch_scaled(const void* in, const float* scale, void* out, std::int64_t count, void* stream);

}  // namespace fusedce
