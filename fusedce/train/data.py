"""Text for SFT: the sources of Python's standard library, or the user's files; bytes as tokens, packed without padding.

The order is a function of (seed, step), so that a resumed run needs no data state.
"""

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from fusedce.train.config import ConfigError, SftConfig

END = 256  # stands before every file; 0..255 are the bytes
NUM_TOKENS = 257
SUFFIXES = (".py", ".txt", ".md")
HELD_OUT_OF = 10  # one file in ten is never trained on


def read(data: str) -> tuple[Tensor, Tensor]:
    """The token streams (int64) of the training files and of the held-out files.

    A single file is cut instead: its last tenth is held out.
    """
    root = Path(data or sysconfig.get_paths()["stdlib"])
    if root.is_file():
        stream = _stream([root])
        cut = len(stream) - len(stream) // HELD_OUT_OF
        return stream[:cut], stream[cut:]
    # Without an argument only the top folder: 5 MB of text, and no site-packages.
    files = root.rglob("*") if data else root.glob("*.py")
    chosen = sorted(f for f in files if f.suffix in SUFFIXES and f.is_file())
    if not chosen:
        raise ConfigError(f"data: no {', '.join(SUFFIXES)} file in {root}; pass --data with a file or folder of text")
    held_out = [f for f in chosen if _is_held_out(f.relative_to(root))]
    return _stream([f for f in chosen if f not in set(held_out)]), _stream(held_out)


def _is_held_out(name: Path) -> bool:
    return int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:4], "big") % HELD_OUT_OF == 0


def _stream(files: list[Path]) -> Tensor:
    parts = []
    for file in files:
        parts.append(torch.tensor([END]))
        parts.append(torch.frombuffer(bytearray(file.read_bytes()) or bytearray(b"\n"), dtype=torch.uint8).long())
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


class Packed:
    """A stream cut into windows of seq_len + 1 tokens, dealt out in an order that each epoch shuffles anew.

    A window is full to its last token: it may hold the end of one file and the start of the next, with END between.
    """

    def __init__(self, stream: Tensor, config: SftConfig, name: str) -> None:
        self.stream, self.seq_len, self.batch_size, self.seed = stream, config.seq_len, config.batch_size, config.seed
        self.num_windows = max(len(stream) - 1, 0) // config.seq_len
        if self.num_windows < config.batch_size:
            raise ConfigError(
                f"data: the {name} text has {len(stream)} tokens, a batch takes {config.batch_size} × {config.seq_len}"
                "; pass more text (--data) or a smaller --seq-len or --batch-size"
            )

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Batch number `step` from 0: ids and next ids, each (batch_size, seq_len) int64."""
        per_epoch = self.num_windows // self.batch_size
        epoch, place = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(self.num_windows, generator=generator)
        starts = order[place * self.batch_size : (place + 1) * self.batch_size] * self.seq_len
        windows = self.stream[starts[:, None] + torch.arange(self.seq_len + 1)]  # the last token is only a target
        return windows[:, :-1], windows[:, 1:]
