"""The plan: a stable counting sort of the slots by expert. Count (plan_count.py), one prefix sum, then rank."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH
from fusedce.triton.moe.plan_count import BLOCK_S, count_slots

STAGE = None


@triton.jit
def plan_rank_kernel(
    ids_ptr,
    counts_ptr,
    ends_ptr,
    offsets_ptr,
    row_slot_ptr,
    slot_row_ptr,
    num_slots,
    chunk_slots,
    num_experts,
    num_blocks,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program owns BLOCK_S slots of one chunk: a slot's row is its block's first row of the expert plus the equal
    ids before it. Slots and rows are the chunk's own. A chunk's first program also writes its offsets.

    ends: the running sum of counts over chunks, experts and blocks. Reads 16 bytes a slot, writes 8. Id −1 gets row −1,
    an id out of range −2. Chunk × E × blocks may pass 2³¹: int64.
    """
    block = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    before = tl.load(ends_ptr + chunk * num_experts * num_blocks - 1, mask=chunk > 0, other=0)
    if block == 0:
        corner = offsets_ptr + chunk * (num_experts + 1)
        tl.store(corner, 0)
        for begin in range(0, num_experts, BLOCK_E):
            offs_e = begin + tl.arange(0, BLOCK_E)
            mask_e = offs_e < num_experts
            last = tl.load(ends_ptr + (chunk * num_experts + offs_e + 1) * num_blocks - 1, mask=mask_e, other=0)
            tl.store(corner + offs_e + 1, last - before, mask=mask_e)
    offs_s = block * BLOCK_S + tl.arange(0, BLOCK_S)
    first = chunk * chunk_slots
    slots = tl.minimum(num_slots - first, chunk_slots)
    mask_s = offs_s < slots
    ids = tl.load(ids_ptr + first + offs_s, mask=mask_s, other=-1)
    inside = (ids >= 0) & (ids < num_experts)
    rank = tl.zeros((BLOCK_S,), tl.int32)
    # The same ids along another axis, BLOCK_T at a time: registers would not hold all pairs.
    for begin in range(block * BLOCK_S, block * BLOCK_S + BLOCK_S, BLOCK_T):
        offs_t = begin + tl.arange(0, BLOCK_T)
        others = tl.load(ids_ptr + first + offs_t, mask=offs_t < slots, other=-1)
        earlier = (ids[:, None] == others[None, :]) & (offs_t[None, :] < offs_s[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    at = (chunk * num_experts + ids) * num_blocks + block
    end = tl.load(ends_ptr + at, mask=inside, other=0)
    row = end - tl.load(counts_ptr + at, mask=inside, other=0) - before + rank
    without = tl.where(ids == -1, -1, -2)
    tl.store(slot_row_ptr + first + offs_s, tl.where(inside, row, without), mask=mask_s)
    tl.store(row_slot_ptr + first + row, offs_s, mask=inside)


KERNEL = plan_rank_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument; all are integers, whatever `dtype`."""
    return {
        "ids_ptr": "*i64",
        **dict.fromkeys(("counts_ptr", "ends_ptr", "offsets_ptr", "row_slot_ptr", "slot_row_ptr"), "*i32"),
        **dict.fromkeys(("num_slots", "chunk_slots", "num_experts", "num_blocks"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None) -> dict[str, int]:
    """The kernel's sizes; a row kernel has no tile."""
    return {"BLOCK_S": BLOCK_S, "BLOCK_T": 16, "BLOCK_E": 64}


def moe_plan(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """offsets (E+1,), row_slot (R,), slot_row (N,K), int32. See `fusedce.eager.moe_route`."""
    offsets, row_slot, slot_row = moe_plan_chunks(top_k_index, num_experts, 1)
    return offsets.view(-1), row_slot, slot_row


def moe_plan_chunks(top_k_index: Tensor, num_experts: int, num_chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """offsets (C,E+1), row_slot (R,), slot_row (N,K), int32. See `fusedce.eager.moe_route`."""
    ids = top_k_index.reshape(-1).contiguous()
    num_slots = ids.shape[0]
    chunk_slots = triton.cdiv(top_k_index.shape[0], num_chunks) * top_k_index.shape[1]
    counts = count_slots(ids, num_experts, num_chunks, chunk_slots)
    num_blocks = counts.shape[2]
    offsets = counts.new_empty((num_chunks, num_experts + 1))
    # Rows that serve no slot keep −1.
    row_slot = torch.full_like(ids, -1, dtype=torch.int32)
    slot_row = torch.empty_like(top_k_index, dtype=torch.int32, memory_format=torch.contiguous_format)
    if not num_slots:
        offsets.zero_()
    else:
        # Chunk by chunk, expert by expert, block by block: one running sum over all counts, less what the chunks before
        # sum to, is where each block's rows of an expert end. One sum, because a GPU is slow at a few long ones.
        ends = counts.view(-1).cumsum(0, dtype=torch.int32)
        with torch.cuda.device_of(ids):
            KERNEL[(num_blocks, num_chunks)](
                ids, counts, ends, offsets, row_slot, slot_row, num_slots, chunk_slots, num_experts, num_blocks,
                **constexprs(), **ROW_LAUNCH,
            )  # fmt: skip
    return offsets, row_slot, slot_row
