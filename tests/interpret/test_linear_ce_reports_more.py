"""More public bug reports and formerly untested numbers of linear cross-entropy, by Triton's interpreter."""

import pytest

from tests.test_linear_ce_reports_more import (  # noqa: F401
    test_axolotl_3767_nothing_plausible_comes_out,
    test_hidden_of_any_number_of_dimensions,
    test_more_partial_sums_than_one_sweep_takes,
    test_pytorch_180620_no_result_is_an_argument,
    test_pytorch_182328_fakes_are_true_for_any_strides,
    test_small_gradients_of_fp16_are_not_lost,
    test_the_ignored_label_may_be_a_word,
    test_the_largest_logit_comes_last,
    test_trl_3346_prompts_have_no_part,
    test_two_terms_of_the_loss_cancel_on_every_word_but_the_target,
    test_xtuner_2079_a_rank_without_valid_tokens,
)

pytestmark = pytest.mark.interpret
