"""The plan's first pass: how many slots of each block go to each expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedce.configs import GemmTile
from fusedce.triton.common import ROW_LAUNCH

STAGE = None
# Slots of one program, here and in the second pass, which compares each pair of them.
BLOCK_S = 128


@triton.jit
def plan_count_kernel(
    ids_ptr,
    counts_ptr,
    num_slots,
    chunk_slots,
    num_experts,
    num_blocks,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program owns BLOCK_S slots of one chunk and writes counts[chunk, expert, block] for all experts, by
    comparing: no atomics.

    Reads 8 bytes a slot, writes 4·E bytes. Ids are compared in 64 bits, so that 2³² is not expert 0. Chunk × E × blocks
    may pass 2³¹: int64.
    """
    block = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    offs_s = block * BLOCK_S + tl.arange(0, BLOCK_S)
    slots = tl.minimum(num_slots - chunk * chunk_slots, chunk_slots)
    ids = tl.load(ids_ptr + chunk * chunk_slots + offs_s, mask=offs_s < slots, other=-1)
    for start in range(0, num_experts, BLOCK_E):
        offs_e = start + tl.arange(0, BLOCK_E)
        counts = tl.sum((ids[:, None] == offs_e.to(tl.int64)[None, :]).to(tl.int32), 0)
        offsets = (chunk * num_experts + offs_e) * num_blocks + block
        tl.store(counts_ptr + offsets, counts, mask=offs_e < num_experts)


KERNEL = plan_count_kernel


def signature(dtype: str) -> dict[str, str]:
    """Triton's type of every argument; all are integers, whatever `dtype`."""
    return {
        "ids_ptr": "*i64",
        "counts_ptr": "*i32",
        **dict.fromkeys(("num_slots", "chunk_slots", "num_experts", "num_blocks"), "i32"),
        **dict.fromkeys(constexprs(), "constexpr"),
    }


def constexprs(tile: GemmTile | None = None) -> dict[str, int]:
    """The kernel's sizes; a row kernel has no tile."""
    return {"BLOCK_S": BLOCK_S, "BLOCK_E": 64}


def count_slots(ids: Tensor, num_experts: int, num_chunks: int, chunk_slots: int) -> Tensor:
    """counts (C, E, blocks) int32 of ids (R,) int64, chunk_slots a chunk in blocks of BLOCK_S; ids out of range are
    counted nowhere."""
    num_slots = ids.shape[0]
    num_blocks = triton.cdiv(chunk_slots, BLOCK_S)
    counts = ids.new_empty((num_chunks, num_experts, num_blocks), dtype=torch.int32)
    if num_slots:
        with torch.cuda.device_of(ids):
            KERNEL[(num_blocks, num_chunks)](
                ids, counts, num_slots, chunk_slots, num_experts, num_blocks, **constexprs(), **ROW_LAUNCH
            )
    return counts
