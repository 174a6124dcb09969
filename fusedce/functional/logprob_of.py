"""Log-probs of several words a token: check, flatten, one op call."""

import torch
from torch import Tensor

from fusedce import checks, flags
from fusedce.functional.operands import check_options, head_weights, row_temperature

__all__ = ["linear_logprob_of"]


def linear_logprob_of(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    check: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """Log-probs of K words of each token, as a distillation from a teacher's top K asks for, without the logits.

    logprob_k = z_{ids_k} − lse, with z and lse as in `linear_logprob`. One log-sum-exp a token, whatever K is; the
    forward's further cost is a dot product of D a word. Backward: d_z_j = Σ_{k: ids_k = j} d_k − p_j · Σ_k d_k.

    Args:
        hidden: (..., D) fp32, bf16 or fp16 (fp64 on the eager backend), any strides.
        weight: (V, D). One of another dtype is cast to hidden's. Under torch.autocast both are cast to its dtype.
        ids: (..., K) int64, K from 1: words in [0, V), or `ignore_index` for a slot that is not used. A word may come
            several times in a row; its gradients add up.
        bias: (V,) or None.
        temperature: divides the logits, above 0: a number, or a tensor of hidden's shape without D with one for each
            token (its values are not checked, and it gets no gradient).
        softcap, vocab_size, check: see `linear_logprob`. A value out of range is reported with its place in the
            flattened ids, and on a GPU its slot is NaN and all of its token's gradient.
        ignore_index: the id of slots that take no part: their result is 0 and they have no gradient. A token with no
            other slot takes no part and may hold anything.
        backend: "auto", "eager", "triton" or "native"; `fusedce.explain()` says what "auto" takes and why.

    Returns:
        (..., K) fp32 (fp64 for fp64), differentiable in hidden, weight and bias with any upstream gradient. Double
        backward raises RuntimeError.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, device, shape or value, naming the argument.
        RuntimeError: a named backend that cannot run here, with the reason.

    Memory: forward at most 24·N·K + 24·N bytes and at most 64 MiB of partial sums; native: 4·N·K + 24·N bytes and a
    chunk of fp32 logits within FUSEDCE_WORKSPACE_MB; backward as `linear_logprob`, and 24·N·K bytes. Work:
    2·N·D·(V + K) FLOP forward, 6·N·D·V backward. Deterministic.
    """
    op = "linear_logprob_of"
    hidden, weight, bias = head_weights(op, ("hidden", "weight", "bias"), hidden, weight, bias, vocab_size)
    checks.tensor(op, "ids", ids, (torch.int64,))
    checks.shape(op, "ids", ids, (*hidden.shape[:-1], None), "hidden's shape with K for D")
    checks.positive(op, K=ids.shape[-1])
    checks.same_device(op, hidden=hidden, ids=ids)
    check_options(op, softcap, ignore_index, check)
    scalar, rows = row_temperature(op, temperature, ids[..., 0], "hidden's shape without D")
    flat = ids.reshape(-1, ids.shape[-1])
    if rows is not None:
        # Of a token that takes no part, any temperature will do.
        rows = torch.where((flat != ignore_index).any(1), rows, 1.0)
    logprob, _, _ = torch.ops.fusedce.linear_logprob_of(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        flat,
        bias,
        rows,
        ignore_index=ignore_index,
        temperature=scalar,
        softcap=float(softcap or 0.0),
        backend=backend,
    )
    if check == "sync":
        flags.check_flags()
    return logprob.reshape(ids.shape)
