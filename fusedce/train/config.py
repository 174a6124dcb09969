"""What a run is: frozen dataclasses, one check for all of them, and their JSON form.

Every mistake that can be seen before the first step is a `ConfigError`, one line: the key, its value, what to write.
"""

import dataclasses
import difflib
import math
import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from fusedce import env
from fusedce.options import SAVES
from fusedce.train import ranks
from fusedce.train.losses import Normalize, PolicyOptions, Variant

MAX_CHUNKS = 64  # of the exchange between experts' ranks


@ranks.crosses
class ConfigError(ValueError):
    """A run that cannot start; the message is one line that names the key and the way out."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder in the shape of Qwen3-MoE."""

    vocab_size: int = 0
    """V; 0 takes as many as the data has different tokens"""
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    """query heads"""
    num_kv_heads: int = 2
    """key and value heads; divides num_heads"""
    head_dim: int = 16
    ffn_size: int = 64
    """width of one expert"""
    num_experts: int = 8
    top_k: int = 2
    """experts a token"""
    tied: bool = False
    """whether the head is the embedding"""
    rope_theta: float = 10_000.0
    learned_positions: int = 0
    """tokens that get a learned position embedding beside RoPE; 0 for none, as in Qwen3"""
    norm_eps: float = 1e-6
    renormalize: bool = True
    """whether the weights of a token's experts sum to 1, as in Qwen3-MoE"""
    recompute: float = 1.0
    """fraction of the layers whose activations are computed again in the backward instead of kept"""
    moe_chunks: int = 1
    """parts in which tokens go through the experts: less memory with all experts on a rank, overlap over several"""
    moe_save: Literal["pre_activation", "plan"] = "pre_activation"
    """what the experts keep for the backward; plan: nothing, the backward runs their first product again"""
    backend: str = "auto"
    """of the fused ops: auto, eager, triton or native"""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW; linear warm-up, then a straight line to lr · final_lr at the last step."""

    lr: float = 3e-3
    final_lr: float = 0.1
    """the last step's learning rate as a fraction of lr"""
    warmup_steps: int = 5
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    """gradients are scaled down to this L2 norm; a norm that is not finite skips the step"""


@dataclass(frozen=True)
class TrainConfig:
    """What both loops share."""

    steps: int = 120
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU where there is one; a GPU computes in bf16 autocast over fp32 parameters, a CPU in fp32"""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice, all cores"""
    out: str = ""
    """folder of the run; empty takes the first free runs/<mode>-<what>"""
    resume: bool = False
    """go on from the newest good checkpoint in `out`, with its config"""
    init: str = ""
    """a checkpoint folder (step-N) whose weights to start from"""
    save_every: int = 40
    """steps between checkpoints; one more is written at the end and on SIGTERM or Ctrl-C"""
    keep: int = 3
    """checkpoints that stay on disk"""
    eval_every: int = 10
    """steps between looks at the held-out data"""
    log_every: int = 10
    """steps between lines where the output is no terminal"""
    csv: bool = False
    """write metrics.csv beside metrics.jsonl"""
    micro_batch: int = 0
    """sequences in one forward and backward of a process; 0 takes its share of the batch at once"""
    ep: int = 0
    """processes that share the experts; 0 lets it follow from their number, the node and the model"""
    shard: Literal["auto", "always"] = "auto"
    """FSDP2 where there are several processes, or also with one, which then computes as they do"""
    hf: str = ""
    """a folder of transformers' config.json and safetensors (Qwen3-MoE) to take the model and its weights from"""
    export: str = ""
    """a folder to write the trained weights to as transformers would; empty writes none"""
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True)
class GrpoConfig(TrainConfig):
    """Reinforcement learning on a task with a checkable answer."""

    task: Literal["reverse", "sort"] = "reverse"
    alphabet: Literal["digits", "letters"] = "digits"
    length: int = 6
    """symbols in a string; the knob of difficulty"""
    num_prompts: int = 32
    """prompts a step"""
    group_size: int = 8
    """answers sampled for each prompt; their mean reward is the baseline"""
    num_updates: int = 1
    """optimizer steps for one batch of answers; above 1 the ratio to the sampling policy comes into play"""
    temperature: float = 1.0
    """of sampling, and of the log-probs in the loss"""
    std_advantage: bool = False
    """divide a group's advantages by their standard deviation (GRPO) or not (Dr. GRPO)"""
    variant: Variant = "clip"
    """PPO's clipped ratio of each token, a capped one as its weight (cispo), or one a sequence (gspo)"""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """the ratio is clipped to [1 - clip_low, 1 + clip_high]; cispo takes the upper bound alone"""
    dual_clip: float = 0.0
    """above 1: a negative advantage counts at most so many times; 0 for no such bound"""
    normalize: Normalize = "token"
    """the mean over all tokens of the step (DAPO), over sequences of each one's mean (GRPO), or over `length` tokens of
    every answer (fixed, Dr. GRPO)"""
    kl_coef: float = 0.0
    """weight of the estimate of KL to the starting model; 0 costs nothing"""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """the estimate of KL; k3 is never negative"""
    kl_corrected: bool = True
    """weigh the estimate by the ratio, for the gradient of KL(policy to reference); without it, GRPO's as published"""
    entropy_coef: float = 0.01
    """weight of the entropy bonus; 0 costs nothing"""
    eval_prompts: int = 512
    """held-out prompts that are answered greedily"""
    threads: int = 1
    """CPU threads; for so small a model a second one gains little, and waits for its turn on a busy machine"""
    model: ModelConfig = field(default_factory=lambda: ModelConfig(learned_positions=16))


@dataclass(frozen=True)
class SftConfig(TrainConfig):
    """Supervised training on text, bytes as tokens."""

    steps: int = 200
    data: str = ""
    """a file, or a folder of .py, .txt and .md files; empty takes the sources of Python's standard library"""
    seq_len: int = 256
    """tokens in a packed sequence"""
    batch_size: int = 8
    """sequences a step"""
    eval_batches: int = 4
    """held-out batches that are looked at"""
    model: ModelConfig = field(default_factory=lambda: ModelConfig(hidden_size=128, ffn_size=128))


MODES: dict[str, type[TrainConfig]] = {"grpo": GrpoConfig, "sft": SftConfig}


Config = TypeVar("Config", bound=TrainConfig)


def mode_of(config: TrainConfig) -> str:
    """ "grpo" or "sft"."""
    return next(name for name, kind in MODES.items() if isinstance(config, kind))


_AT_LEAST_1 = """steps save_every keep eval_every log_every length num_prompts group_size num_updates eval_prompts
    seq_len batch_size eval_batches hidden_size num_layers num_heads num_kv_heads head_dim ffn_size num_experts
    top_k moe_chunks""".split()
_AT_LEAST_0 = """vocab_size learned_positions threads micro_batch ep warmup_steps seed weight_decay final_lr kl_coef
    entropy_coef clip_low clip_high""".split()
_ABOVE_0 = "lr clip_norm temperature rope_theta norm_eps".split()


def _require(good: bool, config: TrainConfig, key: str, expected: str) -> None:
    if not good:
        raise ConfigError(f"{key} is {operator.attrgetter(key)(config)!r}; expected {expected}")


def check(config: TrainConfig) -> None:
    """ConfigError for the first value that cannot work."""
    for prefix, part in (("", config), ("model.", config.model), ("optim.", config.optim)):
        for name, value in vars(part).items():
            key = prefix + name
            if isinstance(value, int | float):
                _require(math.isfinite(value), config, key, "a finite number")
            _require(name not in _AT_LEAST_1 or value >= 1, config, key, "at least 1")
            _require(name not in _AT_LEAST_0 or value >= 0, config, key, "at least 0")
            _require(name not in _ABOVE_0 or value > 0, config, key, "a number above 0")
    model, optim, backends = config.model, config.optim, ", ".join(env.BACKENDS)
    _require(model.num_heads % model.num_kv_heads == 0, config, "model.num_kv_heads", "a divisor of num_heads")
    _require(model.head_dim % 2 == 0, config, "model.head_dim", "an even number (RoPE turns pairs)")
    _require(model.top_k <= model.num_experts, config, "model.top_k", f"at most num_experts = {model.num_experts}")
    _require(0 <= model.recompute <= 1, config, "model.recompute", "a fraction from 0 to 1")
    _require(model.backend in env.BACKENDS, config, "model.backend", f"one of {backends}")
    _require(model.moe_save in SAVES, config, "model.moe_save", f"one of {', '.join(SAVES)}")
    _require(model.moe_chunks <= MAX_CHUNKS, config, "model.moe_chunks", f"at most {MAX_CHUNKS}")
    _require(0 <= optim.beta1 < 1, config, "optim.beta1", "a number in [0, 1)")
    _require(0 <= optim.beta2 < 1, config, "optim.beta2", "a number in [0, 1)")
    if isinstance(config, GrpoConfig):
        _require(config.group_size >= 2, config, "group_size", "at least 2 (a group is its own baseline)")
        try:
            PolicyOptions.of(config)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        divides = config.num_prompts % config.num_updates == 0
        _require(divides, config, "num_updates", f"a divisor of num_prompts = {config.num_prompts}")
    rows = math.prod(update_units(config))
    divides = not config.micro_batch or rows % config.micro_batch == 0
    _require(divides, config, "micro_batch", f"0 or a divisor of {rows}, the sequences of one update")
    _require(not (config.init and config.hf), config, "init", "empty beside hf: a run starts from one model")
    plain = not (config.export and model.learned_positions)
    _require(plain, config, "model.learned_positions", "0 with --export: Qwen3-MoE has none")
    _require(bool(config.out) or not config.resume, config, "out", "the folder of the run to resume (--out runs/…)")


def update_units(config: TrainConfig) -> tuple[int, int]:
    """What one optimizer step sees, over all ranks: units that a rank has whole, and the sequences of one."""
    if isinstance(config, GrpoConfig):
        return config.num_prompts // config.num_updates, config.group_size
    assert isinstance(config, SftConfig)
    return config.batch_size, 1


def fit(config: Config, num_tokens: int, length: int) -> Config:
    """The config with its vocabulary size known; ConfigError when the model has no row for a token id of the data, or
    no learned position for a token of its sequences.
    """
    size, positions = config.model.vocab_size or num_tokens, config.model.learned_positions
    _require(size >= num_tokens, config, "model.vocab_size", f"0 or at least {num_tokens} (the highest token id + 1)")
    fits = not positions or positions >= length
    _require(fits, config, "model.learned_positions", f"0 or at least {length}, the length of a sequence")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The JSON form, with the mode."""
    return {"mode": mode_of(config), **dataclasses.asdict(config)}


def from_dict(values: dict[str, Any]) -> TrainConfig:
    """The config that `to_dict` wrote; ConfigError for a key that does not exist."""
    values = dict(values)
    mode = values.pop("mode", None)
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}; expected one of {', '.join(MODES)}")
    for name, kind in (("model", ModelConfig), ("optim", OptimConfig)):
        values[name] = _build(kind, values.get(name, {}), f"{name}.")
    return _build(MODES[mode], values, "")


def _build(kind: type, values: dict[str, Any], prefix: str) -> Any:
    known = [f.name for f in dataclasses.fields(kind)]
    for name in values:
        if name not in known:
            raise ConfigError(unknown_key(prefix + name, [prefix + k for k in known]))
    return kind(**values)


def unknown_key(key: str, known: list[str]) -> str:
    """The message for a key nobody reads, with the nearest one that exists."""
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else "; see fusedce train --help")


def free_folder(config: TrainConfig) -> Path:
    """`config.out`, or the first of runs/grpo-reverse, runs/grpo-reverse-2, … that does not exist."""
    if config.out:
        return Path(config.out)
    what = config.task if isinstance(config, GrpoConfig) else "text"
    base = Path("runs") / f"{mode_of(config)}-{what}"
    number = 1
    while (folder := base if number == 1 else base.with_name(f"{base.name}-{number}")).exists():
        number += 1
    return folder
