// Linear cross-entropy's three matrix products on Hopper (compute capability 9.0), as plain functions: no CUDA or torch
// header is needed to call them.
//
// With x = hidden·weightᵀ + bias, raw = softcap·tanh(x/softcap) or x, z = raw·inv_temperature. Logits are never
// written: they are summed, or made again as their gradient; or E = e^(z − seed), with a seed near the target's z, has
// all that the loss and its gradients need. The target's own column is left out of E and of all sums: its probability
// would be lost in them, and the caller has it exactly.
//
// Built for sm_90a only: another build of this file stops with a trap where it is launched. Sums of products are fp32
// in an order that the shape alone decides, and every element is written by one block: results repeat bit for bit.
#pragma once

#include <cstdint>

namespace fusedce {

/// A bf16 matrix on the GPU whose rows are dense and `stride` elements apart. It starts at a multiple of 16 bytes, and
/// so does each row: strides are multiples of 8. What is written as such a matrix is 0 up to the next multiple of 8
/// columns.
struct Bf16Rows {
  const void* data;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t stride;
};

/// What makes raw logits of the product.
struct LogitTerms {
  const float* bias;           // (vocab,) or nullptr
  const std::int64_t* target;  // (num_rows,): this row's column to leave out, or any number that is no column
  float softcap;               // 0: none
};

/// What is taken off logits before the exponential, and what they are multiplied with then.
struct LogitSeeds {
  const float* inv_temperature;  // (num_rows,)
  const float* seed;             // (num_rows,) a raw logit, finite; NaN makes its row NaN
};

/// Over a row's columns of one vocab tile, fp32: with m the largest raw logit, g = (raw − m)·inv_temperature.
struct LogitSumsOut {
  float* max;         // (vocab_tiles, num_rows): m; −inf where there is none
  float* exp;         // (vocab_tiles, num_rows): Σ e^g
  float* gap;         // (vocab_tiles, num_rows) or nullptr: Σ e^g·g
  float* raw_target;  // (num_rows,): the target's raw logit; not written where that is no column
};

/// Columns of a vocab tile: there are ⌈vocab / this⌉ tiles.
int hopper_vocab_tile();

// All return nullptr, or what is wrong. stream: a cudaStream_t. They do not wait for the GPU, and need no memory.

/// Work: 2·num_rows·D·vocab. Writes 8 or 12 bytes a row and tile.
const char* launch_logit_sums(const Bf16Rows& hidden, const Bf16Rows& weight, const LogitTerms& terms,
                              const float* inv_temperature, const LogitSumsOut& out, void* stream);

/// d_logits (num_rows, vocab) = bf16(p·(on_probs − on_surprise·(log₂p + H))·cap′), and on_target·cap′ at the target,
/// with log₂p = (raw − m)·slope2 − log_sum and cap′ = 1 − tanh² or 1. numbers: (num_rows, 8) from a multiple of 16
/// bytes on: slope2, m, log_sum, on_probs, on_target, on_surprise, H; the last two are not looked at unless
/// `with_entropy`. Work: 2·num_rows·D·vocab.
const char* launch_logit_gradient(const Bf16Rows& hidden, const Bf16Rows& weight, const LogitTerms& terms,
                                  const float* numbers, bool with_entropy, const Bf16Rows& d_logits, void* stream);

/// exponentials (num_rows, vocab) = bf16(e·cap′) with e = e^((raw − seed)·inv_temperature), and sums (vocab_tiles,
/// num_rows) of e, fp32 and before E is rounded; infinite where e is, above 2^128. Work: 2·num_rows·D·vocab.
const char* launch_seeded_exponentials(const Bf16Rows& hidden, const Bf16Rows& weight, const LogitTerms& terms,
                                       const LogitSeeds& seeds, const Bf16Rows& exponentials, float* sums,
                                       void* stream);

/// d_hidden (num_rows, D) = bf16(row_scale · d_logits·weight). row_scale: (num_rows,) fp32, or nullptr for ones.
const char* launch_d_hidden(const Bf16Rows& d_logits, const Bf16Rows& weight, const float* row_scale,
                            const Bf16Rows& d_hidden, void* stream);

/// d_weight (vocab, D) fp32, rows dense, D a multiple of 4: += d_logitsᵀ·hidden, or = where not `accumulate`. hidden:
/// (num_rows, D), each row times the scale that d_logits lacks.
const char* launch_d_weight(const Bf16Rows& d_logits, const Bf16Rows& hidden, float* d_weight, bool accumulate,
                            void* stream);

}  // namespace fusedce
