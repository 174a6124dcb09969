"""The merge of a row's tile sums, run on the host with 32 and with 64 lanes, against torch in fp64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.paired import assert_close
from tests.simt.host_kernels import KERNELS, compile_for, with_fault
from tests.simt.host_sums import HostSums, load
from tests.toolchain import output

pytestmark = pytest.mark.native

IGNORE = -100
WIDTH = 16  # words of a tile here


@pytest.fixture(scope="module", params=[32, 64], ids=["wave32", "wave64"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostSums:
    return load(request.param, tmp_path_factory.mktemp("simt"))


class Problem:
    """Raw logits of rows of different temperatures, the last ignored and full of NaN, and their sums over tiles."""

    def __init__(self, num_rows: int, num_tiles: int, spread: float = 4.0) -> None:
        self.raw = spread * torch.randn(num_rows, num_tiles * WIDTH)
        self.target = torch.randint(0, self.raw.shape[1], (num_rows,))
        self.slopes = 0.5 + torch.rand(num_rows)
        self.target[-1] = IGNORE
        self.raw[-1], self.slopes[-1] = torch.nan, torch.nan

    def run(self, kernels: HostSums, with_entropy: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """logprob, entropy, lse, normalizer."""
        num_rows, vocab = self.raw.shape
        inside = (self.target >= 0) & (self.target < vocab)
        column = torch.where(inside, self.target, 0)[:, None]
        raw_target = torch.where(inside, self.raw.gather(1, column)[:, 0], torch.nan)
        others = torch.where(inside[:, None], self.raw.scatter(1, column, -torch.inf), self.raw)
        tiles = others.view(num_rows, -1, WIDTH)
        maxima = tiles.amax(2)
        gap = (tiles - torch.where(maxima == -torch.inf, 0.0, maxima)[:, :, None]) * self.slopes[:, None, None]
        exps, gaps = gap.exp().sum(2), torch.where(gap.exp() == 0, 0.0, gap.exp() * gap).sum(2)
        logprob, entropy, lse = torch.full((3, num_rows), torch.nan)
        normalizer = torch.full((num_rows, 2), torch.nan)
        sums = [t.t().contiguous() for t in (maxima, exps, gaps)]
        kernels.merged_sums(
            self.target, self.slopes, IGNORE, *sums[:2], sums[2] if with_entropy else None, raw_target,
            logprob, entropy if with_entropy else None, lse, normalizer,
        )  # fmt: skip
        return logprob, entropy, lse, normalizer

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """logprob, entropy and lse of all rows but the last."""
        z = self.raw[:-1].to(dtype) * self.slopes[:-1, None].to(dtype)
        log_p = z.log_softmax(1)
        entropy = -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(1)
        return log_p.gather(1, self.target[:-1, None])[:, 0], entropy, z.logsumexp(1)


def check(kernels: HostSums, problem: Problem) -> None:
    out = problem.run(kernels)
    gold, twin = problem.reference(torch.float64), problem.reference(torch.float32)
    for name, o, g, t in zip(("logprob", "entropy", "lse"), out, gold, twin, strict=False):
        assert_close(o[:-1], g, t, name)
        assert o[-1] == 0.0
    normalizer = out[3]
    assert torch.equal(normalizer[:-1, 0], problem.raw[:-1].amax(1)) and normalizer[-1].tolist() == [torch.inf, 0.0]
    torch.testing.assert_close(normalizer[:-1, 0] * problem.slopes[:-1] + normalizer[:-1, 1], out[2][:-1])


# 32 rows are a block's; 32 tiles are one step of its 8 parts with four loads each.
@pytest.mark.parametrize("shape", [(2, 1), (9, 3), (33, 32), (40, 45), (65, 100)], ids=str)
def test_results(kernels: HostSums, shape: tuple[int, int]) -> None:
    check(kernels, Problem(*shape))


def test_without_the_entropy_it_is_not_written(kernels: HostSums) -> None:
    problem = Problem(9, 40)
    with_it, without = problem.run(kernels), problem.run(kernels, with_entropy=False)
    assert without[1].isnan().all()
    for i in (0, 2, 3):
        assert torch.equal(with_it[i], without[i])


def test_far_apart_logits(kernels: HostSums) -> None:
    """Tiles whose sums vanish beside others'; words at −inf, a whole tile of them among those."""
    problem = Problem(9, 40, spread=300.0)
    problem.raw[:4, 64:80] = -torch.inf
    problem.target[:4] = 3
    check(kernels, problem)


def test_certain_targets_keep_their_digits(kernels: HostSums) -> None:
    problem = Problem(5, 10, spread=1.0)
    problem.target[:4], problem.raw[:4, 7] = 7, torch.tensor([16.0, 15.0, 14.0, 13.0])
    logprob = problem.run(kernels)[0][:4]
    torch.testing.assert_close(logprob.double(), problem.reference(torch.float64)[0], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("label", [-1, 160, 2**32])
def test_a_label_out_of_range_makes_its_row_nan(kernels: HostSums, label: int) -> None:
    problem = Problem(5, 10)
    problem.target[2] = label
    for result in problem.run(kernels):
        rows = result if result.dim() == 1 else result.sum(1)
        assert rows.isnan().tolist()[:4] == [False, False, True, False]


def test_nan_stays_in_its_row(kernels: HostSums) -> None:
    problem = Problem(5, 10)
    problem.raw[1, 77] = torch.nan
    for result in problem.run(kernels)[:3]:
        assert result.isnan().tolist() == [False, True, False, False, False]


def test_no_races(tmp_path: Path) -> None:
    program = compile_for("sums_races.cpp", 64, tmp_path / "races", KERNELS, "-fsanitize=thread", "-g")
    assert output([str(program)]) == "ran\n"


MUTANTS = {
    "the first part alone is merged": ("i < kParts", "i < 1"),
    "the last tiles are left out": ("tile < tiles.num_tiles; tile", "tile + kParts < tiles.num_tiles; tile"),
    "the rescale is lost": ("const float factor = expf(moved)", "const float factor = 1.0f"),
    "the temperature is lost": ("(sums.max - max) * slope", "(sums.max - max)"),
    "ignored rows are read": ("rows.target[row] != rows.ignore_index", "true"),
    "1 − p is rounded": ("log1pf(rest.exp / of_target)", "logf(1.0f + rest.exp / of_target)"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_tests_bite(mutant: str, tmp_path: Path) -> None:
    mutated = load(64, tmp_path, with_fault(*MUTANTS[mutant], tmp_path))
    with pytest.raises(AssertionError):
        some_tests(mutated)


def some_tests(kernels: HostSums) -> None:
    test_results(kernels, (40, 45))
    test_certain_targets_keep_their_digits(kernels)
