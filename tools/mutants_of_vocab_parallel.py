"""The seeded faults of the vocabulary over several ranks, and of what it asks of the ops, for tools/mutants.py: plain
data."""

ROOM = "fusedce/distributed/"
ROWS, WORDS, SHARD = ROOM + "vocab_parallel.py", ROOM + "vocab_parallel_words.py", ROOM + "vocab_shard.py"
LOSSES = ROOM + "vocab_parallel_losses.py"

RANKS = "'tests/distributed/test_vocab_parallel_options.py::test_ranks_agree_with_one[2]'"
OF = "'tests/test_linear_logprob_of.py::test_{}[eager-cpu{}]'"
T_CE = "-m interpret 'tests/interpret/test_linear_ce.py::test_{}[triton-cpu{}]'"

MUTANTS = (
    # ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────────
    dict(name="shard-total-of-one-rank", file=ROWS, breaks="label smoothing's mean is over the first rank's words",
         old="gathered[..., 4].sum(0)", new="gathered[0, :, 4]", tests=RANKS),
    dict(name="shard-total-no-gradient", file=ROWS, breaks="label smoothing gives hidden no gradient",
         old="d_hidden.to(d_total.dtype) + d_total[:, None] * word", new="d_hidden.to(d_total.dtype)", tests=RANKS),
    dict(name="shard-total-of-ignored", file=ROWS, breaks="label smoothing feels what ignored rows hold",
         old="            rows = kept_rows(hidden, local, IGNORED)", new="            rows = hidden", tests=RANKS),
    dict(name="shard-class-weights-of-the-first", file=ROWS, breaks="every rank takes the first words' class weights",
         old="class_weight[head.shard.start :][: head.num_words]", new="class_weight[: head.num_words]", tests=RANKS),
    dict(name="shard-heads-mixed", file=ROWS, breaks="a head's mean is over other heads' rows",
         old="rows.reshape(-1, num_heads).t().reshape(-1)", new="rows.reshape(-1)", tests=RANKS),
    dict(name="shard-heads-by-sequence", file=LOSSES, breaks="a token's heads do not lie side by side",
         old="of_heads.movedim(0, -1).reshape(shape)", new="of_heads.reshape(shape)", tests=RANKS),
    dict(name="shard-policy-ignored", file=LOSSES, breaks="ignored tokens have a loss",
         old="torch.where(target.reshape(-1) != ignore_index, rows, 0.0).sum()", new="rows.sum() + rows.mean() * 0.01",
         tests=RANKS),
    # ── single words ────────────────────────────────────────────────────────────────────────────────────────────────
    dict(name="shard-argmax-highest", file=WORDS, breaks="of equal words the last rank's wins",
         old="torch.where(logits == most, words, float(head.shard.size)).amin(0)",
         new="torch.where(logits == most, words, -1.0).amax(0)", tests=RANKS),
    dict(name="shard-argmax-local", file=WORDS, breaks="words are rows of the shard",
         old="own[:, 1] = words + head.shard.start", new="own[:, 1] = words", tests=RANKS),
    dict(name="shard-argmax-nan", file=WORDS, breaks="a NaN on another rank is passed over",
         old="own[:, 0] = torch.where(words < 0, torch.inf, own[:, 0])", new="pass", tests=RANKS),
    dict(name="shard-words-elsewhere", file=WORDS, breaks="a rank without a row's words leaves its own out of the sum",
         old="slots[:, 0] = torch.where(~inside.any(1) & ~ignored.all(1), 0, slots[:, 0])", new="pass", tests=RANKS),
    dict(name="shard-words-gradient-elsewhere", file=WORDS, breaks="a word has no gradient on the other ranks",
         old="d_lse = -torch.where(inside, 0.0, d_values).sum(1)", new="d_lse = torch.zeros_like(d_values[:, 0])",
         tests=RANKS),
    dict(name="shard-words-digits", file=WORDS, breaks="a certain word's log-prob loses its digits over the ranks",
         old="log_sum = most + others.log1p()", new="log_sum = shares.logsumexp(0)", tests=RANKS),
    dict(name="words-d-lse-slope", file="fusedce/rows.py", breaks="a gradient of the log-sum-exp knows no temperature",
         old="total + d_lse.to(total.dtype) * self.slopes(total)[:, 0]", new="total + d_lse.to(total.dtype)",
         tests=OF.format("backward_with_a_gradient_of_the_log_sum_exp", "-0.0")),
    # ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────
    dict(name="shard-replicate-alone", file=SHARD, breaks="a replicated weight gets this rank's part of the gradient",
         old="dist.all_reduce(whole, group=ctx.group)", new="pass", tests=RANKS),
    dict(name="shard-placement", file=SHARD, breaks="a weight cut along D is taken for whole words",
         old="placements[0].is_shard(0)", new="placements[0].is_shard()", tests=RANKS),
    # ── what the ops do ─────────────────────────────────────────────────────────────────────────────────────────────
    dict(name="softcap-one-sided", file="fusedce/triton/linear_ce/logits.py", breaks="words near -softcap lose digits",
         old="tl.where(y < 0.0, -far, far)", new="1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0)",
         tests=T_CE.format("words_near_the_softcap", "-1.0-ones")),
    dict(name="budget-on-native", file="fusedce/functional/linear_ce.py", breaks="native is asked what it cannot do",
         old='if backend == "native" and gradient_budget is not None:', new="if False:",
         tests="'tests/test_linear_sparse_contract.py::test_bad_input_is_refused[one for native]'"),
)  # fmt: skip
