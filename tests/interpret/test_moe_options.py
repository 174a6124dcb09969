"""The options of the experts, by Triton's interpreter."""

import pytest

from tests.test_moe_options import (  # noqa: F401
    test_a_bias_makes_nothing_of_padding_and_of_slots_without_a_row,
    test_each_gradient_is_the_same_with_others_wanted,
    test_fullgraph_compile_is_bitwise_eager,
    test_nothing_but_the_arguments_is_kept_with_the_plan_alone,
    test_opcheck,
    test_sizes_of_several_tiles,
    test_sizes_that_divide_by_nothing,
    test_values_and_every_gradient,
    test_weights_stored_the_other_way_round,
    test_what_is_kept_and_summed_changes_no_bit,
)

pytestmark = pytest.mark.interpret
