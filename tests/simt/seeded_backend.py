"""`fusedce.hip.seeded` on CPU tensors: its Python and its ops' schemas as they are, the row kernels run on the host,
and torch in the place of Hopper's matrix products. Importing it needs the compiled extension."""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import fusedce._C  # noqa: F401  (registers the ops)
from fusedce import eager
from fusedce.hip import hopper, seeded
from fusedce.options import LogitOptions, Upstream
from tests.paired import assert_close
from tests.simt import host_seeded
from tests.simt.host_seeded import HostRows, load

ROW_OPS = ("target_logits", "seeded_statistics", "seeded_scale")
GEMM_OPS = ("seeded_exponentials", "d_hidden", "d_weight")


def run_on_the_host(kernels: HostRows) -> torch.library.Library:
    """Gives the native ops a CPU implementation, as long as what it returns lives."""
    library = torch.library.Library("fusedce_native", "IMPL")
    for op in ROW_OPS:
        library.impl(op, getattr(kernels, op), "CPU")
    for op in GEMM_OPS:
        library.impl(op, getattr(host_seeded, op), "CPU")
    return library


def check(with_bias: bool, softcap: float, with_temperatures: bool, with_lse: bool, own_d_hidden: bool) -> None:
    """Fails unless `seeded.fused` and the eager twin agree, over several chunks, values and gradients."""
    os.environ["FUSEDCE_WORKSPACE_MB"] = "1"
    hopper.FULL = 0.0 if own_d_hidden else 2.0
    torch.manual_seed(0)
    num_rows, vocab, depth = 300, 1501, 24
    hidden = torch.randn(num_rows, depth).bfloat16()
    weight = (2 * torch.randn(vocab, depth) * depth**-0.5).bfloat16()
    bias = torch.randn(vocab).bfloat16() if with_bias else None
    target = torch.randint(0, vocab, (num_rows,))
    target[::5] = -100
    hidden[::5] = 0.0
    upstream = [torch.randn(()).expand(num_rows), torch.randn(num_rows, 3)[:, 1] if with_lse else None]
    seen = []

    def results(run, dtype: torch.dtype, *more: object) -> list[Tensor]:  # type: ignore[no-untyped-def]
        inputs = (hidden.to(dtype), weight.to(dtype), target, None if bias is None else bias.to(dtype))
        temperatures = torch.linspace(0.5, 2.0, num_rows) if with_temperatures else None
        options = LogitOptions(-100, 0.8, softcap, temperatures)

        def upstream_of(start: int, stop: int, logprob: Tensor, entropy: Tensor, lse: Tensor) -> Upstream:
            assert logprob.shape == lse.shape == (stop - start,) and not entropy.numel()
            seen.append((start, stop))
            d_logprob, d_lse = (grad if grad is None else grad[start:stop].to(lse.dtype) for grad in upstream)
            return Upstream(d_logprob * logprob.exp(), None, d_lse)

        logprob, _, lse, *grads = run(*inputs, options, [True, True, with_bias], upstream_of, *more)
        return [logprob, lse, *grads]

    with tempfile.TemporaryDirectory() as folder:
        library = run_on_the_host(load(64, Path(folder)))
        # What ignored rows hold makes no difference.
        zeros, hidden[::5] = hidden[::5].clone(), float("nan")
        out = results(seeded.fused, torch.bfloat16)
        hidden[::5] = zeros
        del library
    assert len(seen) > 1 and [start for start, _ in seen] == [0, *(stop for _, stop in seen[:-1])]
    gold, twin = (results(eager.linear_fused, dtype, False) for dtype in (torch.float64, torch.bfloat16))
    for name, o, g, t in zip(("logprob", "lse", "d_hidden", "d_weight", "d_bias"), out, gold, twin, strict=True):
        assert_close(o, g, t, name)
