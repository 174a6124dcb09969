"""The seeded faults of the experts, for tools/mutants.py: plain data."""

EAGER, ACTIVATION, OPS = "fusedce/eager/moe.py", "fusedce/eager/activation.py", "fusedce/ops/moe.py"
TRITON = "fusedce/triton/moe/"

BASE = "tests/test_moe_experts.py::test_{}[eager-cpu{}]"
OPTIONS = "tests/test_moe_options.py::test_{}[eager-cpu{}]"
MAIN = "tests/test_moe_main_grad.py::test_{}[eager-cpu{}]"
T_BASE = "-m interpret tests/interpret/test_moe.py::test_{}[triton-cpu{}]"
T_OPTIONS = "-m interpret tests/interpret/test_moe_options.py::test_{}[triton-cpu{}]"
T_DESCRIPTORS = "-m interpret tests/interpret/test_moe_descriptors.py::test_{}[triton-cpu{}]"
T_MAIN = "-m interpret tests/interpret/test_moe_main_grad.py::test_{}[triton-cpu{}]"

VALUES, SMALL = "values_and_gradients", "-N37-D24-F20-E5-K2-float32-random"
EACH = "values_and_every_gradient"
CLAMPED = "-torch.float32-gpt_oss-True-pre_activation-True-1.0"
TANH = "-torch.float32-geglu_tanh-False-pre_activation-True-1.0"
PLAN_ONLY = "-torch.float32-gpt_oss-True-plan-False-1.0"
DESCRIBED = "-torch.float32-swiglu-False-pre_activation-True-1.0-pre_activation"
ADDED = "-torch.float32-False"

MUTANTS = (
    # ── plain torch ─────────────────────────────────────────────────────────────────────────────────────────────────
    dict(
        name="experts-eager-slope-past-the-limit",
        file=ACTIVATION,
        breaks="a clamped gate keeps its gradient",
        old="torch.where(gate > limit, 0, by_gate)",
        new="by_gate",
        tests=OPTIONS.format(EACH, CLAMPED),
    ),
    dict(
        name="experts-eager-tanh-of-gelu",
        file=ACTIVATION,
        breaks="gelu's tanh without its cube",
        old="share = (gate * twice * (1 + 0.044715 * square)).sigmoid()",
        new="share = (gate * twice).sigmoid()",
        tests=OPTIONS.format(EACH, TANH),
    ),
    dict(
        name="experts-eager-down-bias-not-weighted",
        file=EAGER,
        breaks="d_down_bias without the routing weights",
        old="(weights * d_out).sum(0)",
        new="d_out.sum(0)",
        tests=OPTIONS.format(EACH, CLAMPED),
    ),
    dict(
        name="experts-eager-weights-without-bias",
        file=EAGER,
        breaks="d_top_k_weights without the down bias",
        old="total = total + d_out @ down_bias[expert].to(dtype)",
        new="pass",
        tests=OPTIONS.format(EACH, CLAMPED),
    ),
    dict(
        name="experts-eager-main-grad-overwritten",
        file=EAGER,
        breaks="a main gradient loses what it held",
        old="down_main_grad)[expert] += d_out.t() @ (weights * act)",
        new="down_main_grad)[expert] = d_out.t() @ (weights * act)",
        tests=MAIN.format("gradients_are_added_in_fp32", ADDED),
    ),
    dict(
        name="experts-saved-main-grads",
        file=OPS,
        breaks="main gradients stay without the gradient",
        old="ctx.main_grads = inputs[9:]",
        new="ctx.main_grads = (None, None)",
        tests=MAIN.format("gradients_are_added_in_fp32", ADDED),
    ),
    # ── Triton ──────────────────────────────────────────────────────────────────────────────────────────────────────
    dict(
        name="experts-triton-gate-for-up",
        file=TRITON + "activation.py",
        breaks="gate and up change places",
        old="act = bent * up\n",
        new="act = bent * gate\n",
        tests=T_BASE.format(VALUES, SMALL),
    ),
    dict(
        name="experts-triton-silu-slope",
        file=TRITON + "activation.py",
        breaks="silu's slope is sigmoid",
        old="            bent = gate * share\n            slope = share + bent * (1.0 - share)\n        elif",
        new="            bent = gate * share\n            slope = share\n        elif",
        tests=T_BASE.format(VALUES, SMALL),
    ),
    dict(
        name="experts-triton-interleaved-read-as-halves",
        file=TRITON + "gate_up.py",
        breaks="gate and up rows mixed",
        old="both.reshape(BLOCK_R, BLOCK_F, 2).split()",
        new="both.reshape(BLOCK_R, 2, BLOCK_F).permute(0, 2, 1).split()",
        tests=T_OPTIONS.format(EACH, CLAMPED),
    ),
    dict(
        name="experts-triton-pads-unwritten",
        file=TRITON + "pad.py",
        breaks="old memory in the rows of padding",
        old="used = tl.where(tl.load(table_ptr + tile) < num_experts, end - start, 0)",
        new="used = TILE_R",
        tests=T_DESCRIPTORS.format(EACH, DESCRIBED),
    ),
    dict(
        name="experts-triton-first-row-left-out",
        file=TRITON + "tile_table.py",
        breaks="an expert begins one row late",
        old="tl.store(table_ptr + num_tiles + tile, start)",
        new="tl.store(table_ptr + num_tiles + tile, start + 1)",
        tests=T_BASE.format(VALUES, SMALL),
    ),
    dict(
        name="experts-triton-slot-without-a-row",
        file=TRITON + "tile_table.py",
        breaks="a slot without a row gets the first one",
        old="tl.store(slot_padded_ptr + slots, without, mask=without < 0)",
        new="tl.store(slot_padded_ptr + slots, 0 * without, mask=without < 0)",
        tests=T_BASE.format("mo_a08_slots_that_take_no_part", ""),
    ),
    dict(
        name="experts-triton-weighted-twice",
        file=TRITON + "act_backward.py",
        breaks="d_down without the routing weights",
        old="round_to(weights * act, dtype)",
        new="round_to(act, dtype)",
        tests=T_BASE.format(VALUES, SMALL),
    ),
    dict(
        name="experts-triton-partial-of-one-block",
        file=TRITON + "act_backward.py",
        breaks="d_top_k_weights of the last columns only",
        old="total += grad * act",
        new="total = grad * act",
        tests=T_OPTIONS.format("sizes_of_several_tiles", "-1000"),
    ),
    dict(
        name="experts-triton-down-bias-not-weighted",
        file=TRITON + "bias_grad.py",
        breaks="d_down_bias without the routing weights",
        old="values *= tl.load(",
        new="values += 0.0 * tl.load(",
        tests=T_OPTIONS.format(EACH, CLAMPED),
    ),
    dict(
        name="experts-triton-weights-without-bias",
        file=TRITON + "act_backward.py",
        breaks="d_top_k_weights without the down bias",
        old="total += d_rows.to(tl.float32) * bias.to(tl.float32)",
        new="pass",
        tests=T_OPTIONS.format(EACH, CLAMPED),
    ),
    dict(
        name="experts-triton-main-grad-overwritten",
        file=TRITON + "weight_grad.py",
        breaks="a main gradient loses what it held",
        old="        if ADD:\n",
        new="        if False:\n",
        tests=T_MAIN.format("gradients_are_added_in_fp32", ADDED),
    ),
    dict(
        name="experts-descriptor-of-the-first-expert",
        file=TRITON + "product.py",
        breaks="every expert has the first one's weights",
        old="weight.load([expert, 0, tile_n * (BLOCK_N // 2), begin])",
        new="weight.load([0, 0, tile_n * (BLOCK_N // 2), begin])",
        tests=T_DESCRIPTORS.format(EACH, DESCRIBED),
    ),
    dict(
        name="experts-descriptor-of-neighbouring-rows",
        file=TRITON + "weight_grad.py",
        breaks="a weight's gradient from another row's activation",
        old="right.load([start + begin, tile_n * BLOCK_N])",
        new="right.load([start + begin + 1, tile_n * BLOCK_N])",
        tests=T_DESCRIPTORS.format(EACH, DESCRIBED),
    ),
)
