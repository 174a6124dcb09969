"""The op contract and the module of the mixture of experts, by Triton's interpreter."""

import pytest

from tests.test_moe_contract import (  # noqa: F401
    test_autocast_casts_as_linear_does,
    test_compile_with_dynamic_tokens,
    test_fullgraph_compile_is_bitwise_eager,
    test_opcheck_backward,
    test_opcheck_experts_dispatch_combine,
    test_opcheck_route_and_plan,
    test_second_backward_and_double_backward,
)
from tests.test_moe_nn import (  # noqa: F401
    test_a_routing_handed_in_is_the_one_that_is_used,
    test_few_tokens_still_give_every_gradient,
    test_mo_a17_activation_recompute_gives_the_same_gradients,
    test_output_and_every_gradient,
)

pytestmark = pytest.mark.interpret
