"""A wheel from a copy of the sources, as pip builds it."""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "csrc", "fusedce")


@dataclass(frozen=True)
class Build:
    """What one run of pip made: its wheel, unpacked, and all that it printed."""

    wheel: Path
    unpacked: Path
    printed: str

    def python(self, code: str) -> str:
        """What `code` prints in a fresh process that sees the unpacked wheel and not the sources."""
        environment = {**os.environ, "PYTHONPATH": str(self.unpacked)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=self.unpacked, env=environment, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def pip_wheel(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pip wheel` of a copy of the sources in `folder`. environment: the only variables that bear on the build."""
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, sources / name)
    own = ("FUSEDCE_BUILD_EXT", "TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH", "PYTHONPATH")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-build-isolation", "--no-deps"]
    return subprocess.run(
        [*command, "--wheel-dir", str(folder), str(sources)],
        env={**clean, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def build(folder: Path, **environment: str) -> Build:
    """A wheel that must get built."""
    done = pip_wheel(folder, **environment)
    assert done.returncode == 0, done.stdout
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return Build(wheel, folder / "unpacked", done.stdout)
