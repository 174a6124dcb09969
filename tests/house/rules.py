"""The rules of the house that no linter knows, in one table. Each brings a text that breaks it."""

from tests.house.source import Rule, lines_with, longer_than, more_lines_than, more_parameters_than

PYTHON = ("*.py",)
PACKAGE = ("fusedce/*",)
NATIVE = ("csrc/*",)
EVERYTHING = ("*",)
# The first two implement an op of ops/schema.py, whose arguments are what they are; the others are its front doors.
OP_FUNCTIONS = frozenset({
    "linear_logprob", "linear_logprob_backward", "moe_experts_backward", "linear_cross_entropy", "linear_policy_loss",
    "vocab_parallel_cross_entropy", "linear_cross_entropy_heads", "moe_experts", "moe_experts_backward_into",
    "vocab_parallel_logprob", "vocab_parallel_cross_entropy_heads", "vocab_parallel_policy_loss",
})  # fmt: skip
THIS_FILE = ("tests/house/rules.py",)

_LONG = "    x = 1\n"

RULES = (
    Rule("a file has at most 400 lines", EVERYTHING, more_lines_than(400), "x\n" * 401, allowed=("LICENSE", "*.csv")),
    Rule("a function has at most 80 lines", PYTHON, longer_than(80, kernels=False), "def f():\n" + _LONG * 80),
    Rule(
        "a kernel has at most 150 lines",
        PYTHON,
        longer_than(150, kernels=True),
        "@triton.jit\ndef f():\n" + _LONG * 150,
    ),
    Rule(
        "a function has at most 12 parameters",
        PYTHON,
        more_parameters_than(12, OP_FUNCTIONS),
        f"def f({', '.join(f'a{i}' for i in range(13))}): pass",
        allowed=("fusedce/ops/*",),
    ),
    Rule(
        "only env.py reads the environment",
        PACKAGE,
        lines_with(r"\benviron\b|\bgetenv\b"),
        'os.environ["X"]',
        allowed=("fusedce/env.py",),
    ),
    Rule(
        "nothing on a GPU path waits for the GPU",
        ("fusedce/triton/*", "fusedce/hip/*", "fusedce/functional/*", "fusedce/chunked.py"),
        lines_with(r"\.(item|cpu|tolist|numpy|nonzero|synchronize)\("),
        "n = offsets[-1].item()",
    ),
    Rule(
        "native code does not wait for the GPU",
        NATIVE,
        lines_with(r"(Device|Stream)Synchronize"),
        "cudaDeviceSynchronize();",
    ),
    Rule(
        "only wave.cuh knows how wide a wave is",
        NATIVE,
        lines_with(
            r"(?i)0xffffffff\b|warpSize|__shfl|__ballot|__syncwarp|__activemask|warp_size|warp|\blane(s|_id)?\s*=\s*32"
        ),
        "v += __shfl_xor_sync(0xffffffff, v, 16);",
        allowed=("csrc/kernels/wave.cuh",),
    ),
    Rule(
        "device code includes no header of torch",
        ("csrc/kernels/*",),
        lines_with(r"#\s*include\s*[<\"](torch|ATen|c10)"),
        "#include <torch/extension.h>",
    ),
    Rule(
        "Triton kernels have no atomics",
        ("fusedce/triton/*",),
        lines_with(r"\batomic_\w+\("),
        "tl.atomic_add(p, x)",
    ),
    Rule(
        "no code out of data, no shell",
        PYTHON,
        lines_with(
            r"^\s*(import|from)\s+(pickle|dill|marshal|shelve)\b|(?<![.\w])(eval|exec)\(|shell\s*=\s*True|yaml\.load\("
            r"|weights_only\s*=\s*False|os\.system\("
        ),
        "subprocess.run(c, shell=True)",
        allowed=THIS_FILE,
    ),
    Rule(
        "no host of a package registry, no path of one machine",
        EVERYTHING,
        lines_with(
            r"pypi\.org|pythonhosted|download\.pytorch|deb\.debian|npmjs|(^|[\s\"'`=(:])/(work|root|home|opt/(?!rocm))\b"
        ),
        "pip install --find-links /opt/wheels",
        allowed=THIS_FILE,
    ),
    Rule(
        "nothing is left to do", EVERYTHING, lines_with(r"\b(TODO|FIXME|XXX|HACK)\b"), "# TODO: mask", allowed=THIS_FILE
    ),
    Rule(
        "no test is skipped",
        ("tests/*", "bench/*"),
        lines_with(r"\bskip(if)?\(|importorskip|\bxfail\b|mark\.skip"),
        'pytest.skip("no GPU")',
        allowed=THIS_FILE,
    ),
)
