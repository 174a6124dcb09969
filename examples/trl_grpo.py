"""TRL's GRPOTrainer with the fused head, on a small random model, data and tokenizer made here: a CPU, under a minute.

    python examples/trl_grpo.py

TRL asks `_get_per_token_logps_and_entropies` for all that it needs of the policy. `FusedGRPOTrainer` answers with
`token_logprobs`, which goes through the model's own forward and whatever wraps it (DDP, PEFT, autocast), with the
scaling and capping of its logits, in fp32 from the GEMM on, and without logits.
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from fusedce.integrations.transformers import fuse_lm_head, token_logprobs

WORDS = "red green blue one two three".split()


class FusedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer over a model fused by `fuse_lm_head`."""

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if any(value is not None for value in images.values()):
            raise NotImplementedError("FusedGRPOTrainer is for text")
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :-logits_to_keep] = -100
        router = dict(output_router_logits=True) if compute_aux_loss else {}
        size = batch_size or len(input_ids)
        results = []
        for tokens, mask, wanted in zip(*(x.split(size) for x in (input_ids, attention_mask, labels)), strict=True):
            with self.accelerator.autocast():
                results.append(
                    token_logprobs(
                        model,
                        input_ids=tokens,
                        attention_mask=mask,
                        labels=wanted,
                        temperature=self.temperature,
                        use_cache=False,
                        **router,
                    )
                )
        # position t holds the results of token t + 1
        completion = slice(-logits_to_keep - 1, -1)
        logprob = torch.cat([result.logprob[:, completion] for result in results])
        entropy = torch.cat([result.entropy[:, completion] for result in results]) if compute_entropy else None
        aux_loss = torch.stack([r.output.aux_loss for r in results]).mean() if compute_aux_loss else None
        return logprob, entropy, aux_loss


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def share_of_green(completions: list[str], **kwargs: Any) -> list[float]:
    """The reward: how much of the answer is the word "green"."""
    return [text.split().count("green") / max(len(text.split()), 1) for text in completions]


def build_trainer(folder: str) -> FusedGRPOTrainer:
    """A trainer of 30 steps over a small random Llama, fused before TRL adds its own head."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    fuse_lm_head(model)
    return FusedGRPOTrainer(
        model=model,
        reward_funcs=share_of_green,
        args=GRPOConfig(
            output_dir=folder,
            max_steps=30,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=6,
            learning_rate=1e-2,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{a} {b}" for a in WORDS for b in WORDS]}),
        processing_class=tokenizer,
    )


def main() -> list[float]:
    """Train and return the logged mean rewards."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(folder)
        trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    print("rewards:", *(f"{reward:.3f}" for reward in main()))
