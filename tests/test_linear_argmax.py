"""linear_argmax: the greedy word of each token, its ties, its rows that take no part and its bad inputs."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import fusedce
from tests.conftest import Place
from tests.linear_ce_cases import IGNORE, Case

NATIVE = True

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(1, 1, 1), (3, 2, 1), (7, 127, 17), (65, 64, 32), (130, 513, 33), (64, 2050, 40)]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_other_word_is_larger(shape: tuple[int, int, int], has_bias: bool, dtype: torch.dtype, place: Place) -> None:
    """In fp64 no logit passes the chosen one's by more than the rounding of an fp32 sum of D products."""
    hidden, weight, _, bias = Case(*shape, dtype=dtype, has_bias=has_bias).inputs(place.device)
    words = fusedce.linear_argmax(hidden, weight, bias=bias, backend=place.backend)
    assert words.dtype == torch.int64 and words.shape == shape[:1]
    logits = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    chosen = logits.gather(1, words[:, None])[:, 0]
    assert (logits.amax(1) - chosen <= 1e-6 * logits.abs().amax(1)).all()
    # so loose a bar is near exact: almost every word is fp64's own
    assert (words == logits.argmax(1)).float().mean() >= 0.98
    if shape[1] > 100:
        assert words.unique().numel() > 5


def test_the_lowest_of_equal_words(place: Place) -> None:
    """Small whole numbers, exact in every dtype: the first of many equal logits, over tiles and within one."""
    generator = torch.Generator().manual_seed(1)
    for dtype in (FP32, BF16):
        hidden = torch.randint(-2, 3, (40, 4), generator=generator).to(place.device, dtype)
        weight = torch.randint(-2, 3, (700, 4), generator=generator).to(place.device, dtype)
        logits = hidden.double() @ weight.double().t()
        first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
        assert ((logits == logits.amax(1, keepdim=True)).sum(1) > 1).float().mean() > 0.5
        assert torch.equal(fusedce.linear_argmax(hidden, weight, backend=place.backend), first)
        # the same word at both ends of the vocabulary
        both = torch.cat((weight[300:301] * 0 + 9 * hidden[0], weight, weight[300:301] * 0 + 9 * hidden[0]))
        assert fusedce.linear_argmax(hidden[:1], both, backend=place.backend).item() == 0
        assert fusedce.linear_argmax(hidden[:1], both[1:], backend=place.backend).item() == 700


def test_logits_that_bf16_cannot_tell_apart(place: Place) -> None:
    """256 and 256.5 are one number in bf16; compared in fp32 the second is larger."""
    hidden = torch.tensor([[16.0, 0.5]], dtype=BF16, device=place.device)
    weight = torch.tensor([[16.0, 0.0], [16.0, 1.0], [15.0, 1.0]], dtype=BF16, device=place.device)
    assert fusedce.linear_argmax(hidden, weight, backend=place.backend).item() == 1


def test_nan_and_infinities(place: Place) -> None:
    """−1 for a row with NaN or +inf, wherever it comes from; −inf comes after every number; all −inf is word 0."""
    hidden, weight, _, _ = Case(6, 300, 8).inputs(place.device)
    expected = fusedce.linear_argmax(hidden, weight, backend=place.backend)
    hidden[2, 3] = math.nan
    words = fusedce.linear_argmax(hidden, weight, backend=place.backend)
    assert words.tolist() == [-1 if row == 2 else w for row, w in enumerate(expected.tolist())]
    bias = torch.zeros(300, device=place.device)
    bias[7] = math.nan
    assert (fusedce.linear_argmax(hidden, weight, bias=bias, backend=place.backend) == -1).all()
    bias[:] = -math.inf
    hidden[2, 3] = 0.0
    assert not fusedce.linear_argmax(hidden, weight, bias=bias, backend=place.backend).any()
    bias[299] = -1e30
    assert (fusedce.linear_argmax(hidden, weight, bias=bias, backend=place.backend) == 299).all()
    bias[130] = math.inf
    assert (fusedce.linear_argmax(hidden, weight, bias=bias, backend=place.backend) == -1).all()


def test_padding_ignored_rows_and_leading_dimensions(place: Place) -> None:
    hidden, weight, target, _ = Case(24, 90, 8).inputs(place.device)
    weight[77:] = 100 * hidden.sign().sum(0)
    plain = (hidden @ weight[:77].t()).argmax(1)
    options = {"vocab_size": 77, "backend": place.backend}
    assert torch.equal(fusedce.linear_argmax(hidden, weight, **options), plain)
    weight[77:] = math.nan
    hidden[0] = math.nan
    assert target[0] == target[5] == IGNORE
    words = fusedce.linear_argmax(
        hidden.reshape(2, 3, 4, 8), weight, target=target.reshape(2, 3, 4), ignore_index=IGNORE, **options
    )
    assert torch.equal(words, torch.where(target == IGNORE, -1, plain).reshape(2, 3, 4))
    assert fusedce.linear_argmax(hidden[0], weight, target=target[0], **options).item() == -1
    assert fusedce.linear_argmax(hidden[:0], weight, backend=place.backend).shape == (0,)


def test_what_lies_past_the_vocabulary_is_no_word(place: Place) -> None:
    """A tile is wider than 33 words: there nothing has a bias, and every word's is far below 0."""
    hidden, weight, _, _ = Case(40, 33, 8).inputs(place.device)
    bias = torch.full((33,), -50.0, device=place.device)
    for cut in (33, 32, 5):
        words = fusedce.linear_argmax(hidden, weight, bias=bias, vocab_size=cut, backend=place.backend)
        assert torch.equal(words, (hidden @ weight[:cut].t()).argmax(1))


def test_rows_in_several_launches(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than one launch's partial results hold."""
    monkeypatch.setenv("FUSEDCE_WORKSPACE_MB", "1")
    hidden, weight, _, _ = Case(300, 600, 2).inputs(place.device)
    monkeypatch.setattr("fusedce.triton.linear_ce.argmax.PARTIAL_BYTES", 1, raising=False)
    logits = hidden @ weight.t()
    words = fusedce.linear_argmax(hidden, weight, backend=place.backend)
    assert (logits.gather(1, words[:, None])[:, 0] >= logits.amax(1) - 1e-6).all()


def test_no_gradient_goes_through_the_words(place: Place) -> None:
    """Hidden states and a weight that want one are those of a model in training: they get none, whatever the backend
    makes the logits with."""
    hidden, weight, _, bias = Case(7, 40, 8, has_bias=True).inputs(place.device)
    expected = fusedce.linear_argmax(hidden, weight, bias=bias, backend=place.backend)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    words = fusedce.linear_argmax(leaves[0], leaves[1], bias=leaves[2], backend=place.backend)
    assert torch.equal(words, expected) and not words.requires_grad


@pytest.mark.parametrize("shape", [(5, 9, 4), (0, 3, 2), (1, 1, 1)], ids=str)
def test_opcheck_linear_argmax(shape: tuple[int, int, int], place: Place) -> None:
    hidden, weight, _, bias = Case(*shape, has_bias=True).inputs(place.device)
    for arguments in ((hidden.requires_grad_(), weight, bias), (hidden.detach().t().contiguous().t(), weight)):
        opcheck(torch.ops.fusedce.linear_argmax.default, arguments, {"backend": place.backend})


def test_compiled_meta_and_under_autocast(place: Place) -> None:
    hidden, weight, target, _ = Case(9, 40, 8).inputs(place.device)
    compiled = torch.compile(fusedce.linear_argmax, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 9):
        expected = fusedce.linear_argmax(hidden[:rows], weight, target=target[:rows], backend=place.backend)
        assert torch.equal(compiled(hidden[:rows], weight, target=target[:rows], backend=place.backend), expected)
    assert not expected.requires_grad
    with torch.autocast(place.device, BF16):
        mixed = fusedce.linear_argmax(hidden, weight, backend=place.backend)
    assert torch.equal(mixed, fusedce.linear_argmax(hidden.bfloat16(), weight.bfloat16(), backend=place.backend))
    assert fusedce.linear_argmax(hidden.to("meta"), weight.to("meta")).shape == (9,)


H, W = torch.randn(6, 4), torch.randn(9, 4)
BAD = {
    "another D": (ValueError, r"'weight' has shape \(9, 5\)", dict(weight=torch.randn(9, 5))),
    "no vocabulary": (ValueError, "V is 0", dict(weight=torch.randn(0, 4))),
    "no depth": (ValueError, "D is 0", dict(hidden=torch.randn(6, 0), weight=torch.randn(9, 0))),
    "0-d hidden": (ValueError, "'hidden'", dict(hidden=torch.tensor(1.0))),
    "long target": (ValueError, r"'target' has shape \(7,\)", dict(target=torch.arange(7))),
    "float target": (TypeError, "'target'.*expected int64", dict(target=torch.ones(6))),
    "short bias": (ValueError, r"'bias' has shape \(8,\)", dict(bias=torch.randn(8))),
    "integers": (TypeError, "int64; expected float32", dict(hidden=H.long())),
    "other device": (ValueError, "on meta", dict(weight=W.to("meta"))),
    "ignore_index": (TypeError, "ignore_index", dict(ignore_index=True)),
    "vocab_size": (ValueError, "'vocab_size' is 10", dict(vocab_size=10)),
    "CPU tensors for a GPU": (RuntimeError, "the native kernels need a GPU", dict(backend="native")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_the_next_call_works(name: str) -> None:
    error, message, change = BAD[name]
    with pytest.raises(error, match=message):
        fusedce.linear_argmax(**{"hidden": H, "weight": W, **change})
    assert torch.equal(fusedce.linear_argmax(H, W), (H @ W.t()).argmax(1))


@pytest.mark.parametrize("change", [dict(weight=torch.randn(9, 5)), dict(weight=W.bfloat16()), dict(bias=W[:3, 0])])
def test_a_direct_call_of_the_op_reads_nothing_out_of_bounds(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        torch.ops.fusedce.linear_argmax(**{"hidden": H, "weight": W, **change})
