"""Build the wheel from the source archive and use it in a clean environment that has no compiler and no Triton.

Run by the environment of `make setup`, whose build tools it takes; needs pip's index, or what pip's settings name.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from setup_env import ROOT, create, install_torch, pip, say, stop

SMOKE = """
import importlib.util
import torch
import fusedce

assert "site-packages" in fusedce.__file__, fusedce.__file__
assert importlib.util.find_spec("triton") is None and importlib.util.find_spec("fusedce._C") is None
print(fusedce.explain(device="cpu"))
torch.manual_seed(0)
hidden, weight = torch.randn(7, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
target = torch.randint(0, 11, (7,))
loss = fusedce.linear_cross_entropy(hidden, weight, target)
plain = torch.nn.functional.cross_entropy(hidden @ weight.t(), target)
torch.testing.assert_close(loss, plain)
ours, theirs = (torch.autograd.grad(value, (hidden, weight)) for value in (loss, plain))
torch.testing.assert_close(ours, theirs)
torch.library.opcheck(torch.ops.fusedce.linear_logprob.default, (hidden, weight, target, None))
moe = fusedce.nn.MoE(hidden_size=8, ffn_size=4, num_experts=4, top_k=2)
assert moe(hidden).isfinite().all()
from fusedce import cli

assert cli.main(["--help"]) == 0
assert cli.main(["doctor"]) == 1  # in one line: the extra is not installed
print("smoke test passed, fusedce", fusedce.__version__)
"""


def main() -> None:
    """Build, install, try."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        names = zipfile.ZipFile(wheel).namelist()
        data = {"fusedce/py.typed", "fusedce/plan/measured.csv"}
        if not data.issubset(names) or any(n.split("/")[0] in ("tests", "bench", "tools") for n in names):
            stop(f"{wheel.name} lacks one of {', '.join(sorted(data))}, or holds what is not the package's")
        venv = folder / "venv"
        create(sys.executable, venv)
        python = str(venv / "bin" / "python")
        install_torch(python, os.environ.get("TORCH", ""))
        pip(python, str(wheel))
        # No PATH, no compiler; -I and another folder, so that nothing of the working tree is seen.
        done = subprocess.run([python, "-I", "-c", SMOKE], cwd=folder, env={"PATH": ""})
        sys.exit(done.returncode)


def build(folder: Path) -> Path:
    """The wheel, built from the source archive as a packager would, without the native extension."""
    archive = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
    environment = {**os.environ, "FUSEDCE_BUILD_EXT": "0"}
    run([sys.executable, "-c", archive, str(folder)], environment)
    (sdist,) = folder.glob("fusedce-*.tar.gz")
    run(
        [*shlex.split(f"{sys.executable} -m pip wheel -qq --no-deps --no-build-isolation -w"), str(folder), str(sdist)],
        environment,
    )
    (wheel,) = folder.glob("fusedce-*.whl")
    say(f"built {sdist.name} and {wheel.name}, {wheel.stat().st_size // 1024} KiB")
    return wheel


def run(command: list[str], environment: dict[str, str]) -> None:
    """A build step; its output only if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        stop(f"{' '.join(command)} failed:\n{done.stdout}")


if __name__ == "__main__":
    main()
