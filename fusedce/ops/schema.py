"""Every op of fusedce on one screen: names, arguments, results. Fakes and autograd live in `linear_ce.py` and `moe.py`.

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
    "Tensor? row_temperature=None, Tensor? token_weight=None, Tensor? class_weight=None, str backend='auto') -> Tensor"
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
# loss = Σ −nll_weight·logprob + lse_weight·lse + square_weight·lse², weights (N,) fp32, with its gradients
# -> loss (), d_hidden (N,D), d_weight (V,D), d_bias (V,)
LIB.define(
    "linear_ce_sum(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? row_temperature, "
    "Tensor nll_weight, Tensor? lse_weight, Tensor? square_weight, *, int ignore_index, float temperature, "
    "float softcap, bool[3] mask, str backend) -> (Tensor loss, Tensor d_hidden, Tensor d_weight, Tensor d_bias)"
)

# -> the same gradients times d_loss ()
LIB.define(
    "linear_ce_sum_backward(Tensor d_loss, Tensor d_hidden, Tensor d_weight, Tensor d_bias, str backend) "
    "-> (Tensor d_hidden, Tensor d_weight, Tensor d_bias)"
)

# ── mixture of experts ──────────────────────────────────────────────────────────────────────────────────────────────
# logits (N,E) -> top_k_weights (N,K) fp32, top_k_index (N,K) int64; score "softmax" or "sigmoid"
LIB.define(
    "moe_route(Tensor logits, int top_k, *, str score='softmax', bool renormalize=True, float scale=1.0, "
    "str backend='auto') -> (Tensor top_k_weights, Tensor top_k_index)"
)
# -> d_logits (N,E)
LIB.define(
    "moe_route_backward(Tensor d_weights, Tensor logits, Tensor top_k_index, str score, bool renormalize, float scale, "
    "str backend) -> Tensor"
)
# top_k_index (N,K) -> offsets (E+1,) int32: expert e owns rows [offsets[e], offsets[e+1]);
#                      row_slot (R,) int32: the slot n·K+k that row r serves; slot_row (N,K) int32: its inverse
LIB.define(
    "moe_plan(Tensor top_k_index, int num_experts, *, str backend='auto') "
    "-> (Tensor offsets, Tensor row_slot, Tensor slot_row)"
)
# hidden (N,D), gate_up_proj (E,2F,D), down_proj (E,D,F), top_k_weights (N,K)
# -> rows (R,D), each already times its routing weight; pre_act (R,2F), kept for the backward
LIB.define(
    "moe_experts(Tensor hidden, Tensor gate_up_proj, Tensor down_proj, Tensor top_k_weights, Tensor offsets, "
    "Tensor row_slot, Tensor slot_row, *, str backend='auto') -> (Tensor rows, Tensor pre_act)"
)
# -> d_hidden (N,D), d_gate_up_proj, d_down_proj, d_top_k_weights (N,K)
LIB.define(
    "moe_experts_backward(Tensor d_rows, Tensor hidden, Tensor gate_up_proj, Tensor down_proj, Tensor top_k_weights, "
    "Tensor offsets, Tensor row_slot, Tensor slot_row, Tensor pre_act, bool[4] mask, str backend) "
    "-> (Tensor d_hidden, Tensor d_gate_up_proj, Tensor d_down_proj, Tensor d_top_k_weights)"
)
# hidden (N,D) -> rows (R,D): rows[r] = hidden[row_slot[r] // K]. Its gradient is moe_combine, and the other way round.
LIB.define("moe_dispatch(Tensor hidden, Tensor row_slot, Tensor slot_row, *, str backend='auto') -> Tensor")
# rows (R,D) -> (N,D): the sum of a token's K rows, in slot order, accumulated in fp32
LIB.define("moe_combine(Tensor rows, Tensor row_slot, Tensor slot_row, *, str backend='auto') -> Tensor")
