"""The seeded faults of routing, plans and rows, for tools/mutants.py: plain data."""

EAGER, ROWS = "fusedce/eager/moe_route.py", "fusedce/eager/moe.py"
OPS, FUNCTIONAL = "fusedce/ops/moe_route.py", "fusedce/functional/moe_balance.py"
ROUTER, OPTIONS = "fusedce/nn/router.py", "fusedce/options.py"
TRITON = "fusedce/triton/moe/"

ROUTE = "tests/test_moe_route.py::test_{}[eager-cpu{}]"
CHOICE = "tests/test_moe_route_choice.py::test_{}[eager-cpu{}]"
BALANCE = "tests/test_moe_balance.py::test_{}[eager-cpu{}]"
PLAN = "tests/test_moe_plan.py::test_{}[eager-cpu{}]"
NN = "tests/test_moe_router.py::test_{}[eager-cpu{}]"
T_BASE = "-m interpret tests/interpret/test_moe.py::test_{}[triton-cpu{}]"
T_ROUTE = "-m interpret tests/interpret/test_moe_route.py::test_{}[triton-cpu{}]"

PARTS, REPLAY = "mo_a08_slots_that_take_no_part", "replay_of_ids_from_elsewhere"
TIES, FUZZ = "equal_scores_and_equal_groups_go_to_the_lowest_ids", "tests/test_moe_fuzz.py::test_{}[eager-cpu]"

# Ids with spaces, in quotes.
CHUNKS = "'tests/test_moe_plan.py::test_chunks_are_the_plans_of_their_tokens[eager-cpu-(7, 2, 5, 3)]'"
SUMS = "'tests/test_moe_balance.py::test_sums_and_gradient[eager-cpu-(1, 40, 6, 2, torch.float32)-softmax-none]'"
T_SUMS = (
    "-m interpret 'tests/interpret/test_moe_route.py::test_sums_and_gradient"
    "[triton-cpu-(1, 40, 6, 2, torch.float32)-softmax-bool]'"
)
T_CHUNKS = (
    "-m interpret 'tests/interpret/test_moe.py::test_chunks_are_the_plans_of_their_tokens[triton-cpu-(7, 2, 5, 3)]'"
)
MUTANTS = (
    # ── plain torch ─────────────────────────────────────────────────────────────────────────────────────────────────
    dict(
        name="moe-eager-masked-groups-at-0",
        file=EAGER,
        breaks="experts outside the best groups stand first",
        old="order = order.gather(1, _descending(allowed.to(torch.uint8)))",
        new="order = order.gather(1, _descending(1 - allowed.to(torch.uint8)))",
        tests=CHOICE.format(TIES, ""),
    ),
    dict(
        name="moe-eager-unstable-ties",
        file=EAGER,
        breaks="the highest id wins among equals",
        old="return values.sort(dim=1, descending=True, stable=True).indices",
        new="return values.flip(1).sort(dim=1, descending=True, stable=True).indices.sub(values.shape[1] - 1).neg()",
        tests=ROUTE.format("among_equal_logits_the_lowest_id_wins", "-3.0"),
    ),
    dict(
        name="moe-eager-correction-weighs",
        file=EAGER,
        breaks="the correction reaches the weights",
        old="return moe_replay(logits, index, score, renormalize, scale), index",
        new="return moe_replay(logits if correction is None else logits + correction, index, score, renormalize, "
        "scale), index",
        tests=CHOICE.format("the_correction_chooses_and_does_not_weigh", ""),
    ),
    dict(
        name="moe-eager-twice-counts-once",
        file=EAGER,
        breaks="an expert named twice is once in the sum",
        old="return scores, (counts * scores).sum(1, keepdim=True), slope",
        new="return scores, scores.sum(1, keepdim=True), slope",
        tests=CHOICE.format(REPLAY, "-softmax-True-torch.float32"),
    ),
    dict(
        name="moe-eager-no-part-is-nan",
        file=EAGER,
        breaks="a slot that takes no part spoils its token",
        old="without = torch.where(ids == -1, -1, -2)",
        new="without = -2",
        tests=PLAN.format(PARTS, ""),
    ),
    dict(
        name="moe-eager-bad-id-is-no-part",
        file=EAGER,
        breaks="a bad id gives a plausible token",
        old="without = torch.where(ids == -1, -1, -2)",
        new="without = -1",
        tests=PLAN.format("mo_a16_slots_without_a_row", "-3"),
    ),
    dict(
        name="moe-eager-wraps-to-the-last",
        file=ROWS,
        breaks="row −1 is the last row",
        old="total += torch.where((row >= 0)[:, None], rows[row.clamp(min=0)], 0.0)",
        new="total += rows[row]",
        tests=PLAN.format(PARTS, ""),
    ),
    dict(
        name="moe-eager-masked-nan",
        file=EAGER,
        breaks="0 · NaN of a masked token",
        old="return torch.where((mask != 0)[:, None], values, 0.0), mask.to(values.dtype)",
        new="return values, mask.to(values.dtype)",
        tests=BALANCE.format("masked_tokens_may_hold_anything", ""),
    ),
    dict(
        name="moe-eager-z-slope",
        file=EAGER,
        breaks="half the slope of lse²",
        old="(2.0 * values.logsumexp(1) * g2)",
        new="(values.logsumexp(1) * g2)",
        tests=SUMS,
    ),
    dict(
        name="moe-eager-chunk-s-end",
        file=EAGER,
        breaks="the last, shorter chunk is lost",
        old="length = -(-top_k_index.shape[0] // num_chunks)",
        new="length = top_k_index.shape[0] // num_chunks",
        tests=CHUNKS,
    ),
    # ── the ops, functions and modules ──────────────────────────────────────────────────────────────────────────────
    dict(
        name="moe-ops-mask-not-saved",
        file=OPS,
        breaks="masked tokens have a gradient",
        old="ctx.save_for_backward(logits, mask)",
        new="ctx.save_for_backward(logits, None)",
        tests=BALANCE.format("masked_tokens_may_hold_anything", ""),
    ),
    dict(
        name="moe-losses-mean-of-products",
        file=FUNCTIONAL,
        breaks="each layer's loss, not the pooled one's",
        old="return load.shape[0] * ((load / tokens) * (share / tokens)).sum()",
        new="return load.shape[0] * sum((b.load.sum(0) * b.share.sum(0)).sum() for b in layers) / tokens**2",
        tests=BALANCE.format("load_balance_loss", "-False"),
    ),
    dict(
        name="moe-losses-rounded-mean",
        file=FUNCTIONAL,
        breaks="the mean of the counts is rounded",
        old="correction.add_((exact.sum() - exact * exact.shape[0]).sign().to(correction.dtype), alpha=rate)",
        new="correction.add_((counts.sum() - counts * counts.shape[0]).neg().sign().to(correction.dtype), alpha=rate)",
        tests="'tests/test_moe_balance.py::test_update_correction_moves_by_the_sign[cpu]'",
    ),
    dict(
        name="moe-options-one-length",
        file=OPTIONS,
        breaks="a chunk's plan begins at another's slots",
        old="self.row_slot[start * top_k : stop * top_k]",
        new="self.row_slot[start:stop]",
        tests=PLAN.format("mo_a15_experts_chunk_by_chunk_give_the_same_bits", ""),
    ),
    dict(
        name="moe-router-kept",
        file=ROUTER,
        breaks="a step's graph is held in the next one",
        old="            module.balance = None\n",
        new="            pass\n",
        tests=NN.format("balances_are_collected_in_training_and_taken_once", ""),
    ),
    dict(
        name="moe-router-autocast",
        file=ROUTER,
        breaks="fp32 logits are bf16 under autocast",
        old="with torch.autocast(hidden.device.type, enabled=False):",
        new="if True:",
        tests=NN.format("fp32_logits_of_a_bf16_block_also_under_autocast", ""),
    ),
    # ── Triton ──────────────────────────────────────────────────────────────────────────────────────────────────────
    dict(
        name="moe-triton-group-of-equal-keys",
        file=TRITON + "route.py",
        breaks="a group's best is counted twice",
        old="            left = tl.where(picked, TAKEN, left)\n",
        new="",
        tests=T_ROUTE.format("choice_weights_and_gradient", "-33-24-3-4-2-2-True-sigmoid"),
    ),
    dict(
        name="moe-triton-any-group",
        file=TRITON + "route.py",
        breaks="the groups do not limit",
        old="keys = tl.where(allowed != 0, keys, TAKEN)",
        new="keys = keys",
        tests=T_ROUTE.format(TIES, ""),
    ),
    dict(
        name="moe-triton-no-correction",
        file=TRITON + "route.py",
        breaks="the correction is not added",
        old="values += tl.load(correction_ptr + offs_e, mask=mask_e, other=0.0)[None, :]",
        new="values += 0.0",
        tests=T_ROUTE.format("the_correction_chooses_and_does_not_weigh", ""),
    ),
    dict(
        name="moe-triton-nan-is-one-expert-s",
        file=TRITON + "scores.py",
        breaks="a row with NaN has finite weights",
        old='scores = tl.where(total == total, scores, float("nan"))',
        new="scores = scores",
        tests=T_ROUTE.format("nan_stays_in_its_row_with_groups_and_correction", "-softmax"),
    ),
    dict(
        name="moe-triton-replay-counts",
        file=TRITON + "route_backward.py",
        breaks="an expert named twice pulls once",
        old="upstream -= count * tl.sum(share * upstream, 1)[:, None]",
        new="upstream -= tl.sum(share * upstream, 1)[:, None]",
        tests=T_ROUTE.format(REPLAY, "-sigmoid-True-torch.float32"),
    ),
    dict(
        name="moe-triton-chunk-base",
        file=TRITON + "plan.py",
        breaks="a chunk's rows follow the chunk before",
        old="mask=chunk > 0, other=0)",
        new="mask=chunk < 0, other=0)",
        tests=T_CHUNKS,
    ),
    dict(
        name="moe-triton-chunk-offsets",
        file=TRITON + "plan.py",
        breaks="a chunk's offsets count the chunks before",
        old="last - before, mask=mask_e",
        new="last, mask=mask_e",
        tests=T_CHUNKS,
    ),
    dict(
        name="triton-outside-forgets-the-first",
        file="fusedce/triton/outside.py",
        breaks="a later report takes an earlier one's place",
        old="(first < num_rows) & (tl.load(seen_ptr) < 0)",
        new="first < num_rows",
        tests="-m interpret tests/interpret/test_outside.py::test_what_was_seen_before_stays[triton-cpu]",
    ),
    dict(
        name="triton-outside-the-last-block",
        file="fusedce/triton/outside.py",
        breaks="the last block's row instead of the first's",
        old="found = tl.minimum(found, tl.where(outside & (rows < num_rows), rows, num_rows))",
        new="found = tl.where(outside & (rows < num_rows), rows, num_rows)",
        tests="-m interpret tests/interpret/test_outside.py::test_the_first_of_several[triton-cpu-40-9000]",
    ),
    dict(
        name="moe-triton-rank-of-later-slots",
        file=TRITON + "plan.py",
        breaks="an expert's rows are out of order",
        old="(offs_t[None, :] < offs_s[:, None])",
        new="(offs_t[None, :] > offs_s[:, None])",
        tests=T_BASE.format("a_token_may_name_an_expert_twice", ""),
    ),
    dict(
        name="moe-triton-combine-wraps",
        file=TRITON + "combine.py",
        breaks="a bad id gives a plausible token",
        old='acc += tl.where(row < -1, float("nan"), 0.0)',
        new="acc += 0.0",
        tests=T_BASE.format("mo_a16_slots_without_a_row", "-3"),
    ),
    dict(
        name="moe-triton-slot-nan",
        file=TRITON + "slot_grad.py",
        breaks="NaN for the weight of a slot without a part",
        old="    acc = tl.where(row == -1, 0.0, acc)\n",
        new="",
        tests=T_BASE.format(PARTS, ""),
    ),
    dict(
        name="moe-triton-masked-square",
        file=TRITON + "balance.py",
        breaks="masked tokens count in the z-loss",
        old="tl.sum(lse * lse * kept, 0)",
        new="tl.sum(lse * lse, 0)",
        tests=T_SUMS,
    ),
    dict(
        name="moe-triton-no-slope",
        file=TRITON + "balance_backward.py",
        breaks="sigmoid shares without their slope",
        old="        d_logits *= 1.0 - scores\n",
        new="        d_logits *= 1.0\n",
        tests=T_ROUTE.format("sequence_balance_loss", ""),
    ),
)
