"""Public bug reports of other packages' loading, building and choosing of kernels, as tests of ours. The ids are those
of the reports."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedce
from fusedce import arch
from fusedce.configs import STAGES, fits, tile_for
from fusedce.hip import extension
from fusedce.ops import registry
from tests.house.source import ROOT, paths, read

OURS = [path for path in paths() if path.startswith("fusedce/") and path.endswith(".py")]
FIRST_CALL = """
import torch, fusedce
hidden, weight = torch.ones(3, 4, requires_grad=True), torch.eye(5, 4)
fusedce.linear_cross_entropy(hidden, weight, torch.tensor([0, 4, 2])).backward()
print(hidden.grad.isfinite().all().item())
"""


def calls(path: str) -> set[str]:
    """The names of everything that a file calls."""
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(read(path))) if isinstance(node, ast.Call)}


def test_pytorch_189245_nothing_is_compiled_by_a_c_compiler_at_run_time() -> None:
    """PK-A01, PK-A03: a build that was killed left a lock for which all later ones waited, in a folder that belonged to
    another user. The package builds no C++ and waits for no lock: the one that a trainer takes on the folder of its run
    is refused at once if another has it, and ends with the process. Its one cache, of tiles, is data of the user's own,
    which tests/tune is about."""
    banned = re.compile(r"cpp_extension|FileBaton|\bflock\b|\blockf\b|gettempdir|mkdtemp|expanduser|Path\.home")
    found = {(path, name) for path in OURS for name in calls(path) if banned.search(name)}
    assert found == {("fusedce/env.py", "os.path.expanduser"), ("fusedce/train/lock.py", "fcntl.flock")}
    assert "LOCK_NB" in read("fusedce/train/lock.py")
    assert any(name.endswith("import_module") for name in calls("fusedce/hip/extension.py"))


def test_gsplat_297_several_processes_without_a_home(tmp_path: Path) -> None:
    """PK-A02, PK-A03: processes that start at once met each other's locks. Two, with no folder to write in."""
    nowhere = str(tmp_path / "nothing")
    environment = {"HOME": nowhere, "TMPDIR": nowhere, "XDG_CACHE_HOME": nowhere, "PYTHONPATH": str(ROOT), "PATH": ""}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    started = [
        subprocess.Popen([sys.executable, "-c", FIRST_CALL], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0].strip() for process in started] == ["True"] * 2
    assert not os.path.exists(nowhere)


class Extension:
    """Stands for fusedce._C."""

    def __init__(self, **info: object) -> None:
        self.info = {"vendor": "nvidia", "archs": ["sm_90a"], "torch": torch.__version__, **info}

    def build_info(self) -> dict[str, object]:
        return self.info


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Puts a module in the extension's place on a machine with a GPU of a given capability."""

    def put(module, capability=(9, 0)) -> None:  # type: ignore[no-untyped-def]
        monkeypatch.setattr(extension.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(extension, "module", module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capability)
        monkeypatch.setattr(torch.version, "hip", None)
        extension._not_loadable.cache_clear()
        extension._not_for_device.cache_clear()

    yield put
    monkeypatch.undo()
    extension._not_loadable.cache_clear()
    extension._not_for_device.cache_clear()


def broken() -> None:
    raise ImportError("undefined symbol: _ZN3c10ltERKNS_6SymIntEi")


def test_flash_attention_919_an_extension_of_another_torch(pretend) -> None:  # type: ignore[no-untyped-def]
    """PK-A04: a module built with another torch died of an undefined symbol at import. It is named with both versions
    and what to do, where it is asked for; "auto" takes another backend."""
    for module, words in ((broken, ["undefined symbol"]), (lambda: Extension(torch="2.0.1"), ["2.0.1", "not 2."])):
        pretend(module)
        reason = extension.unavailable()
        assert reason and all(word in reason for word in [*words, extension.BUILD_COMMAND])
        with pytest.raises(RuntimeError, match="'native' was asked for .* cannot run: the native extension"):
            registry.choose("linear_logprob", "native", torch.device("cuda"), torch.bfloat16)
        assert registry.choose("linear_logprob", "auto", torch.device("cuda"), torch.bfloat16).backend != "native"
        with pytest.raises(RuntimeError, match="build_info"):
            extension.build_info()


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (12, 0)])
def test_nanochat_820_the_gpu_is_asked_before_a_kernel_is_promised(capability: tuple[int, int], pretend) -> None:  # type: ignore[no-untyped-def]
    """PK-A07: a fused kernel was announced and died of "no kernel image" at its first launch."""
    pretend(Extension, capability)
    name = f"sm_{capability[0]}{capability[1]}"
    reason = extension.unavailable()
    assert reason and f"has sm_90a, and this GPU is {name}" in reason and "TORCH_CUDA_ARCH_LIST" in reason
    told = fusedce.explain("linear_logprob", "cuda")
    assert f"native: {reason}" in told
    pretend(Extension, (9, 0))
    assert extension.unavailable() is None


@pytest.mark.parametrize(
    "row", [*(arch.nvidia_arch(*c) for c in ((12, 0), (7, 5), (8, 6))), arch.amd_arch("gfx900"), arch.amd_arch("")]
)
def test_nanochat_820_a_gpu_without_a_table_gets_tiles_that_fit_everywhere(row: arch.Arch) -> None:
    """PK-A07: and not those of a larger one."""
    assert row.name == "generic"
    for stage in STAGES:
        for itemsize in (2, 4):
            assert fits(tile_for(stage, row, itemsize), row, itemsize) is None


def test_megablocks_170_versions_are_not_compared_as_strings() -> None:
    """PK-A08: "3.10.0" >= "3.2.0" is False. Nowhere is a version ordered at all: one is the other, or it is not."""
    for path in [p for p in paths() if p.endswith(".py") and not p.startswith("tests/")]:
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.Compare) and "version" in ast.unparse(node).lower():
                ordered = [op for op in node.ops if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)]
                assert not ordered, f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_flash_attention_246_and_xformers_752_what_an_installation_asks_for() -> None:
    """PK-A05, PK-A06: the metadata needs no torch to be read, and installing replaces no torch that is there: torch has
    a lower bound and no other, and nothing that would bring another one along."""
    project = read("pyproject.toml").split("[project]")[1].split("[project.optional-dependencies]")[0]
    (names,) = re.findall(r"^dependencies = (\[.*\])$", project, re.MULTILINE)
    assert [re.split(r"[>=<~!]", name)[0] for name in ast.literal_eval(names)] == ["torch", "numpy"]
    assert re.fullmatch(r"torch>=[\d.]+", ast.literal_eval(names)[0])
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '--name']"
    run = "; import runpy; runpy.run_path('setup.py', run_name='__main__')"
    environment = {**os.environ, "FUSEDCE_BUILD_EXT": "auto"}
    done = subprocess.run([sys.executable, "-c", code + run], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "fusedce", done.stderr
    assert "torch cannot be imported here" in done.stdout
