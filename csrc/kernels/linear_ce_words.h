// Rows of logits of which single words are asked for: the largest one's, or several by their ids; as plain functions:
// no CUDA, HIP or torch header is needed to call them.
#pragma once

#include <cstdint>

#include "linear_ce_rows.h"

namespace fusedce {

/// fp32 logits before bias and softcap.
struct WordRows {
  const float* logits;  // (num_rows, vocab), rows `row_stride` words apart
  const float* bias;    // (vocab,) or nullptr
  std::int64_t num_rows;
  std::int64_t row_stride;
  int vocab;
};

/// The words that each row asks for.
struct Slots {
  const std::int64_t* ids;  // (num_rows, num_slots): columns, or ignore_index for a slot without a word
  std::int64_t ignore_index;
  int num_slots;
  float softcap;  // 0: none
};

/// What the words' entries of the gradient are made of, fp32. With d the upstream gradient of a slot's log-prob over
/// the temperature, d_raw_j = Σ_{slots of j} d·(1 − p_j) + p_j·(on_probs + Σ_{slots of j} d).
struct SlotGradients {
  const float* upstream;    // (num_rows, num_slots): d
  const float* logprob;     // (num_rows, num_slots)
  const float* complement;  // (num_rows, num_slots): 1 − p, which has its digits where p is near 1
  const float* on_probs;    // (num_rows,): −Σ d over all slots of a row, and what else its probabilities are to have
};

// All return nullptr, or what the runtime says is wrong with the launch. stream: a cudaStream_t or hipStream_t.

/// words: (num_rows,), the lowest of the columns of a row's largest logit (plain + bias: a softcap moves none past
/// another); −1 for a row with NaN or +inf.
const char* launch_argmax_rows(const WordRows& rows, std::int64_t* words, void* stream);

/// raw: (num_rows, num_slots) fp32, the raw logit of every slot's word; NaN where it names none.
const char* launch_selected_logits(const WordRows& rows, const Slots& slots, float* raw, void* stream);

/// Writes the entries of all slots' words into d_logits: (num_rows, vocab) of `dtype`, rows `out_stride` elements
/// apart, which holds on_probs·p·(the softcap's slope) everywhere. num_slots² comparisons a row.
const char* launch_selected_gradient(const WordRows& rows, const Slots& slots, const SlotGradients& gradients,
                                     void* d_logits, Dtype dtype, std::int64_t out_stride, void* stream);

}  // namespace fusedce
