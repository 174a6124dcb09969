"""FLOPs of a token by part, and the two honest MFUs. A multiplication and an addition are two FLOPs."""

from dataclasses import dataclass

from fusedce.plan.models import Model

# The backward of a matrix product is two products; that of fused attention has the scores once more: five of the
# forward's two.
BACKWARD_GEMM = 2.0
BACKWARD_ATTENTION = 2.5


@dataclass(frozen=True)
class Forward:
    """FLOPs of one token's forward, averaged over a sequence, all layers together.

    projections: attention's and linear attention's weights, router, shared and dense feed-forward; experts: the routed
    ones; scores: query · key and probabilities · value, half the square because the mask is causal; recurrence: the
    state of linear attention; head: the logits.
    """

    projections: float
    experts: float
    scores: float
    recurrence: float
    head: float

    @property
    def gemms(self) -> float:
        """2N: everything that is a weight times a token."""
        return self.projections + self.experts + self.head

    @property
    def total(self) -> float:
        """All parts, causal."""
        return self.gemms + self.scores + self.recurrence

    @property
    def model(self) -> float:
        """Forward and backward of the model's own work, the backward counted as two forwards: 6N and three times
        the attention. What is computed again does not count.
        """
        return (1 + BACKWARD_GEMM) * self.total

    def not_causal(self) -> float:
        """`model` where the whole square of scores is counted, as some do: the same run reads up to twice as fast."""
        return self.model + (1 + BACKWARD_GEMM) * self.scores

    def executed(self, recompute: float) -> float:
        """What runs: attention's backward has its scores again, and a share `recompute` of the layers runs its
        forward twice. The head is not computed again: its loss has the gradients ready.
        """
        layers = self.total - self.head
        backward = BACKWARD_GEMM * (self.gemms + self.recurrence) + BACKWARD_ATTENTION * self.scores
        return self.total + backward + recompute * layers


def forward(model: Model, seq_len: int) -> Forward:
    """The FLOPs of a token's forward in sequences of `seq_len` tokens."""
    per_pair = 2 * (model.query + model.value_out)
    window = min(model.window or seq_len, seq_len)
    # Of a window, the first tokens see less: the mean over the sequence is w − w²/2S.
    in_window = window - window * window / (2 * seq_len)
    scores = per_pair * (model.full_layers * seq_len / 2 + model.sliding_layers * in_window)
    state = model.linear.value_heads * model.linear.key_dim * model.linear.value_dim if model.linear else 0
    return Forward(
        projections=2.0 * model.dense_params,
        experts=2.0 * model.moe_layers * model.top_k * model.expert_params,
        scores=float(scores),
        # decay, read, correct, write: four passes of a multiplication and an addition over the state
        recurrence=8.0 * model.linear_layers * state,
        head=2.0 * model.head_params,
    )


def mfu(flops_per_token: float, tokens_per_second: float, peak: float) -> float:
    """The share of a card's dense peak: FLOPs a token, tokens a second and card, FLOP/s."""
    return flops_per_token * tokens_per_second / peak
