"""Every op of fusedce on one screen: names, arguments, results. Fakes and autograd live beside it.

Shapes: N tokens, D hidden, V vocabulary, E experts, K experts a token, F feed-forward, R = N·K routed rows.
`backend` is "auto", "eager", "triton" or "native"; `registry.choose` turns it into a choice with a reason.
A `[bool]` mask says which gradients are wanted; the others come back as tensors with no elements.
"""

import torch

NAMESPACE = "fusedce"

LIB = torch.library.Library(NAMESPACE, "DEF")

# ── linear cross-entropy ────────────────────────────────────────────────────────────────────────────────────────────
# hidden (N,D), weight (V,D), target (N,) int64, bias (V,). softcap 0 means none. row_temperature (N,) fp32 takes the
# place of temperature; token_weight (N,) and class_weight (V,) fp32. No gradient flows into these three.
# -> loss: (N,) for reduction "none", () for "mean" and "sum"; fp32
LIB.define(
    "linear_ce(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, str reduction='mean', "
    "int ignore_index=-100, float temperature=1.0, float softcap=0.0, float label_smoothing=0.0, float z_loss=0.0, "
    "Tensor? row_temperature=None, Tensor? token_weight=None, Tensor? class_weight=None, Tensor? main_grad=None, "
    "str backend='auto') -> Tensor"
)
# The same for num_heads heads over one weight, each with as many rows, one head after the other. head_weight (H,) fp32.
# -> loss (): Σ head_weight · the head's own loss; head_loss (H,): those, without a gradient; fp32
LIB.define(
    "linear_ce_heads(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, int num_heads, *, "
    "str reduction='mean', int ignore_index=-100, float temperature=1.0, float softcap=0.0, "
    "float label_smoothing=0.0, float z_loss=0.0, "
    "Tensor? row_temperature=None, Tensor? token_weight=None, Tensor? class_weight=None, Tensor? head_weight=None, "
    "Tensor? main_grad=None, str backend='auto') -> (Tensor loss, Tensor head_loss)"
)
# -> logprob (N,), entropy (N,), or (0,) without it, lse (N,); fp32; all three 0 where target == ignore_index;
#    normalizer (N,2): the row's largest raw logit, after the softcap and before the temperature, and
#    log Σ exp(z − its z), for the backward. Together they are lse, but where logits are large lse has lost the smaller.
LIB.define(
    "linear_logprob(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? row_temperature=None, *, "
    "int ignore_index=-100, float temperature=1.0, float softcap=0.0, bool with_entropy=True, str backend='auto') "
    "-> (Tensor logprob, Tensor entropy, Tensor lse, Tensor normalizer)"
)
# A shard of the vocabulary: target −1 says that the row's target is in another one.
# -> parts (N,4) fp32: over the shard's words but the target, the maximum m of the raw logits, Σ e^g and Σ e^g·g with
#    g = (raw − m) / temperature (0 without entropy); and the target's raw logit, −inf where it is elsewhere
LIB.define(
    "linear_parts(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? row_temperature=None, *, "
    "int ignore_index=-100, float temperature=1.0, float softcap=0.0, bool with_entropy=True, str backend='auto') "
    "-> Tensor"
)
# ids (N,K) int64, words or ignore_index
# -> logprob (N,K) fp32, 0 for an ignored slot; target (N,) int64: the likeliest of a row's ids; normalizer (N,2)
LIB.define(
    "linear_logprob_of(Tensor hidden, Tensor weight, Tensor ids, Tensor? bias, Tensor? row_temperature=None, *, "
    "int ignore_index=-100, float temperature=1.0, float softcap=0.0, str backend='auto') "
    "-> (Tensor logprob, Tensor target, Tensor normalizer)"
)
# d_lse (N,): of what else knows the row's log-sum-exp, as the words of another shard of the vocabulary do
LIB.define(
    "linear_logprob_of_backward(Tensor d_logprob, Tensor? d_lse, Tensor hidden, Tensor weight, Tensor ids, "
    "Tensor? bias, Tensor? row_temperature, Tensor logprob, Tensor target, Tensor normalizer, int ignore_index, "
    "float temperature, float softcap, bool[3] mask, str backend) -> (Tensor d_hidden, Tensor d_weight, Tensor d_bias)"
)
# -> word (N,) int64: the lowest id among the row's largest logits; −1 for a row with NaN or +inf. No gradient.
LIB.define("linear_argmax(Tensor hidden, Tensor weight, Tensor? bias=None, *, str backend='auto') -> Tensor")
# -> d_hidden (N,D), d_weight (V,D), d_bias (V,)
LIB.define(
    "linear_logprob_backward(Tensor? d_logprob, Tensor? d_entropy, Tensor? d_lse, Tensor hidden, Tensor weight, "
    "Tensor target, Tensor? bias, Tensor? row_temperature, Tensor logprob, Tensor entropy, Tensor normalizer, "
    "int ignore_index, float temperature, float softcap, bool[3] mask, str backend) "
    "-> (Tensor d_hidden, Tensor d_weight, Tensor d_bias)"
)
# The same with a backward that leaves out what does not count (`fusedce.budget`). gradient_budget 0: rows without a
# gradient; above 0: also words, within that share of the gradient. certificate (4,) fp32: its value is not read, and
# its gradient says what was left out.
# -> and mass (⌈V/256⌉, N) bf16: the probability of each tile of words but the target's, cut upwards; (0, 0) without
#    a budget above 0
LIB.define(
    "linear_logprob_sparse(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? row_temperature=None, "
    "Tensor? certificate=None, *, int ignore_index=-100, float temperature=1.0, float softcap=0.0, "
    "bool with_entropy=True, float gradient_budget=0.0, str backend='auto') "
    "-> (Tensor logprob, Tensor entropy, Tensor lse, Tensor normalizer, Tensor mass)"
)
# -> d_hidden (N,D), d_weight (V,D), d_bias (V,), certificate (4,) fp32
LIB.define(
    "linear_logprob_sparse_backward(Tensor? d_logprob, Tensor? d_entropy, Tensor? d_lse, Tensor hidden, Tensor weight, "
    "Tensor target, Tensor? bias, Tensor? row_temperature, Tensor logprob, Tensor entropy, Tensor normalizer, "
    "Tensor mass, int ignore_index, float temperature, float softcap, float gradient_budget, bool[3] mask, "
    "str backend) -> (Tensor d_hidden, Tensor d_weight, Tensor d_bias, Tensor certificate)"
)
# linear_logprob whose d_weight is added to main_grad (V,D), fp32, and not handed to autograd
LIB.define(
    "linear_logprob_into(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? row_temperature, "
    "Tensor main_grad, *, int ignore_index=-100, float temperature=1.0, float softcap=0.0, bool with_entropy=True, "
    "str backend='auto') -> (Tensor logprob, Tensor entropy, Tensor lse, Tensor normalizer)"
)
# -> d_hidden (N,D), d_bias (V,)
LIB.define(
    "linear_logprob_into_backward(Tensor(a!) main_grad, Tensor? d_logprob, Tensor? d_entropy, Tensor? d_lse, "
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? row_temperature, Tensor logprob, "
    "Tensor entropy, Tensor normalizer, int ignore_index, float temperature, float softcap, bool[3] mask, str backend) "
    "-> (Tensor d_hidden, Tensor d_bias)"
)
# loss = Σ −nll_weight·logprob + lse_weight·lse + square_weight·lse², weights (N,) fp32, with its gradients
# -> loss (), d_hidden (N,D), d_weight (V,D), in weight's dtype or fp32, d_bias (V,), logprob (N,), lse (N,)
LIB.define(
    "linear_ce_sum(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? row_temperature, "
    "Tensor nll_weight, Tensor? lse_weight, Tensor? square_weight, *, int ignore_index, float temperature, "
    "float softcap, bool[3] mask, bool fp32_weight_grad=False, str backend) "
    "-> (Tensor loss, Tensor d_hidden, Tensor d_weight, Tensor d_bias, Tensor logprob, Tensor lse)"
)

# -> the same gradients times d_loss ()
LIB.define(
    "linear_ce_sum_backward(Tensor d_loss, Tensor d_hidden, Tensor d_weight, Tensor d_bias, str backend) "
    "-> (Tensor d_hidden, Tensor d_weight, Tensor d_bias)"
)

# ── mixture of experts ──────────────────────────────────────────────────────────────────────────────────────────────
# logits (N,E) -> top_k_weights (N,K) fp32, top_k_index (N,K) int64; score "softmax" or "sigmoid". correction (E,) fp32
# is added to the scores for the choice alone; the K come from the top_groups of num_groups equal groups of experts
# whose group_best best sum highest.
LIB.define(
    "moe_route(Tensor logits, int top_k, Tensor? correction=None, *, str score='softmax', bool renormalize=True, "
    "float scale=1.0, int num_groups=1, int top_groups=1, int group_best=2, str backend='auto') "
    "-> (Tensor top_k_weights, Tensor top_k_index)"
)
# the weights of experts chosen elsewhere: top_k_index (N,K), −1 where a slot takes no part -> top_k_weights (N,K)
LIB.define(
    "moe_replay(Tensor logits, Tensor top_k_index, *, str score='softmax', bool renormalize=True, float scale=1.0, "
    "str backend='auto') -> Tensor"
)
# -> d_logits (N,E), of moe_route and of moe_replay
LIB.define(
    "moe_route_backward(Tensor d_weights, Tensor logits, Tensor top_k_index, str score, bool renormalize, float scale, "
    "str backend) -> Tensor"
)
# What the losses on a router are made of, for B sequences of N/B tokens; mask (N,) fp32 weighs the tokens.
# -> load (B,E): the slots of each expert; share (B,E): the sum of the normalized scores; square (B,): Σ lse(logits)²
LIB.define(
    "moe_balance(Tensor logits, Tensor top_k_index, Tensor? mask, *, int num_sequences=1, str score='softmax', "
    "str backend='auto') -> (Tensor load, Tensor share, Tensor square)"
)
# -> d_logits (N,E)
LIB.define(
    "moe_balance_backward(Tensor d_share, Tensor d_square, Tensor logits, Tensor? mask, int num_sequences, str score, "
    "str backend) -> Tensor"
)
# top_k_index (N,K) -> offsets (E+1,) int32: expert e owns rows [offsets[e], offsets[e+1]);
#                      row_slot (R,) int32: the slot n·K+k that row r serves; slot_row (N,K) int32: its inverse, −1
#                      for a slot that takes no part (id −1), −2 for an id out of range
LIB.define(
    "moe_plan(Tensor top_k_index, int num_experts, *, str backend='auto') "
    "-> (Tensor offsets, Tensor row_slot, Tensor slot_row)"
)
# C plans at once, each of ⌈N/C⌉ tokens in turn and in numbers of its own
# -> offsets (C,E+1), row_slot (R,), slot_row (N,K)
LIB.define(
    "moe_plan_chunks(Tensor top_k_index, int num_experts, int num_chunks, *, str backend='auto') "
    "-> (Tensor offsets, Tensor row_slot, Tensor slot_row)"
)
# The ops on rows take a plan as moe_plan makes it, R = N·K, or its row_slot cut to R ≥ offsets[E] rows, which is
# trusted as the plan's values are.
# hidden (N,D), gate_up_proj (E,2F,D), down_proj (E,D,F), top_k_weights (N,K), gate_up_bias (E,2F), down_bias (E,D);
# main gradients, fp32, like the weights: what the backward adds to, not read here
# -> rows (R,D), each already times its routing weight, or (N,D), their sums, with combine; pre_act (R,2F), kept for the
#    backward, or (0,2F) with save "plan"
LIB.define(
    "moe_experts(Tensor hidden, Tensor gate_up_proj, Tensor down_proj, Tensor top_k_weights, Tensor offsets, "
    "Tensor row_slot, Tensor slot_row, Tensor? gate_up_bias=None, Tensor? down_bias=None, "
    "Tensor? gate_up_main_grad=None, Tensor? down_main_grad=None, *, str activation='swiglu', float limit=7.0, "
    "bool interleaved=False, str save='pre_activation', bool combine=False, str backend='auto') "
    "-> (Tensor rows, Tensor pre_act)"
)
# -> d_hidden (N,D), d_gate_up_proj, d_down_proj, d_top_k_weights (N,K), d_gate_up_bias, d_down_bias
LIB.define(
    "moe_experts_backward(Tensor d_rows, Tensor hidden, Tensor gate_up_proj, Tensor down_proj, Tensor top_k_weights, "
    "Tensor offsets, Tensor row_slot, Tensor slot_row, Tensor? gate_up_bias, Tensor? down_bias, Tensor pre_act, "
    "str activation, float limit, bool interleaved, str save, bool combine, bool[6] mask, str backend) "
    "-> (Tensor d_hidden, Tensor d_gate_up_proj, Tensor d_down_proj, Tensor d_top_k_weights, Tensor d_gate_up_bias, "
    "Tensor d_down_bias)"
)
# The same, but the gradient of a weight whose main gradient is given, fp32, is added there and has no elements here.
LIB.define(
    "moe_experts_backward_into(Tensor d_rows, Tensor hidden, Tensor gate_up_proj, Tensor down_proj, "
    "Tensor top_k_weights, Tensor offsets, Tensor row_slot, Tensor slot_row, Tensor? gate_up_bias, Tensor? down_bias, "
    "Tensor pre_act, str activation, float limit, bool interleaved, str save, bool combine, bool[6] mask, "
    "Tensor(a!)? gate_up_main_grad, Tensor(b!)? down_main_grad, str backend) "
    "-> (Tensor d_hidden, Tensor d_gate_up_proj, Tensor d_down_proj, Tensor d_top_k_weights, Tensor d_gate_up_bias, "
    "Tensor d_down_bias)"
)
# hidden (N,D) -> rows (R,D): rows[r] = hidden[row_slot[r] // K]. Its gradient is moe_combine, and the other way round.
LIB.define("moe_dispatch(Tensor hidden, Tensor row_slot, Tensor slot_row, *, str backend='auto') -> Tensor")
# rows (R,D) -> (N,D): the sum of a token's K rows, in slot order, accumulated in fp32; slot_row −1 adds 0, −2 NaN
LIB.define("moe_combine(Tensor rows, Tensor row_slot, Tensor slot_row, *, str backend='auto') -> Tensor")
