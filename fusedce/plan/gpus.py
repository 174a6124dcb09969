"""The cards that a plan can be made for: datasheet numbers in one table, each with its source."""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One card, and the node and network it usually stands in.

    memory: bytes, the datasheet's GB as 1e9, which is a little less than the driver reports; hbm: bytes/s; peak: dense
    bf16 FLOP/s (figures with 2:4 sparsity are twice that, and no training reaches them); link: bytes/s one way between
    a card and all others of its node; network: bytes/s one way of a card's own adapter, 400 Gbit/s in all rows, which
    is a choice of ours; per_node: cards of a node; arch: its name in `fusedce.arch`; die: cards with the same die share
    measured efficiencies.
    """

    name: str
    title: str
    memory: float
    hbm: float
    peak: float
    link: float
    arch: str
    die: str
    source: str
    network: float = 50e9
    per_node: int = 8


_HOPPER = "NVIDIA H100 and H200 datasheets, SXM: bf16 989 TFLOP/s is half the sparse 1,979; NVLink 900 GB/s both ways"
_MI300 = "AMD Instinct datasheet: peak bf16 without sparsity; seven Infinity Fabric links of 128 GB/s both ways"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", "H100 SXM", 80e9, 3.35e12, 989.4e12, 450e9, "sm_90", "hopper", _HOPPER),
        Gpu("h200", "H200 SXM", 141e9, 4.8e12, 989.4e12, 450e9, "sm_90", "hopper", _HOPPER),
        Gpu(
            "b200", "B200", 180e9, 8.0e12, 2250e12, 900e9, "sm_100", "blackwell",
            "NVIDIA DGX B200 datasheet, an eighth of it: 1,440 GB, 64 TB/s, 36 PFLOP/s sparse bf16; NVLink 1.8 TB/s",
        ),
        Gpu("mi300x", "MI300X", 192e9, 5.3e12, 1307.4e12, 448e9, "gfx942", "cdna3", _MI300),
        Gpu("mi325x", "MI325X", 256e9, 6.0e12, 1307.4e12, 448e9, "gfx942", "cdna3", _MI300),
        Gpu(
            "mi355x", "MI355X", 288e9, 8.0e12, 2516.6e12, 537.6e9, "gfx950", "cdna4",
            "AMD Instinct MI355X datasheet: peak bf16 without sparsity; seven links of 153.6 GB/s both ways",
        ),
    )
}  # fmt: skip


def gpu_named(name: str) -> Gpu:
    """The row of a card. ValueError, with the known names, for any other."""
    if name.lower() not in GPUS:
        near = difflib.get_close_matches(name.lower(), GPUS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(GPUS)}"
        raise ValueError(f"gpu is {name!r}{hint}")
    return GPUS[name.lower()]
