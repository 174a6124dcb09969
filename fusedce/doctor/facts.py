"""What is installed and what it runs on, as plain values: for `fusedce doctor` and for a record of `fusedce verify`."""

import platform
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from fusedce import arch, hip
from fusedce.version import __version__

# Where Linux says which driver is loaded.
DRIVERS = {"nvidia": Path("/proc/driver/nvidia/version"), "amd": Path("/sys/module/amdgpu/version")}
AMD_UNTRIED = "not yet run on AMD hardware by us; compiled, and executed in an emulator"


def default_device() -> torch.device:
    """The current GPU if torch sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def versions() -> dict[str, str]:
    """Of the package, Python and what kernels are made with; "none" for what is not there."""
    return {
        "fusedce": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "hip": torch.version.hip or "none",
        "triton": triton_version() or "none",
        "nccl": nccl_version(),
        "extension": extension(),
        "platform": f"{sys.platform} {platform.machine()}",
    }


def triton_version() -> str | None:
    """Of whichever distribution brings the module: ROCm's is called otherwise."""
    if util.find_spec("triton") is None:
        return None
    owners = metadata.packages_distributions().get("triton", [])
    return metadata.version(owners[0]) if owners else "of unknown version"


def nccl_version() -> str:
    """Of NCCL, or of RCCL under its name, as torch reports it; "none" without a GPU."""
    if not torch.cuda.is_available() or not dist.is_available() or not dist.is_nccl_available():
        return "none"
    return ".".join(map(str, nccl.version()))


def extension() -> str:
    """What the native extension was built with and for, or why there is none."""
    try:
        info = hip.build_info()
    except RuntimeError as error:
        return f"none: {str(error).partition(': ')[2]}"
    return f"{info['compiler']} for {', '.join(info['archs'])}, torch {info['torch']}"


def machine(device: torch.device) -> dict[str, Any]:
    """The device, its row of `fusedce.arch` and its limits as the tiles see them."""
    row = arch.of_device(device)
    found: dict[str, Any] = {"device": str(device), "name": platform.processor() or platform.machine()}
    found |= {"arch": row.name, "vendor": row.vendor, "wave_size": row.wave_size, "num_units": row.num_units}
    found |= {"shared_bytes": row.shared_bytes, "max_threads": row.max_threads, "matrix_bf16": row.matrix_bf16}
    if device.type != "cuda":
        return found | {"vendor": "cpu"}
    properties: Any = torch.cuda.get_device_properties(device)
    found |= {"name": properties.name, "memory_bytes": properties.total_memory, "count": torch.cuda.device_count()}
    vendor = "amd" if torch.version.hip else "nvidia"
    path = DRIVERS[vendor]
    driver = path.read_text(encoding="utf-8").splitlines()[0].strip() if path.exists() else "unknown"
    return found | {"vendor": vendor, "driver": driver}
