"""`fusedce tune`: better tiles for an op and shape on this GPU, kept for later runs."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusedce import env
from fusedce.commands.common import UsageError, command, device_named, print_json, progress
from fusedce.configs import tuned
from fusedce.configs.tables import TABLES
from fusedce.doctor import facts
from fusedce.tune.search import Outcome, Problem, event_timer, search
from fusedce.verify.primitives import Sizes

ABOUT = """Times the tiles of the tables for an op at a shape on this GPU, bf16, forward with backward: each one is
checked first, all are timed in turns, and the table's stays unless another one's median is below its 20th percentile.
What is better goes to the user's cache, and later launches take it, at every shape; FUSEDCE_TUNED=0 ignores it.
For NVIDIA and AMD GPUs (not yet run on AMD hardware by us).
Exit codes: 0; 1 if the table's own tile is wrong here; 2 without a GPU, or for arguments that make no sense.

  fusedce tune linear_ce_sum                                       65,536 tokens, D 2048, V 124,160
  fusedce tune moe_experts --tokens 65536 --experts 128 --ffn 768 --top-k 8
  fusedce tune linear_logprob --vocab 151936 --dry-run --json      keep nothing, print what was tried"""

# The ops that are made of GEMMs, whose tiles there are tables of.
Op = Literal[
    "linear_ce_sum", "linear_logprob", "linear_logprob_sparse", "linear_logprob_of", "linear_argmax", "moe_experts"
]  # fmt: skip


@dataclass(frozen=True)
class TuneConfig:
    """The command line."""

    op: Annotated[Op, tyro.conf.Positional]
    """what is timed"""
    tokens: int = 65_536
    """rows of hidden"""
    hidden: int = 2048
    """columns of hidden"""
    vocab: int = 124_160
    """words, of the linear ops"""
    bias: bool = False
    """whether the logits have a bias, for which there are tiles of their own"""
    experts: int = 128
    """experts, of moe_experts"""
    ffn: int = 768
    """an expert's feed-forward width"""
    top_k: int = 8
    """experts a token"""
    device: str = ""
    """cuda or cuda:N; left out, the current GPU"""
    rounds: int = 7
    """times each candidate is timed, in turns"""
    dry_run: bool = False
    """keep nothing"""
    json: bool = False
    """print one JSON object instead of the table"""


def run(config: TuneConfig) -> int:
    """Search, keep, show."""
    for name in ("tokens", "hidden", "vocab", "experts", "ffn", "top_k", "rounds"):
        if getattr(config, name) < 1:
            raise UsageError(f"{name} is {getattr(config, name)}; expected at least 1")
    if config.top_k > config.experts:
        raise UsageError(f"top_k is {config.top_k}; expected at most experts = {config.experts}")
    device = device_named(config.device)
    if device.type != "cuda":
        raise UsageError("tiles are for GPUs, and torch sees none here" if not config.device else "tiles are for GPUs")
    sizes = Sizes(
        config.tokens, config.vocab, config.hidden, config.experts, config.ffn, config.top_k, has_bias=config.bias
    )
    problem = Problem(config.op, sizes, device)
    with progress("tune", None, config.json) as step:
        outcome = search(problem, event_timer, config.rounds, step)
    return finish(config, problem.arch.name, outcome)


def finish(config: TuneConfig, arch_name: str, outcome: Outcome) -> int:
    """Keep what was better, and show what was tried."""
    wrong = [one for one in outcome.tried if one.reason and one.tile == TABLES[arch_name][one.stage]]
    path = None
    if outcome.tiles and not wrong and not config.dry_run:
        path = tuned.keep(arch_name, outcome.tiles, measured(config))
    if config.json:
        print_json(as_dict(config, arch_name, outcome) | {"kept": None if path is None else str(path)})
    else:
        show(Console(), outcome)
        print(verdict(config, outcome, [one.stage for one in wrong], path))
    return int(bool(wrong))


def verdict(config: TuneConfig, outcome: Outcome, wrong: list[str], path: Any) -> str:
    """The last line."""
    if wrong:
        return f"the table's own tile is wrong here: {', '.join(wrong)}; `fusedce verify` says more. Nothing is kept"
    if not outcome.tiles:
        return "the table's tiles are the best of these: nothing to keep"
    if config.dry_run:
        return f"better: {', '.join(outcome.tiles)}; not kept (--dry-run)"
    ignored = "" if env.use_tuned_tiles() else "; FUSEDCE_TUNED=0 ignores it now"
    return f"better: {', '.join(outcome.tiles)}; kept in {path}{ignored}"


def measured(config: TuneConfig) -> dict[str, Any]:
    """What the tiles were chosen by."""
    return {"config": {k: v for k, v in asdict(config).items() if k not in ("json", "dry_run")}, **facts.versions()}


def as_dict(config: TuneConfig, arch_name: str, outcome: Outcome) -> dict[str, Any]:
    """The object for programs."""
    return {
        "arch": arch_name,
        "measured": measured(config),
        "better": {stage: asdict(tile) for stage, tile in outcome.tiles.items()},
        "tried": [asdict(one) for one in outcome.tried],
    }


def show(console: Console, outcome: Outcome) -> None:
    """A line a candidate, the fastest of a stage first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "tile", "warps", "stages", "ms", ""):
        table.add_column(name, justify="right" if name in ("warps", "stages", "ms") else "left")
    order = {stage: index for index, stage in enumerate(dict.fromkeys(one.stage for one in outcome.tried))}
    for one in sorted(outcome.tried, key=lambda one: (order[one.stage], one.p50 is None, one.p50 or 0.0)):
        tile = one.tile
        taken = outcome.tiles.get(one.stage) == tile
        note = Text(one.reason or ("better" if taken else ""), style="red" if one.reason else "green")
        shape = f"{tile.block_m}×{tile.block_n}×{tile.block_k}"
        took = "" if one.p50 is None else f"{one.p50:.3f}"
        table.add_row(one.stage, shape, str(tile.num_warps), str(tile.num_stages), took, note)
    console.print(table)


main = command("tune", TuneConfig, ABOUT, run)
