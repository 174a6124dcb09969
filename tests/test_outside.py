"""The first value that is none: every backend's search, against a loop."""

import pytest
import torch

from fusedce.ops import registry
from tests.conftest import Place

NATIVE = True


def search(place: Place, values: torch.Tensor, size: int, ignore: int | None, seen: torch.Tensor) -> list[int]:
    """[row, value] after the backend's search, -1 and whatever `seen` had where there is none."""
    choice = registry.Choice("linear_ce_sum", place.backend, "")
    registry.function(choice, "first_outside")(values, size, ignore, seen)
    return seen.tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 4095, 4096, 4097, 9000])
@pytest.mark.parametrize("bad", [40, -1, -2, 2**31, 2**32 + 3, -(2**63), 2**63 - 1])
def test_the_first_of_several(num_rows: int, bad: int, place: Place) -> None:
    """In the last row; then in one before it as well, where both lie in different blocks."""
    values = torch.randint(0, 40, (num_rows,), device=place.device)
    values[0] = -100
    seen = torch.full((2,), -1, device=place.device)
    assert search(place, values, 40, -100, seen)[0] == -1
    values[-1] = bad
    assert search(place, values, 40, -100, seen.clone()) == [num_rows - 1, bad]
    values[num_rows // 2] = 41
    assert search(place, values, 40, -100, seen) == [num_rows // 2, 41]


def test_what_was_seen_before_stays(place: Place) -> None:
    values = torch.tensor([5, 7, 7], device=place.device)
    seen = torch.tensor([3, 11], device=place.device)
    assert search(place, values, 6, None, seen) == [3, 11]
    assert search(place, values, 6, None, torch.full_like(seen, -1)) == [1, 7]
    assert search(place, values[::2], 6, None, torch.full_like(seen, -1)) == [1, 7]


def test_without_a_value_to_ignore_every_number_counts(place: Place) -> None:
    values, seen = torch.tensor([0, -100], device=place.device), torch.full((2,), -1, device=place.device)
    assert search(place, values, 6, None, seen.clone()) == [1, -100]
    assert search(place, values, 6, -100, seen)[0] == -1
