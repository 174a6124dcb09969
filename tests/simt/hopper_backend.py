"""`fusedce.hip.hopper` on CPU tensors: its Python and its ops' schemas as they are, the merge of sums run on the host,
and torch in the place of Hopper's matrix products. Importing it needs the compiled extension."""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import fusedce._C  # noqa: F401  (registers the ops)
from fusedce import eager
from fusedce.hip import hopper
from fusedce.options import LogitOptions, Upstream
from tests.paired import assert_close
from tests.simt import host_seeded, host_sums

NAMES = ("logprob", "entropy", "lse", "d_hidden", "d_weight", "d_bias")


def check(with_bias: bool, softcap: float, with_temperatures: bool, entropy: str, own_d_hidden: bool) -> None:
    """Fails unless `hopper` and the eager twin agree, over several chunks of both passes, values and gradients.

    entropy: "none", "value" or "gradient".
    """
    os.environ["FUSEDCE_WORKSPACE_MB"] = "1"
    hopper.FULL, hopper.SUMS_BYTES = 0.0 if own_d_hidden else 2.0, 10_000
    torch.manual_seed(0)
    num_rows, vocab, depth = 300, 1501, 24
    hidden = torch.randn(num_rows, depth).bfloat16()
    weight = (2 * torch.randn(vocab, depth) * depth**-0.5).bfloat16()
    bias = torch.randn(vocab).bfloat16() if with_bias else None
    target = torch.randint(0, vocab, (num_rows,))
    target[::5] = -100
    upstream = [torch.randn(()).expand(num_rows), torch.randn(num_rows), torch.randn(num_rows, 3)[:, 1]]
    if entropy != "gradient":
        upstream[1] = None
    with_entropy = entropy != "none"

    def results(forward, backward, dtype: torch.dtype) -> list[Tensor]:  # type: ignore[no-untyped-def]
        inputs = (hidden.to(dtype), weight.to(dtype), target, None if bias is None else bias.to(dtype))
        options = LogitOptions(-100, 0.8, softcap, torch.linspace(0.5, 2.0, num_rows) if with_temperatures else None)
        logprob, of_entropy, lse, normalizer = forward(*inputs, options, with_entropy)
        assert of_entropy.numel() == (num_rows if with_entropy else 0)
        grads = Upstream(*(None if g is None else g.to(lse.dtype) for g in upstream))
        gradients = backward(grads, *inputs, logprob, of_entropy, normalizer, options, [True, True, with_bias])
        return [logprob, of_entropy, lse, *gradients]

    with tempfile.TemporaryDirectory() as folder:
        library = torch.library.Library("fusedce_native", "IMPL")
        library.impl("merged_sums", host_sums.load(64, Path(folder)).merged_sums, "CPU")
        for op in ("logit_sums", "logit_gradient"):
            library.impl(op, getattr(host_sums, op), "CPU")
        for op in ("d_hidden", "d_weight"):
            library.impl(op, getattr(host_seeded, op), "CPU")
        # What ignored rows hold makes no difference.
        kept, hidden[::5] = hidden[::5].clone(), float("nan")
        out = results(hopper.logprob, hopper.logprob_backward, torch.bfloat16)
        hidden[::5] = kept
        del library
    plain = (eager.linear_logprob, eager.linear_logprob_backward)
    gold, twin = (results(*plain, dtype) for dtype in (torch.float64, torch.bfloat16))
    for name, o, g, t in zip(NAMES, out, gold, twin, strict=True):
        assert_close(o, g, t, name)
