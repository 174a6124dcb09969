"""Seeded faults of Triton kernels and tiles that the emulated GPUs must catch, for tools/mutants.py: plain data.

Faults of waves, barriers and MFMA's layouts, which Triton makes itself, are planted in tests/amd/planted.cpp.
"""

LOGITS, COMMON = "fusedce/triton/linear_ce/logits.py", "fusedce/triton/common.py"
FINISH, BACKWARD = "fusedce/triton/linear_ce/finish.py", "fusedce/triton/linear_ce/backward.py"
TABLES = "fusedce/configs/tables.py"
MOE = "fusedce/triton/moe/"
RUN = "-m amd 'tests/amd/test_kernels.py::test_values[{}-{}]'"
LOGPROB = RUN.format("gfx942", "logprob-N131-V301-D80-bfloat16")
TILE = "GemmTile(128, 128, 64, num_warps=8, num_stages=2, matrix_instr=16) for stage"

MUTANTS = (
    dict(name="amd-xf32", file=COMMON, breaks="gfx942 keeps 11 bits of fp32 operands",
         old='acc -= tl.dot(-a, b, input_precision="ieee")', new='acc -= tl.dot(-a, b, input_precision="tf32")',
         tests=RUN.format("gfx942", "logprob-N67-V320-D48-float32-cap2.0")),
    dict(name="amd-last-group", file=COMMON, breaks="tiles of the last group are left out",
         old="group_m = min(num_m - first_m, GROUP_M)", new="group_m = GROUP_M", tests=LOGPROB),
    dict(name="amd-depth-mask", file=LOGITS, breaks="the last step reads the next row, and past the last one",
         old="mask_d = offs_d < depth - start", new="mask_d = offs_d < depth", tests=LOGPROB),
    dict(name="amd-past-the-words", file=LOGITS, breaks="words past the vocabulary are summed",
         old="return (offs_v < vocab)[None, :] & (offs_v[None, :] != column[:, None])",
         new="return offs_v[None, :] != column[:, None]", tests=LOGPROB),
    dict(name="amd-merge-not-rescaled", file=FINISH, breaks="splits are summed about maxima of their own",
         old="tl.sum(split_exp * tl.exp2(split_moved), 0)", new="tl.sum(split_exp, 0)", tests=LOGPROB),
    dict(name="amd-target-off-by-one", file=BACKWARD, breaks="the target's gradient goes to the word before it",
         old="offs_v[None, :] == column[:, None], on_target",
         new="offs_v[None, :] + 1 == column[:, None], on_target",
         tests=RUN.format("gfx950", "logprob-N131-V301-D80-bfloat16")),
    dict(name="amd-too-many-waves", file=TABLES, breaks="2,048 threads, which Triton compiles without a word",
         old=TILE, new=TILE.replace("num_warps=8", "num_warps=32"), tests=LOGPROB),
    dict(name="amd-too-much-lds", file=TABLES, breaks="a tile that gfx942 has no LDS for",
         old=TILE, new=TILE.replace("128, 128, 64", "128, 128, 256"), tests=LOGPROB),
    dict(name="amd-rows-repeat", file=MOE + "weight_grad.py", breaks="an expert's first rows are summed over and over",
         old="offs_r += BLOCK_R", new="offs_r += 0",
         tests=RUN.format("gfx942", "experts-N70-D64-F48-E3-K2-bfloat16-one")),
    dict(name="amd-slot-that-takes-no-part", file=MOE + "slot_grad.py", breaks="its weight's gradient is NaN",
         old="acc = tl.where(row == -1, 0.0, acc)", new="acc = acc",
         tests=RUN.format("gfx942", "slots-that-take-no-part")),
)  # fmt: skip
