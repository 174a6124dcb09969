"""`import fusedce` needs neither a GPU nor Triton nor a build tool, and loads none of what it does not need."""

import subprocess
import sys

from tests.house.source import ROOT

BLOCKED = ("triton", "ninja", "pybind11", "tyro", "rich", "matplotlib", "safetensors", "numpy.testing", "transformers")


def run(code: str) -> str:
    """What a new interpreter without a GPU prints."""
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_and_call_without_anything_optional() -> None:
    printed = run(
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({BLOCKED!r}))\n"
        "import torch, fusedce\n"
        "hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)\n"
        "loss = fusedce.linear_cross_entropy(hidden, weight, torch.tensor([0, 4, 2]))\n"
        "loss.backward()\n"
        "print(fusedce.explain('linear_logprob', 'cpu'))\n"
        "assert hidden.grad.isfinite().all() and loss.item() > 0\n"
    )
    assert "eager (the tensors are on the CPU)" in printed


def test_import_loads_no_backend() -> None:
    printed = run("import sys, torch\nbefore = set(sys.modules)\nimport fusedce\nprint(*(set(sys.modules) - before))")
    loaded = set(printed.split())
    assert "fusedce.ops.registry" in loaded
    unwanted = {n for n in loaded if n.split(".")[0] in BLOCKED or n.startswith(("fusedce.triton", "fusedce.hip"))}
    assert not unwanted
