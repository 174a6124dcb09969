"""linear_parts: shards of a vocabulary, merged, are the whole one."""

import itertools

import pytest
import torch
from torch.library import opcheck

import fusedce
from fusedce.options import LogitOptions
from fusedce.rows import merge_parts
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, Case

NATIVE = True

ELSEWHERE = -1


@pytest.mark.parametrize("cuts", [(0, 301), (0, 1, 300, 301), (0, 64, 130, 131, 301)], ids=str)
@pytest.mark.parametrize("with_entropy", [True, False])
def test_shards_merge_to_the_whole(cuts: tuple[int, ...], with_entropy: bool, place: Place) -> None:
    case = Case(40, 301, 24, has_bias=True, softcap=5.0)
    hidden, weight, target, bias = case.inputs(place.device)
    temperature = torch.linspace(0.5, 2.0, 40, device=place.device)
    parts = []
    for start, stop in itertools.pairwise(cuts):
        local = torch.where((target >= start) & (target < stop), target - start, ELSEWHERE)
        local = torch.where(target == IGNORE, IGNORE, local)
        arguments = (hidden, weight[start:stop], local, bias[start:stop], temperature)
        options = {"softcap": 5.0, "with_entropy": with_entropy, "backend": place.backend}
        parts.append(torch.ops.fusedce.linear_parts(*arguments, **options))
    merged = merge_parts(torch.stack(parts), target, LogitOptions(IGNORE, 1.0, 5.0, temperature), with_entropy)
    whole = fusedce.linear_logprob(
        hidden, weight, target, bias=bias, temperature=temperature, softcap=5.0, backend=place.backend
    )
    expected = whole if with_entropy else (whole.logprob, whole.lse)
    found = merged[:3] if with_entropy else (merged[0], merged[2])
    for m, w in zip(found, expected, strict=True):
        torch.testing.assert_close(m, w, rtol=2e-6, atol=2e-6)


def test_opcheck_linear_parts(place: Place) -> None:
    hidden, weight, target, bias = Case(9, 33, 8, has_bias=True).inputs(place.device)
    for rows, words in ((9, 33), (0, 33), (9, 1)):
        arguments = (hidden[:rows], weight[:words], target[:rows].clamp(max=words), bias[:words])
        opcheck(torch.ops.fusedce.linear_parts.default, arguments, {"backend": place.backend})
