"""More public bug reports as tests of ours (see test_linear_ce_reports.py), and what seeded faults of the kernels
showed to be untested. The ids are those of the reports; "bad input" numbers are those of the list of bad inputs."""

import ast
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.library import opcheck

import fusedce
from fusedce import flags
from fusedce.nn.lm_head import FusedLMHead
from fusedce.ops import registry
from tests.conftest import Place
from tests.house.source import paths, read
from tests.linear_ce_cases import IGNORE, Case, with_gradients
from tests.paired import assert_close
from tests.test_linear_ce_loss import Loss, check

NATIVE = True

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def ce(place: Place, hidden: Tensor, weight: Tensor, target: Tensor, **options: object) -> Tensor:
    return fusedce.linear_cross_entropy(hidden, weight, target, backend=place.backend, **options)


# ── several ranks, devices and wrapped tensors ──────────────────────────────────────────────────────────────────────
@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("argument", ["input", "linear_weight", "linear_bias"])
def test_ml_cross_entropy_31_no_kernel_sees_a_dtensor(argument: str, placement: object, one_process: None) -> None:
    """LC-A10, LC-A11: a sharded weight reached the kernel as a local pointer with the global vocabulary."""
    hidden, weight, target, bias = Case(6, 16, 4, has_bias=True).inputs("cpu")
    given = {"input": hidden, "linear_weight": weight, "linear_bias": bias}
    whole = fusedce.linear_cross_entropy(target=target, **given)
    given[argument] = DTensor.from_local(given[argument], init_device_mesh("cpu", (1,)), [placement])
    with pytest.raises(TypeError, match=rf"'{argument}' is a DTensor placed \(({type(placement).__name__})"):
        fusedce.linear_cross_entropy(target=target, **given)
    given[argument] = given[argument].full_tensor()
    assert torch.equal(fusedce.linear_cross_entropy(target=target, **given), whole)


def test_xtuner_2079_a_rank_without_valid_tokens(place: Place) -> None:
    """LC-A08: a rank whose tokens are all ignored divided 0 by 0. A sum over the global count is finite on every rank,
    adds up to the whole batch's mean, and this rank's gradients are exactly 0."""
    hidden, weight, target, _ = Case(24, 40, 8).inputs(place.device)
    target[12:] = IGNORE
    count = (target != IGNORE).sum()
    whole = with_gradients(lambda h, w: [ce(place, h, w, target)], (hidden, weight), [count.new_ones(()).float()])
    parts = [
        with_gradients(
            lambda h, w, y=target[rows]: [ce(place, h, w, y, reduction="sum") / count],
            (hidden[rows], weight),
            [count.new_ones(()).float()],
        )
        for rows in (slice(0, 12), slice(12, 24))
    ]
    assert not any(t.any() for t in parts[1])
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(parts[0][2] + parts[1][2], whole[2])


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(max(torch.cuda.device_count(), 1)))
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_liger_1303_the_current_device_is_another(index: int, backend: str) -> None:
    """LC-A18: kernels were launched on the current device although the tensors were on another. On every GPU there
    is."""
    place = Place(f"cuda:{index}", backend)
    check(Loss(66, 301, 48, BF16, "mean", bias=True), place)
    hidden, weight, target, _ = Case(6, 9, 4).inputs(place.device)
    with pytest.raises(ValueError, match=f"on cpu, argument 'input' on cuda:{index}"):
        ce(place, hidden, weight.cpu(), target)


def test_liger_1303_every_launch_is_on_its_tensors_device() -> None:
    """LC-A18, bad input 13: seen in the source, where one GPU or none is enough to look."""
    launches, outside = 0, []
    for path in paths():
        if not path.startswith("fusedce/triton/"):
            continue
        nodes = list(ast.walk(ast.parse(read(path))))
        guards = [node for node in nodes if isinstance(node, ast.With) and "device_of" in ast.unparse(node.items[0])]
        calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
        for call in calls:
            if ast.unparse(call.func.value).upper().endswith("KERNEL"):
                launches += 1
                if not any(node.lineno <= call.lineno <= node.end_lineno for node in guards):
                    outside.append(f"{path}:{call.lineno}")
    assert launches > 10 and not outside


def test_ml_cross_entropy_41_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """LC-A20, bad input 29: what "needs no Triton" needed it. Missing, it is named where it is asked for and nowhere
    else."""
    find_spec = registry.importlib.util.find_spec
    monkeypatch.setattr(
        registry.importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name)
    )
    registry._triton_missing.cache_clear()
    try:
        hidden, weight, target, _ = Case(6, 9, 4).inputs("cpu")
        with pytest.raises(
            RuntimeError, match="'triton' was asked for .argument. and cannot run: Triton is not installed"
        ):
            fusedce.linear_cross_entropy(hidden, weight, target, backend="triton")
        assert fusedce.linear_cross_entropy(hidden, weight, target).isfinite()
        assert registry.choose("linear_logprob", "auto", torch.device("cuda"), BF16).backend != "triton"
    finally:
        registry._triton_missing.cache_clear()


# ── labels ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_trl_3346_prompts_have_no_part(place: Place) -> None:
    """LC-A16: the fused path left out the mask of the prompt. Two sequences, their prompts masked in the labels: the
    loss is that of plain logits, and a position that predicts a prompt token, or nothing, has a gradient of 0."""
    hidden, weight, ids, _ = Case(24, 40, 8, every_ignored=0).inputs(place.device)
    hidden, labels = hidden.reshape(2, 12, 8).requires_grad_(), ids.reshape(2, 12).clone()
    labels[0, :5], labels[1, :9] = IGNORE, IGNORE
    loss = ce(place, hidden, weight, labels, shift=True)
    logits = F.linear(hidden, weight)[:, :-1]
    plain = F.cross_entropy(logits.reshape(-1, 40), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(loss, plain)
    (grad,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(grad, torch.autograd.grad(plain, hidden)[0])
    alive = torch.zeros(2, 12, dtype=torch.bool, device=place.device)
    alive[0, 4:11], alive[1, 8:11] = True, True
    assert torch.equal(grad.ne(0).any(2), alive)


def test_liger_113_without_labels() -> None:
    """LC-A17: a forward without labels died of a None. An error that names them, and logits for who wants those."""
    head, hidden = FusedLMHead(8, 29), torch.randn(2, 3, 8)
    for call in (head, head.logprobs, lambda h, y: fusedce.linear_policy_loss(h, head.weight, y, torch.exp)):
        with pytest.raises(TypeError, match="'target' has type NoneType; expected a tensor of int64"):
            call(hidden, None)
    assert torch.equal(head.logits(hidden), F.linear(hidden, head.weight))


@pytest.mark.parametrize("label", [40, -1, 2**31, 2**32 + 3, -(2**32) + 3, -(2**63), 2**63 - 1])
def test_axolotl_3767_nothing_plausible_comes_out(label: int, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """LC-A07, bad inputs 1 and 2: on a GPU the error comes later. Until then the row of a bad label is NaN, in 64 bits
    as in 32, and the other rows are right."""
    monkeypatch.setattr(flags, "report_outside", lambda *_, **__: None)
    hidden, weight, target, _ = Case(20, 40, 8, dtype=BF16, every_ignored=7).inputs(place.device)
    without, target[5] = target.clone(), label
    without[5] = IGNORE
    out = fusedce.linear_logprob(hidden, weight, target, backend=place.backend)
    right = fusedce.linear_logprob(hidden, weight, without, backend=place.backend)
    others = torch.arange(20, device=place.device) != 5
    for o, r in zip(out, right, strict=True):
        assert o[5].isnan() and torch.equal(o[others], r[others])
    hidden.requires_grad_()
    assert ce(place, hidden, weight, target).isnan()
    loss = fusedce.linear_policy_loss(hidden, weight, target, torch.exp, backend=place.backend)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert loss.isnan() and grad[5].isnan().all() and grad[others].isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_ignored_label_may_be_a_word(dtype: torch.dtype, place: Place) -> None:
    """As where the padding token is its own label: bit by bit what another number for "ignored" gives."""
    hidden, weight, target, bias = Case(40, 30, 8, dtype=dtype, has_bias=True, every_ignored=0).inputs(place.device)
    target[::3] = 4
    outside = torch.where(target == 4, IGNORE, target)
    rates = torch.rand(40, device=place.device)

    def run(labels: Tensor, ignored: int) -> list[Tensor]:
        def losses(h: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
            options = {"ignore_index": ignored, "backend": place.backend}
            rows = fusedce.linear_logprob(h, w, labels, bias=b, **options)
            mean = fusedce.linear_cross_entropy(h, w, labels, linear_bias=b, label_smoothing=0.1, z_loss=0.1, **options)
            return [rows.logprob, rows.entropy, rows.lse, mean]

        return with_gradients(losses, (hidden, weight, bias), [rates, rates, rates, rates[0] * 20])

    for inside, expected in zip(run(target, 4), run(outside, IGNORE), strict=True):
        assert torch.equal(inside, expected)
    assert not run(target, 4)[0][::3].any()


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("case", [Loss(5, 5000, 4, FP32, "none"), Loss(5, 5000, 4, BF16, "sum")], ids=str)
def test_more_partial_sums_than_one_sweep_takes(case: Loss, place: Place) -> None:
    """The merge of the vocabulary's blocks goes by 64 of them; 5000 words are 79 of the smallest."""
    check(case, place)


def test_the_largest_logit_comes_last(place: Place) -> None:
    """The running maximum moves from sweep to sweep of the merge, and what was summed before moves with it."""
    hidden = torch.full((2, 1), 8.0, device=place.device)
    weight = torch.linspace(-1, 1, 5000, device=place.device)[:, None].contiguous()
    target = torch.tensor([4999, 17], device=place.device)
    out = fusedce.linear_logprob(hidden, weight, target, backend=place.backend)
    logits = hidden.double() @ weight.double().t()
    log_probs = logits.log_softmax(1)
    torch.testing.assert_close(out.lse.double(), logits.logsumexp(1), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(out.entropy.double(), -(log_probs.exp() * log_probs).sum(1), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(out.logprob.double(), log_probs.gather(1, target[:, None])[:, 0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_two_terms_of_the_loss_cancel_on_every_word_but_the_target(dtype: torch.dtype, place: Place) -> None:
    """One word, lse = −½: −logp pulls by −1, ζ·lse² with ζ = 1 by −1, and the target's own gradient is what is left."""
    hidden = torch.ones(1, 1, dtype=dtype, device=place.device, requires_grad=True)
    weight = torch.full((1, 1), -0.5, dtype=dtype, device=place.device, requires_grad=True)
    loss = ce(place, hidden, weight, torch.zeros(1, dtype=torch.int64, device=place.device), z_loss=1.0)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert [loss.item(), *(g.item() for g in grads)] == [0.25, 0.5, -1.0]


def test_small_gradients_of_fp16_are_not_lost(place: Place) -> None:
    """Upstream gradients of a mean over 10⁵ tokens, times probabilities of 10⁻³: below what fp16 holds, though their
    sum is not."""
    hidden, weight, target, _ = Case(12, 1000, 8, dtype=FP16, every_ignored=0).inputs(place.device)
    hidden, weight = (hidden * 0.1).requires_grad_(), 8 + 2 * weight
    out = fusedce.linear_logprob(hidden, weight, target, backend=place.backend).logprob
    (grad,) = torch.autograd.grad(out, hidden, torch.full_like(out, 1e-5))
    exact = hidden.detach().double().requires_grad_()
    log_probs = (exact @ weight.double().t()).log_softmax(1)
    (gold,) = torch.autograd.grad(1e-5 * log_probs.gather(1, target[:, None]).sum(), exact)
    assert_close(grad, gold, gold.half())


def test_liger_512_three_hundred_steps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LC-A19: training by the fused loss stayed at a loss that the plain one left. Step by step the same, over several
    chunks."""
    monkeypatch.setenv("FUSEDCE_WORKSPACE_MB", "1")
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 600, (320,), generator=generator).to(device)
    following = (ids * 7 + 3) % 600

    def losses(loss_of) -> Tensor:  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(5)
        embed, head = (torch.randn(600, 32, generator=generator).to(device).requires_grad_() for _ in range(2))
        optimizer, steps = torch.optim.SGD((embed, head), lr=8.0, momentum=0.9), []
        for _ in range(300):
            loss = loss_of((embed[ids] * 32**-0.5).to(BF16), head.to(BF16), following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(loss.detach())
        return torch.stack(steps)

    fused = losses(fusedce.linear_cross_entropy)
    plain = losses(lambda h, w, y: F.cross_entropy((h.float() @ w.float().t()), y))
    assert (fused - plain).abs().max() < 1e-2
    assert fused[0] > 5 and fused[-1] < 0.5


# ── torch.library ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_pytorch_182328_fakes_are_true_for_any_strides(rows: int, place: Place) -> None:
    """PK-A09: a fake kernel's strides were not the real ones. Transposed, strided and cut-out operands."""
    hidden = torch.randn(8, rows, device=place.device).t().requires_grad_()
    weight = torch.randn(33, 11, device=place.device)[:, 1:9].requires_grad_()
    bias, target = torch.randn(66, device=place.device)[::2], torch.arange(2 * rows, device=place.device)[::2]
    numbers = torch.ones((), device=place.device).expand(rows)
    options = {"ignore_index": IGNORE, "temperature": 1.0, "softcap": 0.0, "backend": place.backend}
    opcheck(torch.ops.fusedce.linear_logprob.default, (hidden, weight, target, bias), options)
    arguments = (hidden, weight, target, bias, None, numbers, numbers, numbers)
    opcheck(torch.ops.fusedce.linear_ce_sum.default, arguments, {**options, "mask": [True, True, True]})


@pytest.mark.parametrize(("rows", "vocab", "depth"), [(0, 3, 2), (1, 1, 1), (5, 9, 4)])
def test_pytorch_180620_no_result_is_an_argument(rows: int, vocab: int, depth: int, place: Place) -> None:
    """PK-A11: an op returned a view of its input, which custom ops may not."""
    hidden, weight, target, bias = Case(rows, vocab, depth, has_bias=True).inputs(place.device)
    options = {"ignore_index": IGNORE, "temperature": 1.0, "softcap": 0.0, "backend": place.backend}
    numbers = torch.ones(rows, device=place.device)
    arguments = [hidden, weight, target, bias, numbers]
    results = torch.ops.fusedce.linear_ce_sum(
        hidden, weight, target, bias, None, numbers, None, None, mask=[True, True, True], **options
    )
    results += torch.ops.fusedce.linear_ce_sum_backward(numbers.new_ones(()), *results[1:4], place.backend)
    results += torch.ops.fusedce.linear_logprob(hidden, weight, target, bias, **options)
    starts = [t.data_ptr() for t in (*arguments, *results) if t.numel()]
    assert len(set(starts)) == len(starts)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_vllm_xpu_567_the_loss_is_captured(backend: str, dtype: torch.dtype) -> None:
    """PK-A12: a sync in the reference path broke graph capture. The scalar loss and the policy loss wait for nothing,
    and a graph of both replays with new inputs, also where a target has no probability."""
    hidden, weight, target, _ = Case(200, 1000, 64, dtype=dtype).inputs("cuda")
    hidden.requires_grad_(), weight.requires_grad_()

    def step() -> list[Tensor]:
        loss = fusedce.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, z_loss=0.01, backend=backend)
        loss = loss + fusedce.linear_policy_loss(hidden, weight, target, torch.exp, backend=backend)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    torch.use_deterministic_algorithms(False)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for size in (1.0, 1.0, 40.0):
        with torch.no_grad():
            hidden.copy_(size * torch.randn_like(hidden))
        graph.replay()
        assert all(torch.equal(c, e) for c, e in zip(captured, step(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton"])
def test_mamba_1015_strides_past_2_31(backend: str) -> None:
    """PK-A14: products of strides wrapped in 32 bits. Rows 40,000 elements apart: the last lie past 2³¹."""
    base = torch.randn(60_000, 40_000, device="cuda", dtype=BF16)
    hidden, words = base[:, 5:69], base[:, 100:164]
    target = torch.randint(0, 60_000, (60_000,), device="cuda")
    for rows, weight in ((hidden, words[:300]), (hidden[:300], words)):
        labels = target[: rows.shape[0]] % weight.shape[0]
        near, far = (with_gradients(lambda h, w, y=labels: [
            fusedce.linear_cross_entropy(h, w, y, backend=backend),
            *fusedce.linear_logprob(h, w, y, backend=backend)[:1],
        ], given, [torch.ones((), device="cuda"), torch.ones(rows.shape[0], device="cuda")])
            for given in ((rows.contiguous(), weight.contiguous()), (rows, weight)))  # fmt: skip
        assert all(torch.equal(n, f) for n, f in zip(near, far, strict=True))


@pytest.mark.gpu
def test_pytorch_147828_inductor_pads_what_it_makes() -> None:
    """PK-A10: a padded product reached a kernel with the strides of a dense one."""
    project = nn.Linear(24, 47, bias=False).cuda()
    inputs, weight = torch.randn(65, 24, device="cuda"), torch.randn(301, 47, device="cuda")
    target = torch.randint(0, 301, (65,), device="cuda")

    def loss(inputs: Tensor) -> Tensor:
        return fusedce.linear_cross_entropy(project(inputs), weight, target, backend="triton")

    with torch._inductor.config.patch(comprehensive_padding=True, padding_alignment_bytes=512, pad_outputs=True):
        padded = torch.compile(loss, fullgraph=True)(inputs)
    torch.testing.assert_close(padded, loss(inputs))


def test_hidden_of_any_number_of_dimensions(place: Place) -> None:
    """Bad input 7: (D,), (B, S, D) and (A, B, S, D) are rows; results have target's shape."""
    hidden, weight, target, _ = Case(24, 30, 8).inputs(place.device)
    flat = fusedce.linear_logprob(hidden, weight, target, backend=place.backend)
    for sizes in ((24,), (4, 6), (2, 3, 4), (1, 24, 1)):
        out = fusedce.linear_logprob(hidden.reshape(*sizes, 8), weight, target.reshape(sizes), backend=place.backend)
        assert all(o.shape == sizes and torch.equal(o.reshape(-1), f) for o, f in zip(out, flat, strict=True))
    one = fusedce.linear_logprob(hidden[1], weight, target[1], backend=place.backend)
    assert all(o.shape == () for o in one)
    torch.testing.assert_close(one.logprob, flat.logprob[1])
