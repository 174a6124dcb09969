"""The tests of the greedy word, by Triton's interpreter."""

import pytest

from tests.test_linear_argmax import (  # noqa: F401
    test_logits_that_bf16_cannot_tell_apart,
    test_nan_and_infinities,
    test_no_gradient_goes_through_the_words,
    test_no_other_word_is_larger,
    test_opcheck_linear_argmax,
    test_padding_ignored_rows_and_leading_dimensions,
    test_rows_in_several_launches,
    test_the_lowest_of_equal_words,
    test_what_lies_past_the_vocabulary_is_no_word,
)

pytestmark = pytest.mark.interpret
