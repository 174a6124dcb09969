"""The tests of the loss of several heads, by Triton's interpreter."""

import pytest

from tests.test_linear_ce_heads import (  # noqa: F401
    test_a_head_without_rows_and_no_rows,
    test_a_list_of_heads_and_one_head,
    test_loss_heads_and_gradients,
)

pytestmark = pytest.mark.interpret
