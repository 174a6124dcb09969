"""Single words of rows of logits, run on the host with 32 and with 64 lanes: the largest's against torch's argmax,
those of ids against torch in fp64."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.paired import assert_close
from tests.simt.host_kernels import KERNELS, compile_for, with_fault
from tests.simt.host_words import HostWords, load, slopes_of
from tests.toolchain import output

pytestmark = pytest.mark.native

IGNORE = -100
# 8,192 words are one step of a block of 512 threads with four loads of four words each.
VOCABS = (1, 3, 4, 7, 1000, 8193, 17011)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", params=[32, 64], ids=["wave32", "wave64"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostWords:
    return load(request.param, tmp_path_factory.mktemp("simt"))


def rows_of(logits: Tensor) -> Tensor:
    """The same logits with a row at each alignment and NaN between the rows."""
    num_rows, vocab = logits.shape
    stride = vocab + 3 if vocab % 2 == 0 else vocab + 2
    memory = torch.full((num_rows * stride + 1,), float("nan"))
    out = memory.as_strided((num_rows, vocab), (stride, 1), 1)
    out.copy_(logits)
    return out


# ── the largest logit ───────────────────────────────────────────────────────────────────────────────────────────────
def argmax(kernels: HostWords, logits: Tensor, bias: Tensor | None = None) -> list[int]:
    words = torch.full((logits.shape[0],), -7)
    kernels.argmax_rows(logits, bias, words)
    return words.tolist()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("vocab", VOCABS)
def test_argmax(kernels: HostWords, vocab: int, has_bias: bool) -> None:
    """Few different numbers: most rows have several largest words, of which the lowest counts."""
    logits, bias = torch.randint(-9, 9, (6, vocab)).float(), torch.randint(-2, 3, (vocab,)).float()
    whole = logits + bias if has_bias else logits
    expected = [(row == row.max()).int().argmax().item() for row in whole]
    assert argmax(kernels, rows_of(logits), bias if has_bias else None) == expected
    assert argmax(kernels, rows_of(-logits.abs() - 40.0)) == [
        (row == row.min()).int().argmax().item() for row in logits.abs()
    ]


@pytest.mark.parametrize("where", [0, 500, 999])
def test_argmax_of_nan_and_infinities(kernels: HostWords, where: int) -> None:
    logits = rows_of(torch.randn(5, 1000))
    logits[1, where], logits[2, where], logits[3] = float("nan"), torch.inf, -torch.inf
    logits[4, where] = 90.0
    first, *rest = argmax(kernels, logits)
    assert first == logits[0].argmax() and rest == [-1, -1, 0, where]
    logits[3, where] = -3e38
    assert argmax(kernels, logits)[3] == where
    logits[3] = -1.0
    logits[3, 400], logits[3, 700] = -0.0, 0.0
    assert argmax(kernels, logits, torch.full((1000,), -0.0))[3] == 400, "-0 and 0 are equal"


# ── words by their ids ──────────────────────────────────────────────────────────────────────────────────────────────
class Problem:
    """Five rows of logits with K words each, some twice, some slots without one; the last row has none, and is NaN."""

    def __init__(self, vocab: int, slots: int, bias: bool = False, softcap: float = 0.0) -> None:
        self.logits, self.softcap = rows_of(3 * torch.randn(5, vocab)), softcap
        self.bias = torch.randn(vocab) if bias else None
        self.ids = torch.randint(0, vocab, (5, slots))
        self.ids[:3, -1] = self.ids[:3, 0]
        self.ids[3, slots // 2] = IGNORE
        self.ids[4], self.logits[4] = IGNORE, float("nan")
        self.d = torch.where(self.ids == IGNORE, 0.0, torch.randn(5, slots))

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Raw logits of the slots, their log-probs, and all of d_logits."""
        raw, slope = slopes_of(self.logits.to(dtype), self.bias, self.softcap)
        none = self.ids == IGNORE
        column = torch.where(none, 0, self.ids)
        log_p = raw.log_softmax(1)
        d = self.d.to(dtype)
        d_raw = torch.zeros_like(raw).scatter_add(1, column, d) - log_p.exp() * d.sum(1, keepdim=True)
        d_logits = torch.where(none.all(1)[:, None], 0.0, d_raw * slope)
        return raw.gather(1, column), torch.where(none, 0.0, log_p.gather(1, column)), d_logits

    def selected(self, kernels: HostWords) -> Tensor:
        raw = torch.full(self.ids.shape, -7.0)
        kernels.selected_logits(self.logits, self.bias, self.ids, IGNORE, self.softcap, raw)
        return raw

    def gradient(self, kernels: HostWords, dtype: torch.dtype, gap: int) -> Tensor:
        """d_logits, fp32, with the entries that nobody selects from the reference; between its rows nothing changes."""
        _, logprob, d_logits = self.reference(torch.float64)
        vocab = self.logits.shape[1]
        memory = torch.full((5, vocab + gap), -7.0, dtype=dtype)
        named = (self.ids != IGNORE).double()
        is_selected = torch.zeros_like(d_logits).scatter_add(1, self.ids.clamp(min=0), named) > 0
        out = memory[:, :vocab]
        out.copy_(torch.where(is_selected, 999.0, d_logits))
        values = logprob.float()
        numbers = (self.d, values, -torch.expm1(values), -self.d.sum(1))
        kernels.selected_gradient(self.logits, self.bias, self.ids, IGNORE, self.softcap, *numbers, out)
        assert (memory[:, vocab:] == -7.0).all()
        return out.float()


OPTIONS = [{}, {"bias": True}, {"bias": True, "softcap": 2.5}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(2, 1), (7, 2), (1000, 5), (1000, 130), (40, 300)], ids=str)
def test_words_by_their_ids(kernels: HostWords, sizes: tuple[int, int], options: dict[str, float]) -> None:
    """More slots than a block has threads among them."""
    problem = Problem(*sizes, **options)
    gold, twin = problem.reference(torch.float64), problem.reference(torch.float32)
    raw, named = problem.selected(kernels), problem.ids != IGNORE
    assert_close(raw[named], gold[0][named], twin[0][named], "raw logits")
    assert raw[~named].isnan().all(), "a slot without a word has no logit"
    for dtype in DTYPES:
        for gap in (0, 3):
            found = problem.gradient(kernels, dtype, gap)
            assert_close(found, gold[2], twin[2].to(dtype).float(), f"d_logits in {dtype}")


def test_certain_words_keep_their_digits(kernels: HostWords) -> None:
    """1 − p comes from the log-prob: 10⁻⁹ is there, not 0."""
    logits = torch.tensor([[0.0, 20.0, -1.0]])
    problem = Problem(3, 1)
    problem.logits, problem.ids, problem.d = logits.repeat(5, 1), torch.tensor([[1]] * 5), torch.ones(5, 1)
    found = problem.gradient(kernels, torch.float32, 0)
    torch.testing.assert_close(found[:, 1].double(), problem.reference(torch.float64)[2][:, 1], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("bad", [-1, 1000, 2**32, -(2**40)])
def test_an_id_out_of_range_is_not_read_or_written(kernels: HostWords, bad: int) -> None:
    problem = Problem(1000, 3)
    problem.ids[1] = torch.tensor([5, bad, 6])
    assert problem.selected(kernels)[1].isnan().tolist() == [False, True, False]
    out = torch.full((5, 1000), -7.0)
    numbers = (problem.d, torch.zeros(5, 3), torch.zeros(5, 3), torch.zeros(5))
    kernels.selected_gradient(problem.logits, None, problem.ids, IGNORE, 0.0, *numbers, out)
    assert (out[1] != -7.0).nonzero().flatten().tolist() == [5, 6] and (out[4] == -7.0).all()


def test_no_rows(kernels: HostWords) -> None:
    assert argmax(kernels, torch.empty(0, 10)) == []
    kernels.selected_logits(
        torch.empty(0, 10), None, torch.empty((0, 2), dtype=torch.int64), IGNORE, 0.0, torch.empty(0)
    )


@pytest.mark.parametrize("wave_size", [32, 64])
def test_no_races(wave_size: int, tmp_path: Path) -> None:
    program = compile_for("words_races.cpp", wave_size, tmp_path / "races", KERNELS, "-fsanitize=thread", "-g")
    assert output([str(program)]) == "ran\n"


def under_address_sanitizer(folder: Path, kernels: Path) -> subprocess.CompletedProcess[str]:
    flags = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"
    program = compile_for("words_races.cpp", 64, folder / "bounds", kernels, *flags)
    return subprocess.run([str(program)], text=True, capture_output=True)


def test_no_memory_out_of_bounds(tmp_path: Path) -> None:
    assert under_address_sanitizer(tmp_path, KERNELS).stdout == "ran\n"
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder)
    path, guard = folder / "linear_ce_words.cu", "if (slot >= rows.num_rows * slots.num_slots) return;"
    assert path.read_text().count(guard) == 1
    path.write_text(path.read_text().replace(guard, ""))
    done = under_address_sanitizer(tmp_path, folder)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr and "selected_logits_kernel" in done.stderr


MUTANTS = {
    "the last of equal words": ("| ~static_cast<std::uint32_t>(word)", "| static_cast<std::uint32_t>(~word ^ 0x3fff)"),
    "negative numbers are turned round": ("bits >> 31 ? ~bits", "bits >> 31 ? bits"),
    "-0 is below 0": ("logit + 0.0f", "logit"),
    "NaN is passed over": ("logit == logit ? logit + 0.0f : INFINITY", "logit + 0.0f"),
    "only the first wave is merged": ("if (thread < kWaves)", "if (thread < 1)"),
    "head and tail are skipped": ("if (thread < split.num_edges) {", "if (false) {"),
    "the last step is skipped": ("first < split.num_vectors; first", "first + kThreads < split.num_vectors; first"),
    "the bias is lost": ("plain[i].at[j] + bias.at[j], column", "plain[i].at[j] - bias.at[j], column"),
    "words of one vector are one": ("bias.at[j], column + j)", "bias.at[j], column)"),
    "a slot reads the next row": ("slot / slots.num_slots * rows", "(slot + 1) / slots.num_slots * rows"),
    "the last slots are left out": ("k < slots.num_slots; k", "k + 1 < slots.num_slots; k"),
    "a word's slots do not add up": ("same += gradients", "same = gradients"),
    "1 − p is rounded": ("gradients.complement[start + k]", "(1.0f - p)"),
    "the others' slots are lost": ("gradients.on_probs[row] + same", "gradients.on_probs[row]"),
    "the softcap's slope is lost": ("entry * slope", "entry / slope"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_tests_bite(mutant: str, tmp_path: Path) -> None:
    mutated = load(64, tmp_path, with_fault(*MUTANTS[mutant], tmp_path))
    with pytest.raises(AssertionError):
        some_tests(mutated)


def some_tests(kernels: HostWords) -> None:
    test_argmax(kernels, 8193, True)
    test_argmax(kernels, 7, False)
    test_argmax_of_nan_and_infinities(kernels, 500)
    test_words_by_their_ids(kernels, (40, 130), {"bias": True, "softcap": 2.5})
    test_certain_words_keep_their_digits(kernels)
