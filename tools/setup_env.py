"""Prepare the Python environment of `make demo` and `make test`. Standard library only: it runs before all else.

    python3 tools/setup_env.py --venv .venv      create .venv, choose a torch for this machine, install fusedce in it
    python3 tools/setup_env.py --venv PATH       add what an environment of yours lacks; its torch and Triton stay
    python3 tools/setup_env.py --venv none       install nothing: say whether this interpreter has what it takes

Which torch: one that is there stays. Else --torch (the Makefile's TORCH="…": any arguments of `pip install`). Else, on
a machine with a GPU, torch>=2.11, whose wheel brings CUDA (for ROCm give TORCH="…"); on one without, a CPU build where
pip's settings offer one, and otherwise whatever pip has for 2.13.0.

A stamp in the environment remembers what was installed for which files, so that the second run takes no time.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "fusedce-setup.json"
OLDEST_PYTHON = (3, 10)
CPU_TORCH = "2.13.0"
GPU_TORCH = "torch>=2.11"
BUILD_TOOLS = ("setuptools>=77", "wheel", "pybind11>=3.0", "ninja", "numpy")
EXTRAS = "dev,train,bench"
# Distributions that own the modules torch and triton, by whoever packaged them; none of them is ever replaced.
KEPT = ("torch", "triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
names = json.loads(sys.argv[1])
print(json.dumps({"python": sys.version_info[:2], "versions": {n: version(n) for n in names["distributions"]},
                  "missing": [n for n in names["modules"] if u.find_spec(n) is None]}))
"""


def main() -> None:
    """Read the arguments, prepare the environment and print the interpreter to use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", default=".venv", help="folder of the environment, or 'none'")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter that creates .venv, or is used for 'none'"
    )
    parser.add_argument("--torch", default="", help="arguments of pip install for torch; default: by machine")
    args = parser.parse_args()
    if args.venv in ("", "none"):
        report_system(args.python)
        return
    venv = (ROOT / args.venv).absolute()
    created = not (venv / "bin" / "python").exists()
    if created:
        create(args.python, venv)
    python = str(venv / "bin" / "python")
    wanted = fingerprint(args.torch)
    stamp = venv / STAMP
    if stamp.exists() and json.loads(stamp.read_text()).get("fingerprint") == wanted:
        say(f"{venv} is up to date")
        return
    install(python, args.torch)
    stamp.write_text(json.dumps({"fingerprint": wanted}) + "\n")
    say(f"{venv} is ready")


def say(text: str) -> None:
    """One line to the person who waits."""
    print(f"[setup] {text}", flush=True)


def stop(text: str) -> None:
    """Leave with a message and no traceback."""
    sys.exit(f"[setup] {text}")


def fingerprint(torch: str) -> str:
    """Changes when a file that decides about the installation does."""
    digest = hashlib.sha256(f"{ROOT} {torch} {os.environ.get('FUSEDCE_BUILD_EXT', '')}".encode())
    sources = [ROOT / "pyproject.toml", ROOT / "setup.py", Path(__file__), *sorted((ROOT / "csrc").rglob("*"))]
    for path in sources:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def create(python: str, venv: Path) -> None:
    """A new virtual environment, or a message that names the package to install."""
    if tuple(probe(python)["python"]) < OLDEST_PYTHON:
        stop(f"{python} is older than Python 3.10; give another one with PYTHON=…")
    if probe(python, modules=("venv", "ensurepip"))["missing"]:
        stop(
            f"{python} cannot create virtual environments: it lacks venv or ensurepip. On Debian and Ubuntu: "
            "apt-get install python3-venv. Or give an environment that exists: VENV=PATH"
        )
    say(f"creating {venv}")
    if subprocess.run([python, "-m", "venv", str(venv)]).returncode:
        # A half-made environment would pass for a finished one the next time.
        shutil.rmtree(venv, ignore_errors=True)
        stop(f"`{python} -m venv {venv}` failed; see its message above")


def probe(python: str, distributions: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> dict:
    """What an interpreter is and has: its version, versions of distributions, which modules cannot be imported."""
    names = json.dumps({"distributions": distributions, "modules": modules})
    # From a folder of no packages, so that a module found is an installed one.
    found = subprocess.run([python, "-I", "-c", PROBE, names], capture_output=True, text=True, cwd=ROOT / "tools")
    if found.returncode:
        stop(f"{python} does not run: {found.stderr.strip()}")
    return json.loads(found.stdout)


def install(python: str, torch: str) -> None:
    """torch, then the build tools, then fusedce itself; the torch and Triton that were there keep their versions."""
    if "torch" in probe(python, modules=("torch",))["missing"]:
        install_torch(python, torch)
    elif torch:
        say("this environment has a torch, which stays; TORCH is not looked at")
    found = probe(python, distributions=KEPT, modules=("triton",))
    kept = [f"{name}=={version}" for name, version in found["versions"].items() if version]
    # torch's GPU wheels brought their Triton already; a CPU build brings none, and the tests want one.
    extras = EXTRAS + (",triton" if found["missing"] else "")
    constraints = Path(python).parent.parent / "fusedce-kept.txt"
    constraints.write_text("\n".join(kept) + "\n")
    say(f"kept as they are: {', '.join(kept)}")
    pip(python, *BUILD_TOOLS, "--constraint", str(constraints))
    pip(python, "--no-build-isolation", "--editable", f"{ROOT}[{extras}]", "--constraint", str(constraints))


def install_torch(python: str, torch: str) -> None:
    """The torch that was asked for, or the one for this machine."""
    if torch:
        pip(python, *shlex.split(torch))
    elif has_gpu():
        say("this machine has a GPU: a torch with its GPU libraries (several GB). TORCH='…' chooses another")
        pip(python, GPU_TORCH)
    else:
        say("this machine has no GPU: a CPU build of torch. TORCH='…' chooses another")
        if not try_pip(python, f"torch=={CPU_TORCH}+cpu"):
            say("pip's settings offer no build that is for CPUs alone: the usual one, which may be large")
            pip(python, f"torch=={CPU_TORCH}")


def has_gpu() -> bool:
    """Whether a driver of NVIDIA or AMD is loaded; asked of the machine, since there is no torch yet to ask."""
    return shutil.which("nvidia-smi") is not None or any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd"))


def try_pip(python: str, *arguments: str) -> bool:
    """Whether `pip install` of the arguments worked."""
    say(f"pip install {' '.join(arguments)}")
    command = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0


def pip(python: str, *arguments: str) -> None:
    """`pip install` of the arguments, or the end."""
    if not try_pip(python, *arguments):
        stop(f"pip could not install {' '.join(arguments)}; its message is above")


def report_system(python: str) -> None:
    """Nothing is installed: what an interpreter lacks is said, and without torch it ends here."""
    needed = ("torch", "numpy", "pytest", "hypothesis", "triton", "tyro", "rich", "matplotlib")
    missing = probe(python, modules=needed)["missing"]
    if "torch" in missing:
        stop(f"{python} has no torch, and VENV=none installs nothing")
    versions = probe(python, distributions=KEPT)["versions"]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    say(f"{python} as it is: {found}; nothing is installed")
    if missing:
        say(f"not there, and needed by parts of this: {', '.join(missing)}")


if __name__ == "__main__":
    main()
