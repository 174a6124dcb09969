"""The tests of shortened plans and of the experts over two ranks, by the kernels in the interpreter."""

import pytest

from tests.distributed.processes import run
from tests.test_moe_short_plan import (  # noqa: F401
    test_a_plan_with_more_rows_than_slots_is_refused,
    test_a_shortened_plan_gives_the_same,
)

pytestmark = pytest.mark.interpret


def test_mo_a13_chunks_of_two_ranks_give_the_bits_of_one_chunk() -> None:
    run("tests.distributed.test_expert_parallel", "check_kernels", 2)
