// Linear cross-entropy's three matrix products on Hopper (compute capability 9.0), as plain functions: no CUDA or torch
// header is needed to call them.
//
// With x = hidden·weightᵀ + bias, cap(x) = softcap·tanh(x/softcap) or x, z = cap(x)·inv_temperature and a seed near the
// target's z, E = e^(z − seed) has all that the loss and its gradients need; logits are never written. The target's own
// column is left out of E and of its sums: its probability would be lost in Σ E, and the caller has it exactly.
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

/// What makes logits of the product, and what is taken off them before the exponential.
struct LogitSeeds {
  const float* bias;             // (vocab,) or nullptr
  const float* inv_temperature;  // (num_rows,)
  const float* seed;             // (num_rows,) finite; NaN makes its row NaN
  const std::int64_t* target;    // (num_rows,): this row's column to leave out, or any number that is no column
  float softcap;                 // 0: none
};

/// Sums over a row's columns of one vocab tile, fp32 and before E is rounded. Infinite where e is: above 2^128.
struct PartialSums {
  float* exp;  // (vocab_tiles, num_rows): Σ e
  float* gap;  // (vocab_tiles, num_rows) or nullptr: Σ e·(z − seed)
};

/// Columns of a vocab tile: PartialSums has ⌈vocab / this⌉ tiles.
int hopper_vocab_tile();

// All return nullptr, or what is wrong. stream: a cudaStream_t. They do not wait for the GPU, and need no memory.

/// exponentials (num_rows, vocab) = bf16(e·cap′), with cap′ = 1 − tanh² or 1, and the sums of e. exponentials.data may
/// be nullptr: only the sums are written. Work: 2·num_rows·D·vocab.
const char* launch_seeded_exponentials(const Bf16Rows& hidden, const Bf16Rows& weight, const LogitSeeds& seeds,
                                       const Bf16Rows& exponentials, const PartialSums& sums, void* stream);

/// d_hidden (num_rows, D) = bf16(row_scale · exponentials·weight). row_scale: (num_rows,) fp32.
const char* launch_d_hidden(const Bf16Rows& exponentials, const Bf16Rows& weight, const float* row_scale,
                            const Bf16Rows& d_hidden, void* stream);

/// d_weight (vocab, D) fp32, rows dense, D a multiple of 4: += exponentialsᵀ·hidden, or = where not `accumulate`.
/// hidden: (num_rows, D), each row times its scale.
const char* launch_d_weight(const Bf16Rows& exponentials, const Bf16Rows& hidden, float* d_weight, bool accumulate,
                            void* stream);

}  // namespace fusedce
