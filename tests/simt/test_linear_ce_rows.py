"""The native kernels' own text, run on the host with 32 and with 64 lanes, against torch in fp64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusedce.options import LogitOptions, Upstream
from fusedce.rows import merge_parts, row_gradient
from tests.paired import assert_close
from tests.simt.host_kernels import HostKernels, Rows, load, with_fault

pytestmark = pytest.mark.native

# 8,192 words are one step of a block of 512 threads with four loads of four words each.
VOCABS = (1, 3, 4, 7, 1000, 8192, 17011)
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"bias": True, "temperature": 0.7}, id="bias-temperature"),
    pytest.param({"bias": True, "softcap": 5.0, "temperature": 1.5}, id="bias-softcap-temperature"),
]


@pytest.fixture(scope="module", params=[32, 64], ids=["wave32", "wave64"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return load(request.param, tmp_path_factory.mktemp("simt"))


def make_rows(vocab: int, bias: bool = False, temperature: float = 1.0, softcap: float = 0.0) -> Rows:
    """Four rows, one at each alignment, of different temperatures, and an ignored one full of NaN, as is the memory
    between them."""
    num_rows, stride = 5, vocab + 3 if vocab % 2 == 0 else vocab + 2
    memory = torch.full((num_rows * stride + 1,), float("nan"))
    logits = memory[1:].as_strided((num_rows, vocab), (stride, 1), 1)
    logits.copy_(4 * torch.randn(num_rows, vocab))
    target = torch.randint(0, vocab, (num_rows,))
    target[4] = -100
    logits[4] = float("nan")
    slopes = torch.tensor([1.0, 0.9, 1.1, 1.2, float("nan")]) / temperature
    return Rows(logits, target, torch.randn(vocab) if bias else None, slopes, softcap=softcap)


def plain_rows(logits: Tensor, target: Tensor) -> Rows:
    return Rows(logits, target, None, torch.ones(len(target)))


def reference(rows: Rows, upstream: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprob, entropy, lse of the rows that are not ignored, and d_logits of all, by torch's autograd in `dtype`."""
    kept = rows.target != rows.ignore_index
    x = rows.logits[kept].to(dtype).requires_grad_()
    z = x if rows.bias is None else x + rows.bias.to(dtype)
    raw = rows.softcap * torch.tanh(z / rows.softcap) if rows.softcap else z
    z = raw * rows.inv_temperature[kept, None].to(dtype)
    log_p = z.log_softmax(1)
    logprob = log_p.gather(1, rows.target[kept, None])[:, 0]
    entropy = -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(1)
    lse = z.logsumexp(1)
    a, b, c = (grad[kept].to(dtype) for grad in upstream)
    (d_kept,) = torch.autograd.grad((a * logprob + b * entropy + c * lse).sum(), x)
    d_logits = torch.zeros(rows.logits.shape, dtype=dtype)
    d_logits[kept] = d_kept
    return logprob.detach(), entropy.detach(), lse.detach(), d_logits


def random_upstream(num_rows: int) -> list[Tensor]:
    return [torch.randn(num_rows) for _ in range(3)]


def gradient(
    kernels: HostKernels, rows: Rows, upstream: list[Tensor], dtype: torch.dtype, scale: float = 1.0, gap: int = 0
) -> Tensor:
    """d_logits · scale, in fp32, of the upstream gradients of logprob, entropy (or None) and lse. gap: elements between
    the rows of the output, which must stay as they were."""
    logprob, entropy, _, normalizer = kernels.logprob_rows(rows)
    options = LogitOptions(rows.ignore_index, softcap=rows.softcap, row_temperature=1.0 / rows.inv_temperature)
    numbers = row_gradient(Upstream(*upstream), logprob, entropy, rows.target, options).over(torch.tensor(scale))
    num_rows, vocab = rows.logits.shape
    memory = torch.full((num_rows, vocab + gap), -7.0, dtype=dtype)
    kernels.d_logits_rows(rows, [*numbers, entropy, normalizer], memory[:, :vocab])
    assert torch.equal(memory[:, vocab:], torch.full((num_rows, gap), -7.0, dtype=dtype))
    return memory[:, :vocab].float() * scale


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_statistics(kernels: HostKernels, vocab: int, options: dict[str, float]) -> None:
    rows = make_rows(vocab, **options)
    kept = rows.target != rows.ignore_index
    upstream = random_upstream(len(rows.target))
    gold, twin = reference(rows, upstream, torch.float64), reference(rows, upstream, torch.float32)
    logprob, entropy, lse, normalizer = kernels.logprob_rows(rows)
    for index, (name, out) in enumerate((("logprob", logprob), ("entropy", entropy), ("lse", lse))):
        assert_close(out[kept], gold[index], twin[index], name)
        assert out[~kept].tolist() == [0.0]
    slope = rows.inv_temperature[kept]
    assert_close(normalizer[kept, 0] * slope + normalizer[kept, 1], gold[2], twin[2], "normalizer")
    assert normalizer[~kept].tolist() == [[torch.inf, 0.0]], "about it, every probability of an ignored row is 0"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_parts_of_a_shard(kernels: HostKernels, vocab: int, options: dict[str, float]) -> None:
    """Merged, one shard's parts are the whole row's statistics; a target elsewhere is −inf, and its row's parts go on
    without it."""
    rows = make_rows(vocab, **options)
    kept = rows.target != rows.ignore_index
    upstream = random_upstream(len(rows.target))
    gold, twin = reference(rows, upstream, torch.float64), reference(rows, upstream, torch.float32)
    parts = kernels.parts_rows(rows)
    assert parts[~kept].tolist() == [[-torch.inf, 0.0, 0.0, -torch.inf]]
    merged = merge_parts(parts[None], rows.target, LogitOptions(row_temperature=1.0 / rows.inv_temperature), True)
    for name, out, g, t in zip(("logprob", "entropy", "lse"), merged, gold, twin, strict=False):
        assert_close(out[kept], g, t, name)
    elsewhere = Rows(
        rows.logits, torch.where(kept, -1, rows.target), rows.bias, rows.inv_temperature, softcap=rows.softcap
    )
    parts = kernels.parts_rows(elsewhere)
    assert (parts[:, 3] == -torch.inf).all()
    lse = parts[kept, 0] * rows.inv_temperature[kept] + parts[kept, 1].log()
    assert_close(lse, gold[2], twin[2], "lse of the shard")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_gradient(kernels: HostKernels, vocab: int, options: dict[str, float], dtype: torch.dtype) -> None:
    rows = make_rows(vocab, **options)
    upstream = random_upstream(len(rows.target))
    gold = reference(rows, upstream, torch.float64)[3]
    twin = reference(rows, upstream, torch.float32)[3].to(dtype).float()
    for gap in (0, 3):
        out = gradient(kernels, rows, upstream, dtype, gap=gap)
        assert_close(out, gold, twin, f"d_logits with rows {vocab + gap} apart")
        assert torch.equal(out[4], torch.zeros(vocab)), "an ignored row, full of NaN, has no gradient"


def test_the_scale_changes_no_bit(kernels: HostKernels) -> None:
    rows, upstream = make_rows(1000), random_upstream(5)
    plain = gradient(kernels, rows, upstream, torch.float32)
    assert torch.equal(gradient(kernels, rows, upstream, torch.float32, scale=2.0**-20), plain)


def test_the_scale_keeps_small_gradients_out_of_zero(kernels: HostKernels) -> None:
    rows, upstream = plain_rows(0.5 * torch.randn(1, 1000), torch.zeros(1).long()), [torch.full((1,), 2.0**-20), None]
    upstream += [torch.zeros(1)]
    assert (gradient(kernels, rows, upstream, torch.float16) != 0).sum() == 1, "all but the target's are below fp16"
    assert (gradient(kernels, rows, upstream, torch.float16, scale=2.0**-20) != 0).all()


def test_a_row_does_not_feel_the_others_or_its_place(kernels: HostKernels) -> None:
    rows = make_rows(1000)
    alone = Rows(rows.logits[3:4], rows.target[3:4], None, rows.inv_temperature[3:4])
    for whole, one in zip(kernels.logprob_rows(rows), kernels.logprob_rows(alone), strict=True):
        assert torch.equal(whole[3], one[0])


def test_logits_with_a_large_common_offset(kernels: HostKernels) -> None:
    logits = 1e8 + 8 * torch.randint(-3, 1, (4, 1000)).float()
    rows = plain_rows(logits, torch.randint(0, 1000, (4,)))
    upstream = random_upstream(4)
    gold, twin = reference(rows, upstream, torch.float64), reference(rows, upstream, torch.float32)
    logprob, entropy, lse, _ = kernels.logprob_rows(rows)
    # the twin's rounding of lse to 8 is no standard for logprob and entropy: both are right to 1e-5
    assert torch.allclose(logprob.double(), gold[0], atol=1e-5, rtol=1e-6)
    assert torch.allclose(entropy.double(), gold[1], atol=1e-5, rtol=1e-6)
    assert_close(lse, gold[2], twin[2], "lse")
    assert torch.allclose(gradient(kernels, rows, upstream, torch.float32).double(), gold[3], atol=1e-6)


def test_words_with_minus_infinity_count_for_nothing(kernels: HostKernels) -> None:
    rows = make_rows(1000)
    rows.logits[:, 1::3] = -torch.inf
    target = torch.randint(0, 300, (5,)) * 3
    rows = Rows(rows.logits, target.where(rows.target != -100, rows.target), None, rows.inv_temperature)
    upstream = random_upstream(5)
    # p is 0 there too, and torch's autograd makes no NaN of it
    finite = Rows(rows.logits.clamp(min=-1e4), rows.target, None, rows.inv_temperature)
    gold, twin = reference(finite, upstream, torch.float64), reference(finite, upstream, torch.float32)
    kept = rows.target != -100
    for out, g, t in zip(kernels.logprob_rows(rows)[:3], gold[:3], twin[:3], strict=True):
        assert_close(out[kept], g, t, "statistics")
    assert_close(gradient(kernels, rows, upstream, torch.float32), gold[3], twin[3], "d_logits")


def test_a_target_of_probability_0_has_the_gradient_of_its_logit(kernels: HostKernels) -> None:
    rows = plain_rows(torch.tensor([[0.0, 1.0, -torch.inf]]), torch.tensor([2]))
    logprob, entropy, _, _ = kernels.logprob_rows(rows)
    assert logprob[0] == -torch.inf and entropy[0].isfinite()
    out = gradient(kernels, rows, [torch.ones(1), torch.zeros(1), torch.zeros(1)], torch.float32)
    assert out[0, 2] == 1.0 and torch.allclose(out[0, :2], -torch.tensor([0.0, 1.0]).softmax(0))


def test_certain_targets_keep_their_digits(kernels: HostKernels) -> None:
    """log p = −log(1 + rest): 10⁻⁸ comes out as 10⁻⁸, never as 0, and so does its gradient."""
    rows = make_rows(1000)
    rows.target[:4] = torch.tensor([0, 500, 999, 3])
    rows.logits[torch.arange(4), rows.target[:4]] = torch.tensor([16.0, 20.0, 24.0, 28.0])
    d_logprob, zeros = torch.randn(5), torch.zeros(5)
    logprob, *_, d_logits = reference(rows, [d_logprob, zeros, zeros], torch.float64)
    torch.testing.assert_close(kernels.logprob_rows(rows)[0][:4].double(), logprob, rtol=1e-5, atol=0.0)
    out = gradient(kernels, rows, [d_logprob, None, zeros], torch.float32)
    torch.testing.assert_close(out.double(), d_logits, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("where", [0, 500, 999])
def test_nan_stays_in_its_row(kernels: HostKernels, where: int) -> None:
    rows = make_rows(1000)
    rows.logits[1, where] = float("nan")
    out = gradient(kernels, rows, random_upstream(5), torch.float32)
    assert out[1].isnan().all() and out.isnan().any(1).tolist() == [row == 1 for row in range(5)]
    for statistic in kernels.logprob_rows(rows)[:3]:
        assert statistic.isnan().tolist() == [row == 1 for row in range(5)]


@pytest.mark.parametrize("label", [-1, 1000, 2**32, -(2**40)])
def test_a_label_out_of_range_makes_its_row_nan(kernels: HostKernels, label: int) -> None:
    rows = make_rows(1000)
    rows.target[2] = label
    for statistic in kernels.logprob_rows(rows)[:3]:
        assert statistic.isnan().tolist() == [row == 2 for row in range(5)]
    assert gradient(kernels, rows, random_upstream(5), torch.float32)[2].isnan().all()


def test_a_row_of_minus_infinity_has_no_distribution(kernels: HostKernels) -> None:
    rows = plain_rows(torch.full((1, 9), -torch.inf), torch.zeros(1, dtype=torch.int64))
    logprob, entropy, lse, _ = kernels.logprob_rows(rows)
    assert logprob.isnan().all() and entropy.isnan().all() and lse.item() == -torch.inf


def test_no_rows(kernels: HostKernels) -> None:
    rows = plain_rows(torch.empty(0, 10), torch.empty(0, dtype=torch.int64))
    assert [out.shape[0] for out in kernels.logprob_rows(rows)] == [0, 0, 0, 0]


MUTANTS = {
    "the rescale is lost": ("if (max > sums.max) sums = about(sums, max, slope);", "sums.max = max;"),
    "half the lanes are not merged": ("lane_mask = kWaveSize / 2", "lane_mask = kWaveSize / 4"),
    "only the first wave is merged": ("if (thread < kWaves)", "if (thread < 1)"),
    "head and tail are skipped": ("if (thread < split.num_edges) {", "if (false) {"),
    "the last step is skipped": ("first < split.num_vectors; first", "first + kThreads < split.num_vectors; first"),
    "the target moves by one": ("if (column == target)", "if (column + 1 == target)"),
    "the entropy's gradient is lost": ("on_surprise * surprise", "0.0f * surprise"),
    "the slope is lost": ("surprise) * logit.slope;", "surprise);"),
    "16-bit halves swap": ("low | high << 32", "high | low << 32"),
    "the target is summed twice": ("column + j != target;", "true;"),
    "a shard's target is lost": ("part.at[3] = ", "part.at[2] = "),
    "1 − p is rounded": ("log1pf(rest.exp / of_target)", "logf(1.0f + rest.exp / of_target)"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_tests_bite(mutant: str, tmp_path: Path) -> None:
    mutated = load(64, tmp_path, with_fault(*MUTANTS[mutant], tmp_path))
    with pytest.raises(AssertionError):
        statistics_and_gradients(mutated)


def statistics_and_gradients(kernels: HostKernels) -> None:
    for vocab in (7, 1000, 8193):
        test_statistics(kernels, vocab, {"temperature": 0.7})
        test_gradient(kernels, vocab, {"temperature": 0.7}, torch.bfloat16)
        test_parts_of_a_shard(kernels, vocab, {"temperature": 0.7})
    test_gradient(kernels, 7, {"bias": True, "softcap": 5.0}, torch.float32)
    test_certain_targets_keep_their_digits(kernels)
