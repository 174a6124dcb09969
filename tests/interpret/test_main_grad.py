"""The tests of main_grad, by Triton's interpreter."""

import pytest

from tests.test_main_grad import (  # noqa: F401
    test_every_backward_adds,
    test_main_grad_is_the_weight_s_gradient,
    test_megatron_s_flag_is_set_and_its_hook_runs,
    test_micro_batches_lose_nothing,
    test_opcheck_linear_logprob_into,
    test_the_log_prob_s_backward_makes_nothing_of_the_weight_s_size,
    test_what_is_frozen_and_what_is_padding,
)

pytestmark = pytest.mark.interpret
