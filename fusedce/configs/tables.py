"""The tiles of every kernel stage, one table per architecture. A choice between machines is a row here.

Stages: linear_ce_fwd (logits tile, its sums), linear_ce_seeded (its exponentials, for the loss with gradients in one
pass), linear_ce_dlogits (its gradient), all again with a bias or a softcap, for which the wide tile has no registers
left (a lane would hold the bias of 64 words); linear_ce_d_hidden and linear_ce_d_weight (products over as many rows as
the device says), linear_ce_pairs, again with options, and linear_ce_pair_weight (over gathered rows); moe_gate_up (half
its columns gate, half up), moe_rows (down projection, gradients of activation and hidden), moe_wgrad (weights), all
again for few rows an expert, and moe_wgrad_add (weights, added to what is there). The first two have the same block_m,
a multiple of the others' block_k: the rows of an expert are padded to it.
"""

from fusedce.arch import Arch
from fusedce.configs.tiles import GemmTile

_HEAD = GemmTile(128, 256, 64, num_warps=8, num_stages=3, group_m=16, tma=True, staged_bytes=2)
_HEAD_OPTIONS = GemmTile(128, 128, 64, num_warps=8, num_stages=4, group_m=16, tma=True, staged_bytes=2)
_GEMM = GemmTile(128, 256, 64, num_warps=8, num_stages=3)
_EXPERTS = GemmTile(128, 256, 64, num_warps=8, num_stages=3, tma=True, staged_bytes=2)
# A handful of rows an expert: the weights stream by, through as many programs as there are columns.
_FEW = {
    "moe_gate_up_few": GemmTile(16, 64, 128, num_warps=4, num_stages=4),
    "moe_rows_few": GemmTile(16, 64, 128, num_warps=4, num_stages=4),
    "moe_wgrad_few": GemmTile(64, 128, 16, num_warps=4, num_stages=3),
}
_SM_90 = {
    # Writes three numbers a row, so the output's share of shared memory goes to a fourth stage.
    "linear_ce_fwd": GemmTile(128, 256, 64, num_warps=8, num_stages=4, group_m=16, tma=True),
    "linear_ce_fwd_options": _HEAD_OPTIONS,
    "linear_ce_seeded": _HEAD,
    "linear_ce_seeded_options": _HEAD_OPTIONS,
    "linear_ce_dlogits": _HEAD,
    "linear_ce_dlogits_options": _HEAD_OPTIONS,
    # Adds to fp32, a quarter of the tile at a time.
    "linear_ce_d_hidden": GemmTile(128, 256, 64, num_warps=8, num_stages=4, group_m=16, tma=True, staged_bytes=1),
    "linear_ce_d_weight": _HEAD,
    # Rows are gathered, by pointers.
    "linear_ce_pairs": _GEMM,
    "linear_ce_pairs_options": GemmTile(128, 128, 64, num_warps=8, num_stages=3),
    # A tile of frequent words has most of the pairs: small output tiles share it among more SMs.
    "linear_ce_pair_weight": GemmTile(128, 128, 64, num_warps=4, num_stages=3),
    "moe_gate_up": _EXPERTS,
    "moe_rows": _EXPERTS,
    "moe_wgrad": _EXPERTS,
    # Reads what it adds to, in fp32: a tile twice as wide spills.
    "moe_wgrad_add": GemmTile(128, 128, 64, num_warps=8, num_stages=4, tma=True),
    **_FEW,
}
# Untried: the widest tiles that spill nothing.
_SM_100 = _SM_90 | {
    "moe_gate_up": GemmTile(128, 128, 64, num_warps=8, num_stages=4, tma=True, staged_bytes=2),
    "moe_wgrad": GemmTile(128, 128, 64, num_warps=8, num_stages=4, tma=True, staged_bytes=2),
}
_SM_80 = {stage: GemmTile(128, 128, 32, num_warps=8, num_stages=3) for stage in _SM_90} | _FEW
# 128×256×64 at 8 wavefronts is the largest tile without spills once an epilogue is there (bench/notes/amd_tiles.md);
# two stages are one buffer of LDS for the compiler, and 16×16 MFMA leaves more registers than 32×32.
_GFX942 = {stage: GemmTile(128, 128, 64, num_warps=8, num_stages=2, matrix_instr=16) for stage in _SM_90} | {
    "moe_gate_up_few": GemmTile(16, 64, 128, num_warps=4, num_stages=2, matrix_instr=16),
    "moe_rows_few": GemmTile(16, 64, 128, num_warps=4, num_stages=2, matrix_instr=16),
    "moe_wgrad_few": GemmTile(64, 128, 16, num_warps=4, num_stages=2, matrix_instr=16),
}
_GENERIC = {stage: GemmTile(64, 64, 32, num_warps=4, num_stages=2) for stage in _SM_90} | {
    "moe_gate_up_few": GemmTile(16, 64, 32, num_warps=4, num_stages=2),
    "moe_rows_few": GemmTile(16, 64, 32, num_warps=4, num_stages=2),
    "moe_wgrad_few": GemmTile(64, 64, 16, num_warps=4, num_stages=2),
}

STAGES = tuple(_SM_90)
TABLES = {
    "sm_80": _SM_80,
    "sm_90": _SM_90,
    "sm_100": _SM_100,
    "gfx942": _GFX942,
    "gfx950": _GFX942,
    "generic": _GENERIC,
}
# fp32 operands run on the FMA units, where a large tile only costs registers.
_FP32 = GemmTile(64, 64, 32, num_warps=8, num_stages=2)


def table_tile(stage: str, arch: Arch, itemsize: int, by_tma: bool = True) -> GemmTile:
    """The tile of a stage. itemsize: bytes of an operand's element (2 for bf16 and fp16, 4 for fp32). by_tma: whether
    descriptors can reach the operands; without them a tile is not persistent either."""
    tile = TABLES[arch.name][stage] if itemsize == 2 else _FP32
    return tile.reached(by_tma)
