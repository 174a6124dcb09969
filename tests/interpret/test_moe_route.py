"""The tests of routing's options and of the losses on a router, by Triton's interpreter."""

import pytest

from tests.test_moe_balance import (  # noqa: F401
    test_even_loads_are_the_least_and_no_token_is_no_loss,
    test_load_balance_loss,
    test_masked_tokens_may_hold_anything,
    test_sequence_balance_loss,
    test_sums_and_gradient,
)
from tests.test_moe_route_choice import *  # noqa: F403
from tests.test_moe_route_contract import (  # noqa: F401
    test_double_backward_is_refused,
    test_fullgraph_compile_is_bitwise_eager,
    test_opcheck,
    test_opcheck_backwards,
)
from tests.test_moe_router import (  # noqa: F401
    test_output_and_every_gradient,
    test_replay_of_a_rollout_s_experts,
    test_the_correction_moves_the_choice_and_is_saved,
)

pytestmark = pytest.mark.interpret
