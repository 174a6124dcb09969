"""The seeded faults of the backward over what counts, for tools/mutants.py: plain data."""

TRITON, SPARSE = "fusedce/triton/linear_ce/", "fusedce/triton/linear_sparse/"
T_SPARSE = "-m interpret 'tests/interpret/test_linear_sparse.py::test_{}[triton-cpu{}]'"

MUTANTS = (
    # ── what a backward may leave out ───────────────────────────────────────────────────────────────────────────────
    dict(name="budget-half-bound", file="fusedce/budget.py", breaks="a certificate of half of what is missing",
         old="return mass * on_probs.abs()", new="return 0.5 * mass * on_probs.abs()",
         tests="tests/test_budget.py::test_a_pair_s_bound_holds_and_is_tight"),
    dict(name="budget-mass-cut-down", file="fusedce/budget.py", breaks="a stored mass below the true one",
         old="up = ((bits + 0xFFFF) & -0x10000)", new="up = (bits & -0x10000)",
         tests="tests/test_budget.py::test_a_stored_mass_is_never_below_and_close"),
    dict(name="sparse-one-split", file=TRITON + "tile_mass.py", breaks="a tile's mass is its last block's",
         old="mass += split_exp", new="mass = split_exp", tests=T_SPARSE.format("the_bound_holds", "-policy-False")),
    dict(name="sparse-nothing-lost", file=SPARSE + "levels.py", breaks="every threshold is within the budget",
         old="below += tl.where(worked, 0.0, bound)", new="below += tl.where(worked, 0.0, 0.0 * bound)",
         tests=T_SPARSE.format("the_bound_holds", "-policy-False")),
    dict(name="sparse-words-not-counted", file=SPARSE + "pair_hidden.py", breaks="what is not gathered is not counted",
         old="dropped += tl.sum(tl.maximum(size, 0.0), 0)", new="pass",
         tests=T_SPARSE.format("words_of_a_worked_pair_that_are_left_out_are_counted", "")),
)  # fmt: skip
