"""Bytes a token of what a layer keeps for its backward and of what its backward needs beside it; bf16 but for a few
numbers a head. Read off the ops of `fusedce.train.model`, tensor by tensor.
"""

from dataclasses import dataclass

from fusedce.plan.layout import Layout
from fusedce.plan.models import Model

BF16 = 2
FP32 = 4


@dataclass(frozen=True)
class Widths:
    """Bytes a token on one rank, for the largest kind of layer, and the mean over layers.

    stream: the residual stream, a layer's input; attention_kept, moe_kept: what the two halves keep beside it, of the
    experts a chunk's; mean_kept: both, averaged over the kinds of layers, until the backward; chunk_kept: what a layer
    in chunks makes again of one chunk.

    attention_forward, attention_backward: all that is alive in that half while its queries are rotated, the widest
    point of both directions; rotation: of that, what the layer has not kept already. moe_backward: gradients beside
    what is kept, while the experts' backward runs; moe_inside: what their kernels allocate themselves.
    """

    stream: float
    attention_kept: float
    moe_kept: float
    mean_kept: float
    chunk_kept: float
    attention_forward: float
    attention_backward: float
    rotation: float
    moe_backward: float
    moe_inside: float


def widths(model: Model, layout: Layout) -> Widths:
    """The widths of a model's layers under a layout. Tensor parallelism is taken with sequence parallelism: all is
    divided.
    """
    tp = layout.tp
    stream = BF16 * model.hidden / tp
    full = _attention(model) / tp
    linear = _linear_attention(model) / tp
    base = 2 * stream + FP32
    dense = base + BF16 * 3 * model.dense_ffn / tp
    # A layer in chunks keeps its tokens only, and makes one chunk at a time again.
    rows = _rows(model, layout)
    alone, again = (base, rows / layout.chunks) if layout.chunks > 1 else (base + rows, 0.0)
    moe, layers = model.moe_layers, model.layers
    mixed = ((layers - model.linear_layers) * full + model.linear_layers * linear) / layers
    # queries in bf16: as projected, normed, their gradient; in fp32: two or three products with the rotation
    query, kv = BF16 * model.query / tp, BF16 * model.kv / tp
    rotated = FP32 * model.query / tp
    return Widths(
        stream=stream,
        attention_kept=max(full, linear),
        moe_kept=max(alone + again if moe else 0.0, dense if model.dense_layers else 0.0),
        mean_kept=mixed + (moe * alone + model.dense_layers * dense) / layers,
        chunk_kept=again,
        attention_forward=2 * stream + 2 * query + kv + 3 * rotated,
        attention_backward=3 * stream + 3 * query + 2 * kv + 2 * rotated,
        rotation=2 * stream + 2 * rotated,
        moe_backward=_experts_backward(model, layout),
        moe_inside=_experts_inside(model, layout),
    )


def _attention(model: Model) -> float:
    """The normed input; queries and keys before and after norm and rotation; values; the output; a few fp32 numbers a
    head (root mean squares, log-sum-exp).
    """
    latent = model.latent
    width = model.hidden + 3 * model.query + 3 * model.kv
    if latent:
        # Low-rank inputs before and after their norms; keys and values leave one product; keys are put together.
        width = model.hidden + 2 * (latent.q_rank + latent.kv_rank) + 2 * model.query + 2 * model.kv
        width += model.heads * (latent.nope_dim + 2 * latent.v_dim)
    if model.gated:
        width += 2 * model.query
    return BF16 * width + FP32 * (1 + 2 * model.heads + model.kv_heads)


def _linear_attention(model: Model) -> float:
    """The normed input, queries, keys and values before and after the convolution, the gate, the output before and
    after its norm, and a 64-wide block of scores a head.
    """
    part = model.linear
    if part is None:
        return 0.0
    mixed = 2 * part.key + part.value
    return BF16 * (model.hidden + 2 * mixed + 3 * part.value + 64 * part.value_heads) + FP32 * 2 * part.value_heads


def _rows(model: Model, layout: Layout) -> float:
    """What routing and experts keep: logits (bf16), chosen ids (int64), weights (fp32) and the plan (two int32); of
    each of a token's rows the pre-activations, and with an exchange the rows that came, with ids, weights and a plan
    of their own; the shared expert's gate, up and product.
    """
    row = BF16 * 2 * model.ffn / layout.tp + 8 + FP32 + 8
    if layout.ep > 1:
        row += BF16 * model.hidden / layout.tp + 8 + FP32 + 8
    return BF16 * model.experts + model.top_k * row + BF16 * 3 * model.shared_ffn / layout.tp


def _experts_backward(model: Model, layout: Layout) -> float:
    """Gradients of a chunk's rows, twice with an exchange: as they came and as they go; and of the stream."""
    stream = BF16 * model.hidden / layout.tp
    if not model.moe_layers:
        return 2 * stream + BF16 * 2 * model.dense_ffn / layout.tp
    rows = stream * model.top_k * (2 if layout.ep > 1 else 1)
    return stream + (rows + stream) / layout.chunks


def _experts_inside(model: Model, layout: Layout) -> float:
    """Inside the expert op's backward: gradients of the pre-activations, the weighted activations, rows of d_hidden."""
    if not model.moe_layers:
        return 0.0
    row = BF16 * (3 * model.ffn + model.hidden) / layout.tp
    return model.top_k * row / layout.chunks
