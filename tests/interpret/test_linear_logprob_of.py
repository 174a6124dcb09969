"""The tests of log-probs of several words, by Triton's interpreter."""

import pytest

from tests.test_linear_logprob_of import (  # noqa: F401
    test_a_common_offset_of_the_logits,
    test_all_words_are_a_log_softmax,
    test_certain_words_keep_their_digits,
    test_chunks_change_nothing_but_the_rounding,
    test_ignored_may_be_a_word_and_dimensions_lead,
    test_ignored_slots_and_rows_may_hold_anything,
    test_masked_words_and_nan,
    test_nothing_plausible_comes_out_of_a_bad_id,
    test_one_slot_is_linear_logprob,
    test_opcheck_backward_and_its_mask,
    test_opcheck_linear_logprob_of,
    test_second_backward_and_double_backward,
    test_the_same_word_in_every_slot,
    test_values_and_gradients,
)

pytestmark = pytest.mark.interpret
