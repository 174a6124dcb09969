"""Every Python block of the README and the pages runs: with the names that its page speaks of, and, where it is about a
library that is not installed here, with a stand-in for what it takes from that library."""

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedce
from fusedce.distributed import expert_parallel_moe, expert_plan, new_expert_group
from tests.house.source import read
from tests.pages.blocks import Block, blocks

N, D, V, E, K, FFN = 24, 16, 40, 4, 2, 8
# tests/integrations/test_pages.py runs these, with transformers itself.
WITH_TRANSFORMERS = {("README.md", 1), ("docs/integrations.md", 1), ("docs/integrations.md", 2), ("docs/moe.md", 2)}
Names = dict[str, Any]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def head() -> Names:
    target = torch.randint(0, V, (N,))
    return {"torch": torch, "fusedce": fusedce, "hidden": leaf(N, D), "weight": leaf(V, D), "target": target}


def policy() -> Names:
    rows = {name: torch.randn(N) for name in ("old_logprob", "advantage", "token_weight")}
    return head() | rows


def sparse() -> Names:
    return head() | {"policy_loss": lambda logprob: (torch.randn(N) * logprob).sum()}


def layer() -> Names:
    names = {"torch": torch, "fusedce": fusedce, "hidden": leaf(N, D), "logits": leaf(N, E), "num_experts": E}
    names |= {"gate_up_proj": leaf(E, 2 * FFN, D), "down_proj": leaf(E, D, FFN), "top_k": K, "hidden_size": D}
    return names | {"ffn_size": FFN}


def balance() -> Names:
    index = torch.randint(0, E, (N, K))
    return layer() | {"index": index, "attention_mask": torch.ones(N), "B": 2, "lm_loss": torch.tensor(1.0)}


def parallel() -> Names:
    def block(hidden: Tensor) -> Tensor:
        return sys.modules["page"].moe(hidden)

    return layer() | {"checkpoint": checkpoint, "block": block}


def planned() -> Names:
    weights, index = fusedce.moe_route(torch.randn(N, E), K)
    names = layer() | {"top_k_weights": weights, "top_k_index": index, "group": new_expert_group(1)}
    return names | {"expert_plan": expert_plan, "expert_parallel_moe": expert_parallel_moe}


def lm_head() -> Names:
    embedding = nn.Embedding(V, D)
    names = {"hidden_size": D, "vocab_size": V, "embedding": embedding, "hidden": leaf(2, 12, D)}
    return names | {"tokens": torch.randint(0, V, (2, 12))}


def module(name: str, **contents: Any) -> None:
    """A stand-in for a module, and for the packages that it lies in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for end in range(1, len(parts)):
        setattr(sys.modules[".".join(parts[:end])], parts[end], sys.modules[".".join(parts[: end + 1])])
    vars(sys.modules[name]).update(contents)


def trl() -> Names:
    class Trainer:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items: Any = None) -> Any:
            return inputs

    return {"Trainer": Trainer, "SFTTrainer": type("SFTTrainer", (Trainer,), {})}


def verl() -> Names:
    module("verl.utils.kernel.linear_cross_entropy")
    return {}


def torchtitan() -> Names:
    class ChunkedLossWrapper:
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config:
            pass

    module("torchtitan.components.loss", ChunkedLossWrapper=ChunkedLossWrapper)
    module("torchtitan.config", derive=lambda config, to: to(), override=lambda target: lambda function: function)
    return {}


def policy_done(names: Names) -> None:
    names["loss"].backward()
    assert names["hidden"].grad.isfinite().all()


def trl_done(names: Names) -> None:
    given = names["FusedSFTTrainer"]().compute_loss(None, {"labels": 1})
    assert given == {"labels": 1, "use_cache": False}


def verl_done(names: Names) -> None:
    given = head()
    logprob, entropy = names["hook"].linear_cross_entropy(given["hidden"], given["weight"], given["target"])
    assert logprob.shape == entropy.shape == (N,)


def torchtitan_done(names: Names) -> None:
    loss = names["FusedLoss"]()
    loss.lm_head, labels = nn.Linear(D, V, bias=False), torch.randint(0, V, (N,))
    value, _ = loss(torch.randn(N, D), labels, global_valid_tokens=N)
    value.backward()
    assert value.item() > 0 and loss.lm_head.weight.grad.any() and "forward" not in vars(loss.lm_head)
    assert names["fused_loss"](None) is not None


def has(*wanted: str) -> Callable[[Names], None]:
    """A check that these names came out as finite tensors."""

    def check(names: Names) -> None:
        assert all(torch.as_tensor(names[name]).isfinite().all() for name in wanted)

    return check


@dataclasses.dataclass(frozen=True)
class Run:
    """How a block is run. names: what is there before; done: what must be so after; swap: words of the block that this
    machine has not, and what it has."""

    names: Callable[[], Names]
    done: Callable[[Names], None]
    swap: tuple[tuple[str, str], ...] = ()


RUNS = {
    ("README.md", 0): Run(dict, has("loss", "policy", "logprob", "entropy", "lse", "out")),
    ("docs/expert_parallel.md", 0): Run(parallel, has("out"), (("new_expert_group(8)", "new_expert_group(1)"),)),
    ("docs/expert_parallel.md", 1): Run(planned, has("out")),
    ("docs/integrations.md", 0): Run(lm_head, has("loss", "logprob", "entropy", "next_logits")),
    ("docs/integrations.md", 3): Run(trl, trl_done),
    ("docs/integrations.md", 4): Run(verl, verl_done),
    ("docs/integrations.md", 5): Run(torchtitan, torchtitan_done),
    ("docs/linear_ce.md", 0): Run(policy, policy_done),
    ("docs/linear_ce.md", 1): Run(
        sparse, has("skipped", "of", "sparse", "passes"), (('device="cuda"', 'device="cpu"'),)
    ),
    ("docs/moe.md", 0): Run(layer, has("out", "weights")),
    ("docs/moe.md", 1): Run(balance, has("loss")),
    ("docs/plan.md", 0): Run(dict, lambda names: None),
}
BLOCKS = [block for block in blocks("python") if block.key in RUNS]


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put in for a library is gone afterwards."""
    monkeypatch.setattr(sys, "modules", sys.modules.copy())


def test_every_block_is_run() -> None:
    assert {block.key for block in blocks("python")} == set(RUNS) | WITH_TRANSFORMERS
    assert not set(RUNS) & WITH_TRANSFORMERS
    text = read("tests/integrations/test_pages.py")
    assert all(f'("{page}", {number})' in text for page, number in WITH_TRANSFORMERS)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_runs(block: Block, one_process: None, stand_ins: None) -> None:
    names = run(block, RUNS[block.key])
    RUNS[block.key].done(names)


def run(block: Block, how: Run) -> Names:
    """The names after a block. It is given as a module, so that its dataclasses find their own."""
    text = block.text
    for old, new in how.swap:
        assert old in text
        text = text.replace(old, new)
    page = types.ModuleType("page")
    sys.modules["page"] = page
    names = vars(page)
    names.update(how.names())
    code = compile(text, f"{block.page}, block {block.number}", "exec")
    types.FunctionType(code, names)()
    return names
