"""The seeded faults of linear_argmax, linear_logprob_of, linear_cross_entropy_heads and main_grad, for
tools/mutants.py: plain data."""

TRITON, EAGER, ROWS = "fusedce/triton/linear_ce/", "fusedce/eager/", "fusedce/rows.py"
WEIGHTS = "fusedce/ops/row_weights.py"
CHUNKED, LOSS, INTO = "fusedce/chunked.py", "fusedce/ops/loss.py", "fusedce/ops/main_grad.py"
DOOR = "fusedce/functional/"

ARGMAX = "tests/test_linear_argmax.py::test_{}[eager-cpu{}]"
T_ARGMAX = "-m interpret tests/interpret/test_linear_argmax.py::test_{}[triton-cpu{}]"
OF = "'tests/test_linear_logprob_of.py::test_{}[eager-cpu{}]'"
T_OF = "-m interpret 'tests/interpret/test_linear_logprob_of.py::test_{}[triton-cpu{}]'"
HEADS = "tests/test_linear_ce_heads.py::test_{}[eager-cpu{}]"
MAIN = "tests/test_main_grad.py::test_{}[eager-cpu{}]"
T_MAIN = "-m interpret tests/interpret/test_main_grad.py::test_{}[triton-cpu{}]"

VALUES, SMALL, CAPPED = "values_and_gradients", "-N21-V129-D24-float32-5", "-N24-V301-D48-float32-cap2.0-7"

MUTANTS = (
    # ── the greedy word ─────────────────────────────────────────────────────────────────────────────────────────────
    dict(name="argmax-eager-nan", file=EAGER + "argmax.py", breaks="a NaN is a word",
         old="torch.where((raw < torch.inf).all(1), raw.argmax(1), -1)", new="raw.argmax(1)",
         tests=ARGMAX.format("nan_and_infinities", "")),
    dict(name="argmax-last-of-equals", file=TRITON + "argmax.py", breaks="of equal words of a tile the last one wins",
         old="first = tl.min(tl.where(number == largest[:, None], offs_v, NO_WORD), 1)",
         new="first = tl.max(tl.where(number == largest[:, None], offs_v, -1), 1)",
         tests=T_ARGMAX.format("the_lowest_of_equal_words", "")),
    dict(name="argmax-last-tile-of-equals", file=TRITON + "argmax.py", breaks="of equal words the last tile's wins",
         old="first = torch.where(largest == most, word, NO_WORD.value).amin(0)",
         new="first = torch.where(largest == most, word, -1).amax(0)",
         tests=T_ARGMAX.format("the_lowest_of_equal_words", "")),
    dict(name="argmax-words-past-the-end", file=TRITON + "argmax.py", breaks="padding beats words below 0",
         old="number = tl.where(offs_v < vocab, tl.where(raw == raw, raw, float(\"inf\")), -float(\"inf\"))",
         new="number = tl.where(raw == raw, raw, float(\"inf\"))",
         tests=T_ARGMAX.format("what_lies_past_the_vocabulary_is_no_word", "")),
    dict(name="argmax-nan-loses", file=TRITON + "argmax.py", breaks="a row with NaN has a plausible word",
         old="tl.where(raw == raw, raw, float(\"inf\"))", new="tl.where(raw == raw, raw, -float(\"inf\"))",
         tests=T_ARGMAX.format("nan_and_infinities", "")),
    dict(name="argmax-ignored", file=DOOR + "argmax.py", breaks="ignored tokens have a word",
         old="return words if target is None else torch.where(target == ignore_index, -1, words)", new="return words",
         tests=ARGMAX.format("padding_ignored_rows_and_leading_dimensions", "")),
    # ── several words a token ───────────────────────────────────────────────────────────────────────────────────────
    dict(name="of-any-target", file=ROWS, breaks="the log-sum-exp is exact for the first word, not the likeliest",
         old="return self.ids.gather(1, score.argmax(1, keepdim=True))[:, 0]", new="return self.ids[:, 0]",
         tests=OF.format("certain_words_keep_their_digits", "")),
    dict(name="of-bad-id-is-a-number", file=ROWS, breaks="an id out of range has a plausible log-prob",
         old="values = torch.where(self.inside(), values, torch.nan)", new="pass",
         tests=OF.format("nothing_plausible_comes_out_of_a_bad_id", "")),
    dict(name="of-bad-id-has-no-gradient", file=ROWS, breaks="an id out of range leaves a finite gradient",
         old="numbers = torch.where(self.inside(), d_logprob * self.slopes(d_logprob), torch.nan)",
         new="numbers = torch.where(self.inside(), d_logprob * self.slopes(d_logprob), 0.0)",
         tests=OF.format("nothing_plausible_comes_out_of_a_bad_id", "")),
    dict(name="of-ignored-slot-counts", file=ROWS, breaks="an ignored slot has a gradient",
         old="return torch.where(self.ids == self.options.ignore_index, 0.0, numbers)", new="return numbers",
         tests=OF.format(VALUES, SMALL)),
    dict(name="of-no-temperature", file=ROWS, breaks="gradients without 1 / temperature",
         old="numbers = torch.where(self.inside(), d_logprob * self.slopes(d_logprob), torch.nan)",
         new="numbers = torch.where(self.inside(), d_logprob, torch.nan)",
         tests=OF.format(VALUES, "-N24-V301-D48-float32-T0.6-7")),
    dict(name="of-eager-duplicates", file=EAGER + "selected.py", breaks="of equal ids one gradient counts",
         old="same = torch.where(words.ids[:, :, None] == words.ids[:, None, :], upstream[:, None, :], 0.0).sum(2)",
         new="same = upstream", tests=OF.format("the_same_word_in_every_slot", "")),
    dict(name="of-eager-ignored-row", file=EAGER + "selected.py", breaks="0 · NaN of a row without slots",
         old="torch.where(kept, d_raw if slope is None else d_raw * slope, 0.0)",
         new="d_raw if slope is None else d_raw * slope",
         tests=OF.format("ignored_slots_and_rows_may_hold_anything", "")),
    dict(name="of-triton-slot-is-a-row", file=TRITON + "target_logit.py", breaks="slot k is held against row k",
         old="(offs_n // slots)[:, None]", new="(offs_n % (num_rows // slots))[:, None]",
         tests=T_OF.format(VALUES, SMALL)),
    dict(name="of-triton-first-slots-only", file=TRITON + "selected.py", breaks="gradients past 32 slots are lost",
         old="for start in range(0, slots, BLOCK_K):", new="for start in range(0, BLOCK_K, BLOCK_K):",
         tests=T_OF.format("the_same_word_in_every_slot", "")),
    dict(name="of-triton-own-slot", file=TRITON + "selected.py", breaks="of equal ids one gradient counts",
         old="ids[:, None] == other_ids[None, :]", new="offs_k[:, None] == others[None, :]",
         tests=T_OF.format("the_same_word_in_every_slot", "")),
    dict(name="of-triton-no-softcap-slope", file=TRITON + "selected.py", breaks="gradients as if there were no softcap",
         old="entry *= cap_slope(tl.load(raw_ptr + first + offs_k, mask=mask_k, other=0.0), softcap)",
         new="entry *= 1.0", tests=T_OF.format(VALUES, CAPPED)),
    dict(name="of-triton-ignored-word", file=TRITON + "selected.py", breaks="an ignored word's entry is written",
         old="mask = mask_k & (ids != ignore_index) & (ids >= 0) & (ids < vocab)",
         new="mask = mask_k & (ids >= 0) & (ids < vocab)",
         tests=T_OF.format("ignored_may_be_a_word_and_dimensions_lead", "")),
    dict(name="of-triton-cancelled", file=TRITON + "selected.py", breaks="1 − p is a difference",
         old="-torch.expm1(logprob)", new="1.0 - logprob.exp()",
         tests=T_OF.format("certain_words_keep_their_digits", "")),
    # ── several heads ───────────────────────────────────────────────────────────────────────────────────────────────
    dict(name="heads-one-mean", file=WEIGHTS, breaks="heads with fewer tokens count less",
         old="total = weights.reshape(num_heads, -1).sum(1, dtype=torch.float64)",
         new="total = (weights.sum(dtype=torch.float64) / num_heads).expand(num_heads)",
         tests=HEADS.format("loss_heads_and_gradients", "-shift=True")),
    dict(name="heads-weighted-in-the-report", file=LOSS, breaks="a head of factor 0 is told to have loss 0",
         old="rows = own.rows(logprob, lse)", new="rows = own.times(factors).rows(logprob, lse)",
         tests=HEADS.format("loss_heads_and_gradients", "-plain")),
    dict(name="heads-all-one-ahead", file=DOOR + "heads.py", breaks="every head predicts the next token",
         old="padded[..., 1 + h : 1 + h + length]", new="padded[..., 1 : 1 + length]",
         tests=HEADS.format("loss_heads_and_gradients", "-shift=True")),
    # ── the weight's gradient into main_grad ────────────────────────────────────────────────────────────────────────
    dict(name="main-grad-without-upstream", file=INTO, breaks="main_grad lacks the loss's upstream gradient",
         old="main_grad.addcmul_(d_weight, d_loss)", new="main_grad.add_(d_weight)",
         tests=MAIN.format("main_grad_is_the_weight_s_gradient", "-mean-torch.float32")),
    dict(name="main-grad-overwritten", file=CHUNKED, breaks="what was in main_grad is lost",
         old="start == 0 and not self.in_place", new="start == 0",
         tests=T_MAIN.format("every_backward_adds", "-rows")),
    dict(name="main-grad-scale-lost", file=CHUNKED, breaks="main_grad lacks the batch's scale",
         old="scaled = rows * self.scale.to(rows.dtype) if self.in_place and self.scale is not None else rows",
         new="scaled = rows", tests=T_MAIN.format("main_grad_is_the_weight_s_gradient", "-rows-torch.float32")),
    dict(name="main-grad-scaled-whole", file=CHUNKED, breaks="what was in main_grad is scaled",
         old="            if not self.in_place:\n                self.d_weight.mul_(scale)",
         new="            self.d_weight.mul_(scale)", tests=T_MAIN.format("every_backward_adds", "-rows")),
    dict(name="main-grad-rounded", file="fusedce/options.py", breaks="d_weight is rounded before it is added",
         old="return total if self.fp32_weight else total.to(dtype)", new="return total.to(dtype)",
         tests=MAIN.format("main_grad_is_the_weight_s_gradient", "-mean-torch.bfloat16")),
    dict(name="main-grad-of-the-mean-logit", file=LOSS, breaks="label smoothing's share goes to weight.grad",
         old="weight = self.weight if self.main_grad is None else Deposit.apply(self.weight, self.main_grad)",
         new="weight = self.weight",
         tests=MAIN.format("main_grad_is_the_weight_s_gradient", "-smoothed-torch.float32")),
    dict(name="main-grad-flag-not-set", file=DOOR + "main_grad.py", breaks="Megatron adds zeros, and knows nothing",
         old="setattr(ctx.weight, FLAG, True)", new="pass",
         tests=MAIN.format("megatron_s_flag_is_set_and_its_hook_runs", "-mean")),
)  # fmt: skip
