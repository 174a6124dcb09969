"""The row kernels of the seeded exponentials, run on the host with 32 and with 64 lanes, against torch in fp64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.paired import assert_close
from tests.simt import host_seeded
from tests.simt.host_kernels import KERNELS, compile_for, with_fault
from tests.simt.host_seeded import HostRows, load
from tests.toolchain import output

pytestmark = pytest.mark.native

IGNORE = -100
# 9 rows leave a part of a block without rows for 8 and for 4 waves; 33 for the 32 rows of a block of sums.
SHAPES = ((9, 3, 8), (9, 257, 264), (33, 1000, 520))
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"bias": True}, id="bias"),
    pytest.param({"bias": True, "softcap": 5.0}, id="bias-softcap"),
]
LABELS_OUT_OF_RANGE = (-1, 1000, 2**32, -(2**40))


@pytest.fixture(scope="module", params=[32, 64], ids=["wave32", "wave64"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostRows:
    return load(request.param, tmp_path_factory.mktemp("simt"))


class Problem:
    """A chunk of rows, the last of which is ignored; each row with a temperature of its own. Hidden's memory is wider
    than its rows."""

    def __init__(self, num_rows: int, vocab: int, depth: int, bias: bool = False, softcap: float = 0.0) -> None:
        self.hidden = torch.randn(num_rows, depth + 8).bfloat16()[:, :depth]
        self.weight = (3 * torch.randn(vocab, depth) * depth**-0.5).bfloat16()
        self.bias = torch.randn(vocab) if bias else None
        self.target = torch.randint(0, vocab, (num_rows,))
        self.target[-1] = IGNORE
        self.hidden[-1] = 0.0
        self.slopes, self.softcap = 0.5 + torch.rand(num_rows), softcap
        self.upstream = [torch.randn(num_rows), torch.randn(num_rows)]

    def far_targets(self) -> "Problem":
        """The same with the first rows' targets 60, 150 and 10⁴ below the rest, and −inf; the rest is at 200, whose
        exponential is no float."""
        assert self.bias is not None
        self.bias += 200.0
        for row, low in enumerate((140.0, 50.0, -1e4, -torch.inf)):
            self.target[row], self.bias[row] = row, low
        self.target[4:-1] = self.target[4:-1].clamp(min=4)
        return self

    def run(self, kernels: HostRows, with_lse: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """logprob, lse, the logits' gradient before bias and softcap, and hidden after its scaling times what it was
        scaled with, as the ops make them one after the other."""
        num_rows, vocab = len(self.target), self.weight.shape[0]
        hidden = torch.full((num_rows, self.hidden.shape[1] + 8), -7.0).bfloat16()[:, :-8]
        hidden.copy_(self.hidden)
        chunk = (hidden, self.weight, self.bias, self.target, self.slopes, IGNORE, self.softcap)
        raw, seed, rest, logprob, lse, factor = torch.full((6, num_rows), float("nan"))
        exps = torch.full((num_rows, -(-vocab // 8) * 8 + 8), float("nan")).bfloat16()
        partial = torch.empty(-(-vocab // host_seeded.VOCAB_TILE), num_rows)
        kernels.target_logits(*chunk, raw, seed)
        assert seed[-1] < torch.inf, "TMA's zeros must stay zeros"
        host_seeded.seeded_exponentials(*chunk, seed, exps[:, :vocab], partial)
        kernels.seeded_statistics(*chunk, partial, raw, seed, exps[:, :vocab], rest, logprob, lse)
        d_logprob, d_lse = self.upstream
        kernels.seeded_scale(
            *chunk, raw, seed, rest, d_logprob, d_lse if with_lse else None, exps[:, :vocab], factor
        )  # fmt: skip
        assert exps[:, vocab:].isnan().all(), "nothing is written past the vocabulary"
        return (
            logprob,
            lse,
            exps[:, :vocab].float() * factor[:, None],
            torch.stack((hidden, self.hidden * factor[:, None])),
        )

    def reference(self, dtype: torch.dtype, with_lse: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """logprob, lse and the logits' gradient of all rows, by torch's autograd in `dtype`."""
        kept = self.target != IGNORE
        x = (self.hidden.to(dtype) @ self.weight.to(dtype).t())[kept].requires_grad_()
        raw = x if self.bias is None else x + self.bias.to(dtype)
        raw = self.softcap * torch.tanh(raw / self.softcap) if self.softcap else raw
        z = raw * self.slopes.to(dtype)[kept, None]
        logprob = z.log_softmax(1).gather(1, self.target[kept, None])[:, 0]
        lse = z.logsumexp(1)
        d_logprob, d_lse = (grad.to(dtype)[kept] for grad in self.upstream)
        # −inf itself is no number to differentiate at
        loss = d_logprob * torch.where(logprob.isfinite(), logprob, 0.0) + (d_lse * lse if with_lse else 0.0)
        (grad,) = torch.autograd.grad(loss.sum(), x)
        out = [
            torch.zeros(len(kept), dtype=dtype),
            torch.zeros(len(kept), dtype=dtype),
            torch.zeros(len(kept), x.shape[1], dtype=dtype),
        ]
        for whole, rows in zip(out, (logprob.detach(), lse.detach(), grad), strict=True):
            whole[kept] = rows
        return tuple(out)


def check(kernels: HostRows, problem: Problem, with_lse: bool = True) -> None:
    """Against fp64; the bar is fp32, with the gradient rounded to bf16."""
    logprob, lse, grad, (scaled, plain) = problem.run(kernels, with_lse)
    gold, twin = problem.reference(torch.float64, with_lse), problem.reference(torch.float32, with_lse)
    assert_close(logprob, gold[0], twin[0], "logprob")
    assert_close(lse, gold[1], twin[1], "lse")
    # two numbers of bf16: the exponential, and the factor in hidden's rows
    assert_close(grad.bfloat16(), gold[2], twin[2].bfloat16(), "gradient")
    assert torch.equal(scaled, plain.bfloat16()), "hidden's rows are scaled by the factor, rounded once"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_and_gradient(kernels: HostRows, shape: tuple[int, int, int], options: dict[str, float]) -> None:
    check(kernels, Problem(*shape, **options))


def test_without_an_upstream_of_the_lse(kernels: HostRows) -> None:
    check(kernels, Problem(9, 300, 64), with_lse=False)


def test_far_targets(kernels: HostRows) -> None:
    """Rows that are made again beside rows that are not."""
    problem = Problem(9, 300, 64, bias=True).far_targets()
    problem.target[3] = 5  # the one at −inf has a test of its own
    check(kernels, problem)


def test_a_target_at_minus_infinity(kernels: HostRows) -> None:
    problem = Problem(9, 300, 64, bias=True).far_targets()
    logprob, lse, grad, _ = problem.run(kernels)
    assert logprob[3] == -torch.inf
    assert_close(lse, problem.reference(torch.float64)[1], problem.reference(torch.float32)[1], "lse")
    d_logprob, d_lse = (x[3].double() for x in problem.upstream)
    z = (problem.hidden.double() @ problem.weight.double().t() + problem.bias)[3] * problem.slopes[3]
    expected = (d_lse - d_logprob) * z.softmax(0)
    expected[3] = d_logprob
    torch.testing.assert_close(grad[3].double(), expected * problem.slopes[3], rtol=1e-2, atol=1e-6)


def test_certain_targets_keep_their_digits(kernels: HostRows) -> None:
    """log p = −log(1 + rest): 10⁻¹² comes out as 10⁻¹², never as 0, and so does its gradient."""
    problem = Problem(9, 300, 64, bias=True)
    for row in range(8):
        problem.target[row] = 7
    problem.bias[7], problem.slopes = 40.0, torch.full((9,), 0.75)
    check(kernels, problem)
    assert (problem.run(kernels)[0][:8] < 0).all()


def test_opposite_upstreams_leave_the_target_s_gradient(kernels: HostRows) -> None:
    """d_lse = d_logprob: words other than the target have none, and a factor of 0 must not take the target's along."""
    problem = Problem(9, 300, 64)
    problem.upstream[1] = problem.upstream[0].clone()
    check(kernels, problem)


def test_a_row_that_is_ignored_holds_nothing(kernels: HostRows) -> None:
    problem = Problem(9, 300, 64, bias=True, softcap=5.0)
    logprob, lse, grad, (scaled, _) = problem.run(kernels)
    assert logprob[-1] == lse[-1] == 0.0 and not grad[-1].any() and not scaled[-1].any()


@pytest.mark.parametrize("label", LABELS_OUT_OF_RANGE)
def test_a_label_out_of_range_makes_its_row_nan(kernels: HostRows, label: int) -> None:
    problem = Problem(9, 1000, 64)
    problem.target[2] = label
    logprob, lse, grad, _ = problem.run(kernels)
    for result in (logprob, lse, grad[:, 0], grad[:, 999]):
        assert result.isnan().tolist() == [row == 2 for row in range(9)]


def test_a_row_of_minus_infinity_has_no_distribution(kernels: HostRows) -> None:
    problem = Problem(3, 9, 8, bias=True)
    problem.bias[:] = -torch.inf
    logprob, lse, *_ = problem.run(kernels)
    assert logprob[:2].isnan().all() and not lse[:2].isfinite().any()


def test_the_bits_repeat(kernels: HostRows) -> None:
    problem = Problem(33, 1000, 64, bias=True).far_targets()
    for first, second in zip(problem.run(kernels), problem.run(kernels), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("count", [0, 8, 2048, 2056, 4104])
def test_scaled(kernels: HostRows, count: int) -> None:
    """2,048 elements are a block's."""
    given, out, scale = torch.randn(count).bfloat16(), torch.full((count + 8,), -7.0).bfloat16(), torch.tensor(0.3)
    kernels.scaled(given, scale, out)
    assert torch.equal(out[:count], (given.float() * scale).bfloat16()) and (out[count:] == -7.0).all()


@pytest.mark.parametrize("wave_size", [32, 64])
def test_no_races(wave_size: int, tmp_path: Path) -> None:
    program = compile_for("seeded_races.cpp", wave_size, tmp_path / "races", KERNELS, "-fsanitize=thread", "-g")
    assert output([str(program)]) == "ran\n"


MUTANTS = {
    "half the lanes are not summed": ("lane_mask = kWaveSize / 2", "lane_mask = kWaveSize / 4"),
    "depth ends early": ("d < chunk.depth", "d + kEight < chunk.depth"),
    "16-bit halves swap": ("words.at[i] << 16", "words.at[i] & 0xffff0000u"),
    "the first part alone is summed": ("i < kSumParts", "i < 1"),
    "no row is rescued": ("rest > kLargestSum ||", "false &&"),
    "the rescue does not shift": ("of_block = largest", "of_block = 0.0f"),
    "the rescue leaves out the last words": ("first < chunk.vocab; first", "first + 64 < chunk.vocab; first"),
    "the slope is lost": ("on_probs / total * inv_temperature", "on_probs / total"),
    "the softcap's slope is lost": ("on_probs * (1.0f - bent * bent)", "on_probs * (1.0f - 0.0f * bent)"),
    "the small part is lost": ("on_probs = least;", "on_probs = 0.0f;"),
    "the target moves by one": ("column] = from_float<bf16>(scaled", "column + 1] = from_float<bf16>(scaled"),
    "1 − p is rounded": ("log1pf(rest / of_target)", "logf(1.0f + rest / of_target)"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_tests_bite(mutant: str, tmp_path: Path) -> None:
    mutated = load(64, tmp_path, with_fault(*MUTANTS[mutant], tmp_path))
    with pytest.raises(AssertionError):
        some_tests(mutated)


def some_tests(kernels: HostRows) -> None:
    test_statistics_and_gradient(kernels, (33, 1000, 520), {"bias": True, "softcap": 5.0})
    test_far_targets(kernels)
    test_certain_targets_keep_their_digits(kernels)
    test_opposite_upstreams_leave_the_target_s_gradient(kernels)
