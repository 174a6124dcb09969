"""`fusedce train` as a process of its own that may be killed: a tiny run, with a fault in the midst of a step or of a
checkpoint."""

import os
import resource
import signal
from pathlib import Path
from typing import Any

from fusedce import cli
from fusedce.train import checkpoint, plot
from fusedce.train.loop import Trainer
from tests.train import faults

STEPS, SAVE_EVERY = 6, 2
ARGUMENTS = f"""--device cpu --threads 1 --steps {STEPS} --save-every {SAVE_EVERY} --keep 2 --eval-every 3
    --num-prompts 4 --group-size 4 --num-updates 2 --eval-prompts 16 --length 4 --optim.warmup-steps 2
    --model.hidden-size 16 --model.num-heads 2 --model.num-kv-heads 1 --model.head-dim 8 --model.ffn-size 16
    --model.num-experts 4""".split()


def train(out: str, resume: bool = False, fault: dict[str, Any] | None = None, extra: tuple[str, ...] = ()) -> int:
    """The exit code.

    fault: {"kill_in_step": N}, {"file_limit": bytes}, or {"save": N} with what `faults.arm` takes for that checkpoint.
    """
    plot.draw = lambda *_: None  # takes longer than the run
    fault = dict(fault or {})
    doomed, kill_in = fault.pop("save", 0), fault.pop("kill_in_step", 0)
    if "file_limit" in fault:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["file_limit"],) * 2)
    save, step = checkpoint.save, Trainer.backward_and_step

    def faulty_save(run: Any, number: int, *rest: Any) -> Any:
        if number == doomed:
            faults.arm(**fault)
        return save(run, number, *rest)

    def deadly_step(trainer: Trainer, losses: Any) -> Any:
        result = step(trainer, losses)
        if trainer.step + 1 == kill_in:  # after the first of two updates
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    checkpoint.save, Trainer.backward_and_step = faulty_save, deadly_step
    return cli.main(["train", "--out", out, *ARGUMENTS, *(("--resume",) if resume else ()), *extra])


def without_home(out: str, home: str) -> int:
    """The exit code of a run whose HOME cannot be made."""
    Path(home).parent.touch()
    for name in ("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        os.environ.pop(name, None)
    os.environ["HOME"] = home
    return cli.main(["train", "--out", out, *ARGUMENTS])
