"""The losses on a router, and the rule that balances one without a loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedce import checks
from fusedce.functional.moe_route import SCORES, check_index
from fusedce.options import RouterBalance

__all__ = ["load_balance_loss", "moe_balance", "router_z_loss", "sequence_balance_loss", "update_correction"]


def moe_balance(
    logits: Tensor,
    top_k_index: Tensor,
    *,
    mask: Tensor | None = None,
    num_sequences: int = 1,
    score: str = "softmax",
    backend: str = "auto",
) -> RouterBalance:
    """What the losses on a router are made of, in one reading of its logits.

    Over the tokens n of each sequence, m the mask or 1: load = Σ m · [slots of n that name expert e],
    share = Σ m · s_ne / Σ_e s_ne, square = Σ m · lse(logits[n])², tokens = Σ m.

    Args:
        logits: (N, E) fp32, bf16 or fp16 (fp64 on the eager backend), any strides: the router's, before any correction.
        top_k_index: (N, K) int64, the ids chosen; those out of [0, E) are counted nowhere.
        mask: N numbers or booleans in any shape, such as an attention mask (B, S). Where it is 0 the token takes no
            part, whatever its logits hold; other values weigh it. No gradient.
        num_sequences: B, a divisor of N: tokens b·N/B to (b + 1)·N/B − 1 are one sequence.
        score: "softmax" or "sigmoid": what s is.
        backend: "auto", "eager", "triton" or "native".

    Returns:
        `RouterBalance`, fp32 (fp64 for fp64), for `load_balance_loss`, `sequence_balance_loss` and `router_z_loss`;
        share and square are differentiable in logits. Double backward raises RuntimeError.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, shape or value, naming the argument.
        RuntimeError: a named backend that cannot run here, with the reason.

    Memory: on a GPU 8 bytes for 2048 logits and one expert more in between; the logits are kept for the backward.
    Deterministic: partial sums in a fixed order.
    """
    op = "moe_balance"
    checks.tensor(op, "logits", logits, checks.FLOATS)
    checks.shape(op, "logits", logits, (None, None), "(N, E)")
    checks.positive(op, E=logits.shape[1])
    num_tokens = logits.shape[0]
    check_index(op, top_k_index, num_tokens)
    checks.one_of(op, "score", score, SCORES)
    checks.count(op, "num_sequences", num_sequences)
    if num_tokens % num_sequences:
        raise ValueError(
            f"fusedce.{op}: argument 'num_sequences' is {num_sequences}; expected a divisor of N = {num_tokens}"
        )
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if mask is None:
        tokens = logits.new_full((num_sequences,), num_tokens // num_sequences, dtype=dtype)
    else:
        checks.tensor(op, "mask", mask, (*checks.FLOATS, torch.bool, torch.int64, torch.int32))
        if mask.numel() != num_tokens:
            raise ValueError(checks.wrong(op, "mask", mask, f"N = {num_tokens} elements"))
        mask = mask.detach().reshape(-1).to(dtype)
        tokens = mask.view(num_sequences, -1).sum(1) if num_tokens else mask.new_zeros(num_sequences)
    checks.same_device(op, logits=logits, top_k_index=top_k_index, mask=mask)
    load, share, square = torch.ops.fusedce.moe_balance(
        logits, top_k_index, mask, num_sequences=num_sequences, score=score, backend=backend
    )
    return RouterBalance(load, share, square, tokens, top_k_index.shape[1])


def load_balance_loss(balances: RouterBalance | Sequence[RouterBalance]) -> Tensor:
    """E · Σ_e f_e · P_e, over all tokens of all the layers given at once: the loss of Switch, Mixtral and their kin.

    f_e = Σ load_e / Σ tokens and P_e = Σ share_e / Σ tokens. It is K where the load is even, as in transformers, which
    does not divide it by K. The gradient flows through P.

    Args:
        balances: of one layer or of several of the same E, sums (B, E) and (B,).

    Returns:
        (), fp32 (fp64 for fp64); 0 without a token.

    Raises:
        ValueError: no layer, or layers of different E.

    Memory: a few vectors of B·E. Deterministic, no host sync.
    """
    layers = _layers("load_balance_loss", balances)
    tokens = _at_least_one(_total([b.tokens.sum() for b in layers]))
    load, share = _total([b.load.sum(0) for b in layers]), _total([b.share.sum(0) for b in layers])
    return load.shape[0] * ((load / tokens) * (share / tokens)).sum()


def sequence_balance_loss(balances: RouterBalance | Sequence[RouterBalance]) -> Tensor:
    """The mean over sequences, and over layers, of Σ_e f_e · P_e within a sequence: the loss of DeepSeek-V3.

    f_e = E · load_e / (K · tokens), P_e = share_e / tokens; with score="sigmoid" in `moe_balance` the shares are
    those of DeepSeek-V3. It is 1 where a sequence's load is even. The gradient flows through P.

    Args:
        balances: of one layer or of several, sums (B, E). A sequence without a token counts 0.

    Returns:
        (), fp32 (fp64 for fp64).

    Raises:
        ValueError: no layer, or layers of different E.

    Memory: a few vectors of B·E. Deterministic, no host sync.
    """
    layers = _layers("sequence_balance_loss", balances)
    losses = []
    for balance in layers:
        tokens = _at_least_one(balance.tokens)[:, None]
        f = balance.load * (balance.load.shape[1] / balance.top_k) / tokens
        losses.append((f * (balance.share / tokens)).sum(1).mean())
    return torch.stack(losses).mean()


def router_z_loss(balances: RouterBalance | Sequence[RouterBalance]) -> Tensor:
    """The mean of lse(logits)² over all tokens of all the layers given: keeps a router's logits small.

    Args:
        balances: of one layer or of several of the same E, sums (B, E) and (B,).

    Returns:
        (), fp32 (fp64 for fp64); 0 without a token.

    Raises:
        ValueError: no layer, or layers of different E.

    Memory: a few vectors of B·E. Deterministic, no host sync.
    """
    layers = _layers("router_z_loss", balances)
    return _total([b.square.sum() for b in layers]) / _at_least_one(_total([b.tokens.sum() for b in layers]))


@torch.no_grad()
def update_correction(correction: Tensor, counts: Tensor, rate: float) -> None:
    """Balance a router without a loss: correction_e += rate · sign(mean(counts) − counts_e), in place.

    Call it once a step, with the counts of all ranks: an expert above the mean becomes a little less likely.

    Args:
        correction: (E,) floats, such as `Router.correction`.
        counts: (E,) numbers: the slots of each expert since the last call, such as `MoEPlan.counts`.
        rate: a finite number above 0; DeepSeek-V3 took 0.001.

    Returns:
        None.

    Raises:
        TypeError, ValueError: a wrong kind, dtype, shape or value, naming the argument.

    Memory: a few vectors of E. Deterministic, no host sync.
    """
    op = "update_correction"
    checks.tensor(op, "correction", correction, checks.FLOATS)
    checks.shape(op, "correction", correction, (None,), "(E,)")
    checks.tensor(op, "counts", counts, (*checks.FLOATS, torch.int64, torch.int32))
    checks.shape(op, "counts", counts, tuple(correction.shape), "(E,)")
    checks.same_device(op, correction=correction, counts=counts)
    checks.positive_number(op, "rate", rate)
    # In fp64: a mean that fp32 rounds off would move experts that have exactly the mean.
    exact = counts.double()
    correction.add_((exact.sum() - exact * exact.shape[0]).sign().to(correction.dtype), alpha=rate)


def _layers(name: str, balances: RouterBalance | Sequence[RouterBalance]) -> Sequence[RouterBalance]:
    layers = [balances] if isinstance(balances, RouterBalance) else list(balances)
    sizes = sorted({balance.load.shape[1] for balance in layers})
    if len(sizes) != 1:
        raise ValueError(f"fusedce.{name}: argument 'balances' has E = {sizes}; expected at least one layer, of one E")
    return layers


def _total(values: list[Tensor]) -> Tensor:
    # to the first one's device: layers may be spread over several
    return torch.stack([value.to(values[0].device) for value in values]).sum(0)


def _at_least_one(tokens: Tensor) -> Tensor:
    """Where there is no token, what is divided is 0 too."""
    return torch.where(tokens == 0, 1.0, tokens)
