"""Main gradients, by Triton's interpreter."""

import pytest

from tests.test_moe_main_grad import (  # noqa: F401
    test_an_expert_without_rows_leaves_its_main_gradient,
    test_gradients_are_added_in_fp32,
    test_one_of_the_two_alone,
    test_opcheck_and_no_double_backward,
)

pytestmark = pytest.mark.interpret
