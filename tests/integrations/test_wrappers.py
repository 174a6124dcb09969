"""fuse_lm_head under what people put around a model: PEFT, DDP, FSDP2, transformers' Trainer."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from fusedce.integrations.transformers import fuse_lm_head, token_logprobs
from fusedce.nn.lm_head import FusedLMHead
from tests.integrations.tiny import assert_same, batch, loss_and_gradients, tiny


class Whole(nn.Module):
    """A body and a head in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), FusedLMHead(8, 29, bias=True)

    def forward(self, hidden: Tensor, target: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.head(self.body(hidden), target, shift=True))


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("before", [True, False], ids=["fused-then-lora", "lora-then-fused"])
def test_lora_on_the_layers(before: bool) -> None:
    model, inputs = tiny("gemma2"), batch()
    lora = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    handle = fuse_lm_head(model) if before else None
    wrapped = get_peft_model(model, lora)
    handle = handle or fuse_lm_head(wrapped)
    assert wrapped(**inputs).logits is None
    out, out_logprobs = loss_and_gradients(wrapped, **inputs), token_logprobs(wrapped, **inputs).logprob
    handle.undo()
    expected = loss_and_gradients(wrapped, **inputs)
    assert len(expected) > 5 and "lm_head" not in "".join(expected)
    assert_same(out, expected)
    assert torch.allclose(-out_logprobs.sum() / (out_logprobs != 0).sum(), expected["loss"])


@pytest.mark.parametrize("where", [dict(target_modules=["lm_head"]), dict(modules_to_save=["lm_head"])], ids=str)
def test_peft_on_the_head_is_refused(where: dict[str, list[str]]) -> None:
    model = tiny("llama")
    handle = fuse_lm_head(model)
    wrapped = get_peft_model(model, LoraConfig(**{"target_modules": ["q_proj"], **where}, task_type="CAUSAL_LM"))
    with pytest.raises(TypeError, match="the head of LlamaForCausalLM is a"):
        wrapped(**batch())
    with pytest.raises(TypeError, match="the head of LlamaForCausalLM is a"):
        fuse_lm_head(wrapped)
    handle.undo()
    assert wrapped(**batch()).logits is not None


def test_ddp(one_process: None) -> None:
    model, inputs = tiny("qwen3-tied"), batch()
    expected = loss_and_gradients(model, **inputs)
    with fuse_lm_head(model):
        wrapped = DistributedDataParallel(model)
        out = loss_and_gradients(wrapped, **inputs)
        logprob = token_logprobs(wrapped, **inputs).logprob
        with pytest.raises(TypeError, match="before DDP"):
            fuse_lm_head(wrapped)
    assert_same({name.removeprefix("module."): value for name, value in out.items()}, expected)
    assert torch.allclose(-logprob.sum() / (logprob != 0).sum(), expected["loss"])


def shard(model: nn.Module, head: str) -> None:
    """FSDP2 over the layers, the head as `head` says, and the root."""
    for layer in model.model.layers:
        fully_shard(layer)
    if head == "with-norm":
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    elif head != "in-root":
        fully_shard(model.lm_head, reshard_after_forward=head == "resharded")
    fully_shard(model, reshard_after_forward=True)


@pytest.mark.parametrize(
    "family, head",
    [("llama", "in-root"), ("qwen3-tied", "in-root"), ("gemma2", "in-root")]
    + [("llama", head) for head in ("with-norm", "kept", "resharded")],
)
def test_fsdp2(family: str, head: str, one_process: None) -> None:
    """However the head is grouped: two steps, loss, log-probs and the gradients of both."""
    model, inputs = tiny(family), batch()
    stock = copy.deepcopy(model)
    shard(model, head)
    for scale in (1.0, 0.5):
        inputs["input_ids"] = inputs["input_ids"].flip(0)
        expected = loss_and_gradients(stock, **inputs)
        with fuse_lm_head(model):
            out = loss_and_gradients(model, **inputs)
            assert_same(gathered(out), expected)
            model.zero_grad()
            logprob = token_logprobs(model, **inputs).logprob
            (-scale * logprob.sum() / (logprob != 0).sum()).backward()
        gradients = gathered({name: p.grad for name, p in model.named_parameters()})
        assert_same(gradients, {name: scale * expected[name] for name in gradients}, rtol=2e-5)


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def test_fused_head_is_an_fsdp2_group(one_process: None) -> None:
    """A FusedLMHead is called as a module, so FSDP2 gathers its weight and reduces its gradient."""
    model, inputs = Whole(), dict(hidden=torch.randn(2, 5, 8), target=torch.randint(0, 29, (2, 5)))
    expected = loss_and_gradients(copy.deepcopy(model), **inputs)
    for part in (model.body, model.head, model):
        fully_shard(part)
    out = loss_and_gradients(model, **inputs)
    assert_same(gathered(out), expected)


def test_trainer_with_gradient_accumulation(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The same losses and weights, step by step, with micro-batches of different token counts; and evaluation."""
    rows = [{k: v[0] for k, v in batch(2).items()} for _ in range(12)]
    for row, length in zip(rows, range(12), strict=True):
        row["labels"][: length // 2] = -100
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, learning_rate=1e-3, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip

    def train(model):  # type: ignore[no-untyped-def]
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*losses, trainer.evaluate()["eval_loss"]], dict(model.named_parameters())

    stock = tiny("gemma2")
    fused = copy.deepcopy(stock)
    expected, weights = train(stock)
    with fuse_lm_head(fused):
        losses, fused_weights = train(fused)
    assert losses == pytest.approx(expected, rel=1e-4) and len(losses) == 4
    for name, value in weights.items():
        assert torch.allclose(fused_weights[name], value, rtol=1e-4, atol=1e-4), name
