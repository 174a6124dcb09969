"""Log-probs of several words a row: one log-sum-exp and a dot product a word; backward, entries of d_logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce import arch, chunked
from fusedce.configs import GemmTile
from fusedce.options import LogitOptions
from fusedce.rows import RowGradient, Selection, row_numbers, row_slopes
from fusedce.triton.common import ROW_LAUNCH, round_to, unit_rows
from fusedce.triton.linear_ce.backward import launch_d_logits
from fusedce.triton.linear_ce.forward import head_of, linear_logprob
from fusedce.triton.linear_ce.logits import LOG2_E, cap_slope
from fusedce.triton.linear_ce.target_logit import target_logit

STAGE = None
BLOCK_K = 32
NO_TARGET = -1


@triton.jit
def selected_bwd_kernel(
    ids_ptr,
    upstream_ptr,
    logprob_ptr,
    complement_ptr,
    raw_ptr,
    row_ptr,
    out_ptr,
    slots,
    vocab,
    out_stride,
    softcap,
    ignore_index,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program owns BLOCK_K slots of one row and writes their words' entries of d_logits: all of a word's upstream
    gradients, less p times all of the row's.

    (rows, slots): ids int64; upstream, logprob, complement (1 − p) and, for the softcap, raw
    logit, fp32. row_ptr: as in d_logits_bwd_kernel. Slots
    of one word write the same number, so the order does not matter. Offsets into the chunk are int64.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = offs_k < slots
    first = row * slots
    ids = tl.load(ids_ptr + first + offs_k, mask=mask_k, other=ignore_index)
    same = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, slots, BLOCK_K):
        others = start + tl.arange(0, BLOCK_K)
        other_ids = tl.load(ids_ptr + first + others, mask=others < slots, other=ignore_index)
        upstream = tl.load(upstream_ptr + first + others, mask=others < slots, other=0.0)
        same += tl.sum(tl.where(ids[:, None] == other_ids[None, :], upstream[None, :], 0.0), 1)
    on_probs = tl.load(row_ptr + 8 * row + 3)
    log_probs = tl.load(logprob_ptr + first + offs_k, mask=mask_k, other=0.0) * LOG2_E
    complement = tl.load(complement_ptr + first + offs_k, mask=mask_k, other=0.0)
    entry = same * complement + tl.exp2(log_probs) * (on_probs + same)
    if HAS_SOFTCAP:
        entry *= cap_slope(tl.load(raw_ptr + first + offs_k, mask=mask_k, other=0.0), softcap)
    mask = mask_k & (ids != ignore_index) & (ids >= 0) & (ids < vocab)
    tl.store(out_ptr + row * out_stride + ids, round_to(entry, out_ptr.dtype.element_ty), mask=mask)


KERNEL = selected_bwd_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument."""
    return {
        "ids_ptr": "*i64",
        **dict.fromkeys(("upstream_ptr", "logprob_ptr", "complement_ptr", "raw_ptr", "row_ptr"), "*fp32"),
        "out_ptr": f"*{dtype}",
        **dict.fromkeys(("slots", "vocab", "out_stride"), "i32"),
        "softcap": "fp32",
        "ignore_index": "i32",
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None, has_softcap: bool = True) -> dict[str, int]:
    """The kernel's sizes and switches; a row kernel has no tile."""
    return {"HAS_SOFTCAP": has_softcap, "BLOCK_K": BLOCK_K}


def linear_logprob_of(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, options: LogitOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of every id (N,K), the target (N,) that the row's results are made with, and the normalizer (N,2)."""
    hidden, weight, ids = unit_rows(hidden), unit_rows(weight), ids.contiguous()
    raw = _raw(hidden, weight, ids, bias, options)
    words = Selection(ids, options, weight.shape[0])
    target = words.target(raw)
    _, _, _, normalizer = linear_logprob(hidden, weight, target, bias, options, False)
    return words.logprobs(raw, normalizer), target, normalizer


def linear_logprob_of_backward(
    d_logprob: Tensor,
    d_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    logprob: Tensor,
    target: Tensor,
    normalizer: Tensor,
    options: LogitOptions,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """d_hidden, d_weight, d_bias. See `fusedce.eager.selected` for the formula, `fusedce.chunked` for the two GEMMs."""
    hidden, weight, ids = unit_rows(hidden), unit_rows(weight), ids.contiguous()
    words = Selection(ids, options, weight.shape[0])
    upstream = words.upstream(d_logprob.float())
    on_probs = words.on_probs(upstream, d_lse)
    scale = chunked.batch_scale(on_probs, upstream.abs().amax(1))
    # Every word is written as one that is not selected; then those that are, once more.
    gradient = RowGradient(on_probs, None, torch.zeros_like(on_probs)).over(scale)
    numbers = row_numbers(gradient, on_probs, normalizer, row_slopes(options, hidden.shape[0], hidden))
    nothing, slots = torch.full_like(target, NO_TARGET), ids.shape[1]
    upstream, complement = upstream / scale, -torch.expm1(logprob)
    units = arch.of_device(hidden.device).num_units
    chunks = chunked.gemm_chunks(hidden, weight, units, weight.shape[0] * hidden.element_size())
    sums = chunked.GradientSums(hidden, weight, mask, chunks)
    for start, stop in chunks:
        part, d_logits = slice(start, stop), sums.d_logits(stop - start)
        rows = chunked.kept_rows(hidden[part], target[part], options.ignore_index)
        launch_d_logits(rows, weight, bias, nothing[part], numbers[part], options, False, d_logits)
        # The softcap's slope is made from the logit: from the log-prob it would have fewer digits.
        raw = logprob if not options.softcap else _raw(rows, weight, ids[part], bias, options)
        with torch.cuda.device_of(hidden):
            KERNEL[(stop - start, triton.cdiv(slots, BLOCK_K))](
                ids[part], upstream[part], logprob[part], complement[part], raw, numbers[part], d_logits,
                slots, weight.shape[0], d_logits.stride(0), options.softcap, options.ignore_index,
                **constexprs(None, options.softcap != 0.0), **ROW_LAUNCH,
            )  # fmt: skip
        del d_logits
        sums.add(start, stop, rows)
    return sums.result(scale)


def _raw(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, options: LogitOptions) -> Tensor:
    """(N,K) fp32: the raw logit of every id; see `target_logit`."""
    return target_logit(ids.reshape(-1), head_of(hidden, weight, bias, options), ids.shape[1]).reshape(ids.shape)
