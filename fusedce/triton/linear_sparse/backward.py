"""The backward over what counts. All decisions fall on the device: each kernel reads whether, and over how much, it
runs."""

import torch
from torch import Tensor

from fusedce import budget, chunked
from fusedce.options import LogitOptions, Upstream
from fusedce.rows import row_gradient
from fusedce.triton.common import unit_rows
from fusedce.triton.linear_ce.backward import row_numbers
from fusedce.triton.linear_ce.logits import row_slopes
from fusedce.triton.linear_sparse.dense import Problem, new_buffer, products, words_of_chunk
from fusedce.triton.linear_sparse.sparse import sparse_gradients


def linear_logprob_sparse_backward(
    upstream: Upstream,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
    mass: Tensor,
    options: LogitOptions,
    gradient_budget: float,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d_hidden, d_weight, d_bias and the certificate (4,). See `fusedce.budget`."""
    hidden, weight, target = unit_rows(hidden), unit_rows(weight), target.contiguous()
    num_rows, vocab = hidden.shape[0], weight.shape[0]
    gradient = row_gradient(upstream, logprob, entropy, target, options)
    scale = chunked.batch_scale(*gradient)
    scaled = gradient.over(scale)
    total = budget.reference(scaled.on_probs, scaled.on_target, logprob)
    # Without rows no kernel writes anything.
    new = weight.new_empty if num_rows else weight.new_zeros
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    grads = [new(shape if wanted else (0,)) for shape, wanted in zip(shapes, mask, strict=True)]
    is_sparse, lost = torch.zeros_like(total, dtype=torch.bool), torch.zeros_like(total)
    if num_rows:
        numbers = row_numbers(scaled, entropy, normalizer, row_slopes(options, num_rows, hidden))
        has_entropy = gradient.on_surprise is not None
        problem = Problem(hidden, weight, bias, target, options, numbers, has_entropy, scale, *grads)
        # NaN is not 0: a row that has it has a gradient.
        live = (numbers[:, 3 : 6 if has_entropy else 5] != 0).any(1)
        num_live = live.sum(0, keepdim=True)
        count = num_live.int()
        buffer = new_buffer(hidden, words_of_chunk(hidden, weight))
        if gradient_budget:
            inside = live & (target >= 0) & (target < vocab)
            own_tile = torch.where(inside, target // budget.WORD_TILE, -1).int()
            is_sparse, lost = sparse_gradients(problem, mass, num_live, own_tile, gradient_budget * total, buffer)
            count = torch.where(is_sparse, -1, count)
        order = torch.argsort(live, descending=True, stable=True)
        place = torch.where(live, live.cumsum(0) - 1, -1)
        products(problem, order, place, count, buffer)
    d_hidden, d_weight, d_bias = grads
    return d_hidden, d_weight, d_bias, budget.certificate(total, lost, is_sparse, scale)
