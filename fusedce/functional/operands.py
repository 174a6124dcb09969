"""What the functions of the head check, and how they bring their operands into the ops' form."""

import torch
from torch import Tensor

from fusedce import checks
from fusedce.functional.autocast import autocast


def head_operands(
    op: str,
    names: tuple[str, str, str],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    vocab_size: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """hidden, weight and bias checked, of one dtype and without padded words; target checked against them."""
    hidden, weight, bias = head_weights(op, names, hidden, weight, bias, vocab_size)
    checks.tensor(op, "target", target, (torch.int64,))
    checks.shape(op, "target", target, hidden.shape[:-1], f"{names[0]}'s shape without D")
    checks.same_device(op, **{names[0]: hidden}, target=target)
    return hidden, weight, bias


def head_weights(
    op: str,
    names: tuple[str, str, str],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    vocab_size: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`head_operands` without a target."""
    hidden, weight, bias = autocast(hidden, weight, bias)
    checks.tensor(op, names[0], hidden, checks.FLOATS)
    checks.tensor(op, names[1], weight, checks.FLOATS)
    if hidden.dim() == 0:
        raise ValueError(checks.wrong(op, names[0], hidden, "(..., D)"))
    checks.shape(op, names[1], weight, (None, hidden.shape[-1]), "(V, D)")
    checks.positive(op, V=weight.shape[0], D=weight.shape[1])
    if bias is not None:
        checks.tensor(op, names[2], bias, checks.FLOATS)
        checks.shape(op, names[2], bias, (weight.shape[0],), "(V,)")
    checks.same_device(op, **{names[0]: hidden, names[1]: weight, names[2]: bias})
    if vocab_size is not None:
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or not 1 <= vocab_size <= weight.shape[0]:
            expected = f"an int from 1 to V = {weight.shape[0]}"
            raise ValueError(f"fusedce.{op}: argument 'vocab_size' is {vocab_size!r}; expected {expected}")
        weight, bias = weight[:vocab_size], None if bias is None else bias[:vocab_size]
    return hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)


def row_temperature(
    op: str, temperature: float | Tensor, target: Tensor, letters: str = "target's shape"
) -> tuple[float, Tensor | None]:
    """The number, and the (N,) tensor that takes its place, if there is one, of target's shape, for which `letters` is
    another name."""
    if not isinstance(temperature, Tensor):
        checks.positive_number(op, "temperature", temperature)
        return float(temperature), None
    check_weight(op, "temperature", temperature, target.shape, letters, target.device)
    dtype = torch.float64 if temperature.dtype == torch.float64 else torch.float32
    return 1.0, temperature.detach().reshape(-1).to(dtype)


def kept_temperature(rows: Tensor | None, target: Tensor, ignore_index: int) -> Tensor | None:
    """Rows that take no part, whose temperature may be anything, get 1; target has as many elements as rows."""
    return None if rows is None else torch.where(target.reshape(-1) != ignore_index, rows, 1.0)


def check_options(op: str, softcap: float | None, ignore_index: int, check: str) -> None:
    """TypeError or ValueError for an option that no function of the head takes."""
    if softcap is not None:
        checks.positive_number(op, "softcap", softcap)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"fusedce.{op}: argument 'ignore_index' has {checks.describe(ignore_index)}; expected an int")
    checks.one_of(op, "check", check, ("auto", "sync"))


def check_weight(op: str, name: str, value: Tensor, sizes: tuple[int, ...], letters: str, device: torch.device) -> None:
    """TypeError or ValueError unless `value` is a float tensor of these sizes on `device`."""
    checks.tensor(op, name, value, checks.FLOATS)
    checks.shape(op, name, value, sizes, letters)
    if value.device != device:
        raise ValueError(f"fusedce.{op}: argument '{name}' is on {value.device}; expected {device}")
