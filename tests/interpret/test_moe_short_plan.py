"""The tests of shortened plans and of the experts over two ranks, by the kernels in the interpreter."""

import pytest
import torch

from fusedce.triton.moe.tile_table import row_tiles
from tests.distributed.processes import run
from tests.test_moe_short_plan import (  # noqa: F401
    test_a_plan_with_more_rows_than_slots_is_refused,
    test_a_shortened_plan_gives_the_same,
)

pytestmark = pytest.mark.interpret


def test_mo_a13_chunks_of_two_ranks_give_the_bits_of_one_chunk() -> None:
    run("tests.distributed.test_expert_parallel", "check_kernels", 2)


def test_offsets_past_the_rows_lead_to_no_row_past_them() -> None:
    """A direct call's mistake: its values mean nothing, but no other memory is touched."""
    offsets = torch.tensor([0, 50, 69], dtype=torch.int32)
    slots = torch.arange(69, dtype=torch.int32)
    tiles = row_tiles(offsets, slots[:40], slots.reshape(23, 3), 16)
    starts, ends = tiles.table[1:, : int(tiles.first[-1])]
    assert starts.min() >= 0 and (starts <= ends).all() and ends.max() == 40
