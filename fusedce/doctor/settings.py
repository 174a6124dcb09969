"""Environment variables that change how kernels and their overlap run, each with the reason and where it is said."""

from collections.abc import Callable
from dataclasses import dataclass

CUDA = "https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html"
HIP = "https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html"
NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
TORCH_NCCL = "https://pytorch.org/docs/main/torch_nccl_environment_variables.html"
OURS = "docs/install.md"


@dataclass(frozen=True)
class Setting:
    """One variable. vendor: whose GPUs it concerns, "any" for all; bad: whether a value is a trap; reason: why."""

    name: str
    vendor: str
    bad: Callable[[str], bool]
    reason: str
    source: str


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _one(value: str) -> bool:
    return value.strip() == "1"


def _never(value: str) -> bool:
    return False


SETTINGS = (
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS", "nvidia", _one,
        "all streams of the process share one queue to the GPU: what is launched after a collective waits behind it, "
        "and expert parallelism's chunks cannot overlap (fusedce.distributed warns of it too). Some recipes set it for "
        "tensor parallelism; unset it for expert parallelism", CUDA,
    ),
    Setting(
        "CUDA_LAUNCH_BLOCKING", "nvidia", _on,
        "the host waits for every kernel: for finding faults, not for speed; nothing overlaps", CUDA,
    ),
    Setting(
        "GPU_MAX_HW_QUEUES", "amd", _one,
        "all streams of the process share one hardware queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1; communication "
        "that is to overlap needs at least 2", HIP,
    ),
    Setting(
        "AMD_SERIALIZE_KERNEL", "amd", _on,
        "the runtime waits around every kernel: for finding faults, not for speed; nothing overlaps", HIP,
    ),
    Setting(
        "HIP_LAUNCH_BLOCKING", "amd", _on,
        "the host waits for every kernel: for finding faults, not for speed; nothing overlaps", HIP,
    ),
    Setting(
        "HSA_OVERRIDE_GFX_VERSION", "amd", _on,
        "the runtime takes the GPU for another one, whose code objects and tiles it then gets", HIP,
    ),
    Setting(
        "NCCL_P2P_DISABLE", "any", _on,
        "no direct access between GPUs: NVLink and xGMI stay idle, expert parallelism's rows go through the host", NCCL,
    ),
    Setting(
        "NCCL_SHM_DISABLE", "any", _on,
        "no shared host memory: GPUs of one host that lack direct access talk over the network", NCCL,
    ),
    Setting(
        "NCCL_IB_DISABLE", "any", _on,
        "no InfiniBand or RoCE: hosts talk over IP sockets", NCCL,
    ),
    Setting(
        "NCCL_MAX_NCHANNELS", "any", _never,
        "few channels leave more SMs or CUs to the experts beside the exchange, and make it slower: a choice",
        NCCL,
    ),
    Setting(
        "NCCL_DEBUG", "any", lambda value: value.upper() in ("INFO", "TRACE"),
        "every communicator writes to the log; NCCL asks not to keep it in production", NCCL,
    ),
    Setting(
        "TORCH_NCCL_BLOCKING_WAIT", "any", _on,
        "wait() holds the host until a collective is done: the next chunk is launched too late to overlap", TORCH_NCCL,
    ),
    Setting(
        "FUSEDCE_BACKEND", "any", lambda value: value not in ("", "auto"),
        'backend="auto" no longer chooses by machine', OURS,
    ),
    Setting("FUSEDCE_WORKSPACE_MB", "any", _never, "the largest chunk of tokens × vocabulary, MiB", OURS),
    Setting("FUSEDCE_TUNED", "any", _never, "0: tiles that `fusedce tune` kept are not looked at", OURS),
    Setting(
        "TRITON_INTERPRET", "any", _on,
        "Triton's kernels run in Python, on the CPU: for tests, not for work", OURS,
    ),
)  # fmt: skip
