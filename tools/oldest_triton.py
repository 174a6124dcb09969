"""The compile matrix on the oldest Triton that is supported, beside the environment's own. Standard library only.

Installs it into build/ (once), puts that folder first on the path, and runs the tests marked compile.
"""

import os
import subprocess
import sys
from pathlib import Path

OLDEST = "3.6.0"
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Install and run; exits with pytest's status."""
    folder = ROOT / "build" / f"triton-{OLDEST}"
    if not (folder / "triton").is_dir():
        install = ["pip", "install", "-q", "--no-deps", "--target", str(folder), f"triton=={OLDEST}"]
        subprocess.run([sys.executable, "-m", *install], check=True)
    path = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    seen = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    if seen != OLDEST:
        sys.exit(f"expected Triton {OLDEST}, got {seen}")
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "compile", *sys.argv[1:]]
    sys.exit(subprocess.run(pytest, cwd=ROOT, env=environment).returncode)


if __name__ == "__main__":
    main()
