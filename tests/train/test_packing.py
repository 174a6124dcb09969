"""Sequences back to back give what each gives alone, token by token: hidden states, losses, gradients."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusedce.train import packing as packing_module
from fusedce.train.data import END
from fusedce.train.mesh import alone
from fusedce.train.model import LM
from fusedce.train.packing import Packing, packed_attention
from fusedce.train.sft import IGNORED, SftTrainer
from fusedce.train.weights import init_weights
from tests.train.conftest import TINY

LENGTHS = ((5, 1, 7, 3), (16,), (1, 1, 14))  # of the sequences in each row of 16


def packed(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Packing:
    begins = torch.zeros(len(lengths), sum(lengths[0]), dtype=torch.bool)
    for row, each in enumerate(lengths):
        begins[row, torch.tensor((0, *each[:-1])).cumsum(0)] = True
    return Packing.of(begins)


def test_where_sequences_begin() -> None:
    packing = packed()
    assert packing.positions.tolist() == [[i for n in row for i in range(n)] for row in LENGTHS]
    assert packing.offsets.tolist() == [0, 5, 6, 13, 16, 32, 33, 34, 48]
    assert packing.offsets.dtype == torch.int32 and packing.longest == 16
    sees = packing.mask[0, 0]
    assert sees[12].nonzero().flatten().tolist() == list(range(6, 13)) and sees[6].sum() == 1
    assert packing.mask[1, 0].equal(torch.ones(16, 16, dtype=torch.bool).tril())
    # a row's first token begins a sequence whatever is said, and no rows are no sequence
    assert Packing.of(torch.zeros(2, 3, dtype=torch.bool)).offsets.tolist() == [0, 3, 6]
    assert Packing.of(torch.zeros(0, 3, dtype=torch.bool)).offsets.tolist() == [0]


@pytest.mark.parametrize("recompute", [0.0, 1.0])
@pytest.mark.parametrize("learned", [0, 16])
def test_packed_equals_unpacked(recompute: float, learned: int) -> None:
    config = replace(TINY, vocab_size=19, learned_positions=learned, recompute=recompute)
    model = init_weights(LM(config), 1)
    ids = torch.randint(19, (3, 16))
    upstream = torch.randn(3, 16, 16)
    grads, results = [], []
    for way in ("packed", "alone", "blind"):
        if way == "packed":
            hidden = model(ids, packing=packed())
        elif way == "alone":
            parts = [[model(one[None]) for one in row.split(n)] for row, n in zip(ids, map(list, LENGTHS), strict=True)]
            hidden = torch.stack([torch.cat(row, 1)[0] for row in parts])
        else:
            hidden = model(ids)
        results.append(hidden.detach())
        grads.append(torch.autograd.grad((hidden * upstream).sum(), list(model.parameters()), allow_unused=True))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    for a, b in zip(grads[0][:-1], grads[1][:-1], strict=True):  # the head takes no part
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert (results[0] - results[2]).abs()[0, 6:].amax() > 1e-2, "a model that looks across would not be noticed"


def test_varlen_is_given_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel for a GPU, by a stand-in with its arguments that takes each sequence by itself."""

    def stand_in(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **kw: object
    ) -> Tensor:
        assert kw == {"window_size": (-1, 0), "enable_gqa": True} and cu_q.dtype == torch.int32
        assert cu_q.equal(cu_k) and max_q == max_k == int(cu_q.diff().max())
        parts = [[t[a:b].transpose(0, 1) for t in (q, k, v)] for a, b in itertools.pairwise(cu_q)]
        return torch.cat(
            [F.scaled_dot_product_attention(*p, is_causal=True, enable_gqa=True).transpose(0, 1) for p in parts]
        )

    query, key, value = torch.randn(3, 4, 16, 8), *torch.randn(2, 3, 2, 16, 8)
    masked = packed_attention(query, key, value, packed())
    monkeypatch.setattr(packing_module, "varlen", lambda _: stand_in)
    torch.testing.assert_close(packed_attention(query, key, value, packed()), masked)


def test_torch_has_attention_over_offsets() -> None:
    assert packing_module._torch_varlen() is not None, "this torch has it, by the arguments that we pass"
    assert packing_module.varlen(torch.zeros(1)) is None


def test_sft_asks_no_file_for_the_next_ones_first_token(sft, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The loss of a batch is that of its files, each alone, without a target past its end."""
    trainer = SftTrainer(replace(sft, model=replace(sft.model, vocab_size=257)), tmp_path, alone(torch.device("cpu")))
    ids, target = trainer.training.batch(0)
    ids[:, 9], target[:, 8] = END, END
    total, count = torch.zeros(()), 0
    for row, after in zip(ids, target, strict=True):
        cuts = [0, *(row == END).nonzero().flatten().tolist(), len(row)]
        for a, b in itertools.pairwise(cuts):
            if b > a:
                goal = torch.where(after[a:b] == END, IGNORED, after[a:b])
                total = total + trainer.model.head.cross_entropy(trainer.model(row[None, a:b]), goal[None])
                count += int((goal != IGNORED).sum())
    assert count <= ids.numel() - len(ids)
    torch.testing.assert_close(sum(trainer.losses(ids, target)), total / count, rtol=1e-5, atol=1e-6)
