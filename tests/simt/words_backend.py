"""`fusedce.hip.words` and `linear_parts` on CPU tensors: their Python and their ops' schemas as they are, the kernels
run on the host. Importing it needs the compiled extension.

fp32 alone: a CPU has no GEMM with 16-bit operands and an fp32 result.
"""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import fusedce._C  # noqa: F401  (registers the ops)
from fusedce import eager, hip
from fusedce.options import LogitOptions
from tests.paired import assert_close
from tests.simt import host_kernels, host_words
from tests.simt.backend import run_kernels_on_the_host

NAMES = ("logprob", "normalizer", "d_hidden", "d_weight", "d_bias", "largest", "sum", "gaps", "target's logit")
IGNORE = -1  # what the backward itself has for "no target"


def check(with_bias: bool, temperature: float | None, softcap: float) -> None:
    """Fails unless the native backend and the eager twin agree, over several chunks, values and gradients.

    temperature: None for one of its own for each row.
    """
    os.environ["FUSEDCE_WORKSPACE_MB"] = "1"
    torch.manual_seed(0)
    num_rows, vocab, slots = 300, 1001, 6
    hidden, weight = torch.randn(num_rows, 24), torch.randn(vocab, 24)
    bias = torch.randn(vocab) if with_bias else None
    ids = torch.randint(0, vocab, (slots, num_rows)).t()
    ids[::3, 4], ids[1::7, 2], ids[::5] = ids[::3, 0], IGNORE, IGNORE
    target = torch.where(torch.arange(num_rows) % 2 == 0, ids[:, 0], vocab)
    target[::5] = IGNORE
    d_lse = torch.randn(num_rows)
    rates, mask = torch.randn(num_rows, 2 * slots)[:, ::2], [True, True, with_bias]

    def results(backend, dtype: torch.dtype) -> list[Tensor]:  # type: ignore[no-untyped-def]
        h, w, b = (None if t is None else t.to(dtype) for t in (hidden, weight, bias))
        row_temperature = None if temperature else torch.linspace(0.5, 2.0, num_rows, dtype=dtype)
        options = LogitOptions(IGNORE, temperature or 1.0, softcap, row_temperature)
        saved = backend.linear_logprob_of(h, w, ids, b, options)
        grads = backend.linear_logprob_of_backward(
            rates.to(dtype), d_lse.to(dtype), h, w, ids, b, *saved, options, mask
        )
        parts = backend.linear_parts(h, w, target, b, options, True)
        kept = target != IGNORE
        assert not backend.linear_parts(h, w, target, b, options, False)[kept, 2].any(), "no entropy, no gaps"
        return [saved[0], saved[2], *grads, *(part[kept] for part in parts.unbind(1))]

    with tempfile.TemporaryDirectory() as folder:
        library = run_kernels_on_the_host(host_kernels.load(64, Path(folder)))
        words = host_words.load(64, Path(folder))
        for op in ("argmax_rows", "selected_logits", "selected_gradient"):
            library.impl(op, getattr(words, op), "CPU")
        # What rows without a word hold makes no difference.
        kept, hidden[::5] = hidden[::5].clone(), float("nan")
        out = results(hip, torch.float32)
        hidden[::5] = kept
        assert torch.equal(hip.linear_argmax(hidden, weight, bias), eager.linear_argmax(hidden, weight, bias))
        del library
    gold, twin = (results(eager, dtype) for dtype in (torch.float64, torch.float32))
    for name, o, g, t in zip(NAMES, out, gold, twin, strict=True):
        finite = g.isfinite()
        assert torch.equal(o[~finite].double(), g[~finite]), name
        assert_close(o[finite], g[finite], t[finite], name)
