"""The tests of fusedce.integrations, in this environment, with the libraries they are for. Standard library only.

Installs the extra "integrations" of pyproject.toml, which `make setup` leaves out because it is large, and runs
tests/integrations, the slow ones too. torch stays as it is.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Install and run; exits with pytest's status."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    kept = f"torch=={importlib.metadata.version('torch')}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *extras["integrations"], kept], check=True)
    pytest = [sys.executable, "-m", "pytest", "-q", "tests/integrations", "-m", "not gpu", *sys.argv[1:]]
    sys.exit(subprocess.run(pytest, cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
