"""TRL's SFTTrainer with the fused head, on a small random model, data and tokenizer made here: a CPU, under a minute.

    python examples/trl_sft.py

TRL's trainer computes its loss from log-probs of its own. `FusedSFTTrainer` takes the model's loss instead, as
transformers' Trainer does, and that one is fusedce's: no logits, and the same normalisation by `num_items_in_batch`
under gradient accumulation. TRL's two metrics made from its log-probs, entropy and token accuracy, are not logged.
"""

import tempfile
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
from trl import SFTConfig, SFTTrainer

from fusedce.integrations.transformers import fuse_lm_head

WORDS = "the cat dog sees hears a red green bird tree and".split()


class FusedSFTTrainer(SFTTrainer):
    """SFTTrainer with the loss of the model, which `fuse_lm_head` computes without logits."""

    def compute_loss(
        self, model: Any, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of one batch."""
        return Trainer.compute_loss(self, model, {**inputs, "use_cache": False}, return_outputs, num_items_in_batch)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def main() -> list[float]:
    """Train for 30 steps and return the logged losses."""
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
    texts = [
        f"the {who} {does} a {what} and the tree" for who in WORDS[1:3] for does in WORDS[3:5] for what in WORDS[6:]
    ]
    with tempfile.TemporaryDirectory() as folder, fuse_lm_head(model):
        trainer = FusedSFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                max_steps=30,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                logging_steps=5,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print("losses:", *(f"{loss:.3f}" for loss in losses))
