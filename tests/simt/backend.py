"""The native backend on CPU tensors: its Python and its ops' schemas as they are, the kernels run on the host.

Importing it needs the compiled extension. fp32 alone: a CPU has no GEMM with 16-bit operands and an fp32 result.
"""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import fusedce._C  # noqa: F401  (registers the ops)
from fusedce import chunked, eager, hip
from fusedce.options import LogitOptions, Upstream
from tests.paired import assert_close
from tests.simt.host_kernels import HostKernels, Rows, load

NAMES = ("d_hidden", "d_weight", "d_bias")


def run_kernels_on_the_host(kernels: HostKernels) -> torch.library.Library:
    """Gives the native ops a CPU implementation, as long as what it returns lives."""
    library = torch.library.Library("fusedce_native", "IMPL")

    def logprob_rows(logits: Tensor, target: Tensor, bias: Tensor | None, *options_and_out: float | Tensor) -> None:
        for result, tensor in zip(
            kernels.logprob_rows(Rows(logits, target, bias, *options_and_out[:3])), options_and_out[3:], strict=True
        ):
            tensor.copy_(result)

    def d_logits_rows(
        logits: Tensor, target: Tensor, bias: Tensor | None, *options_and_tensors: float | Tensor
    ) -> None:
        rows = Rows(logits, target, bias, *options_and_tensors[:3])
        *upstream, out = options_and_tensors[3:]
        kernels.d_logits_rows(rows, upstream, out)

    def parts_rows(logits: Tensor, target: Tensor, bias: Tensor | None, *options_and_out: float | Tensor) -> None:
        options_and_out[3].copy_(kernels.parts_rows(Rows(logits, target, bias, *options_and_out[:3])))

    library.impl("logprob_rows", logprob_rows, "CPU")
    library.impl("parts_rows", parts_rows, "CPU")
    library.impl("d_logits_rows", d_logits_rows, "CPU")
    return library


def check(num_rows: int, vocab: int, with_bias: bool, temperature: float | None, softcap: float) -> None:
    """Fails unless the native backend and the eager twin agree, over several chunks, values and gradients.

    temperature: None for one of its own for each row.
    """
    os.environ["FUSEDCE_WORKSPACE_MB"] = "1"
    assert len(chunked.row_chunks(num_rows, 4 * vocab)) > 1
    torch.manual_seed(0)
    hidden, weight = torch.randn(num_rows, 24), torch.randn(vocab, 24)
    bias = torch.randn(vocab) if with_bias else None
    target = torch.randint(0, vocab, (num_rows,))
    target[::5] = -100
    hidden[::5] = float("nan")
    upstream = [torch.randn(num_rows), torch.randn(()).expand(num_rows), torch.randn(num_rows, 3)[:, 1]]

    def results(backend, dtype: torch.dtype) -> list[Tensor]:  # type: ignore[no-untyped-def]
        inputs = (hidden.to(dtype), weight.to(dtype), target, None if bias is None else bias.to(dtype))
        row_temperature = None if temperature else torch.linspace(0.5, 2.0, num_rows, dtype=dtype)
        options = LogitOptions(-100, temperature or 1.0, softcap, row_temperature)
        mask, grads = [True, True, with_bias], Upstream(*(g.to(dtype) for g in upstream))
        logprob, entropy, lse, normalizer = backend.linear_logprob(*inputs, options, True)
        saved = (logprob, entropy, normalizer)
        gradients = backend.linear_logprob_backward(grads, *inputs, *saved, options, mask)

        def upstream_of(start: int, stop: int, *_: Tensor) -> Upstream:
            return Upstream(*(g[start:stop] for g in grads))

        return [logprob, entropy, lse, *gradients, *backend.linear_fused(*inputs, options, mask, upstream_of, True)]

    with tempfile.TemporaryDirectory() as folder:
        library = run_kernels_on_the_host(load(64, Path(folder)))
        compared = (results(hip, torch.float32), results(eager, torch.float64), results(eager, torch.float32))
        del library
    names = ("logprob", "entropy", "lse", *NAMES)
    for name, out, gold, twin in zip((*names, *names), *compared, strict=True):
        assert_close(out, gold, twin, name)
