"""fuse_lm_head: the loss of a transformers causal LM without its logits, for every architecture's own forward.

While a call with labels runs, the head returns a placeholder for its logits and `loss_function` takes it. In between
the model's own forward may scale, cap and cast the placeholder, which is written down as temperature and softcap;
anything else that it does with logits is refused by name. So nothing here knows an architecture, and what a forward
adds to the loss, such as a router's auxiliary loss, it still adds itself.

It relies on transformers ≥ 5: on `get_output_embeddings`, on the property `loss_function`, and on what ForCausalLMLoss
does with labels, shift_labels, num_items_in_batch and ignore_index.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedce import checks
from fusedce.functional import LogProb, linear_cross_entropy, linear_logprob
from fusedce.integrations.logits import Logits
from fusedce.integrations.transformers_experts import ExpertsHandle, fuse_experts

__all__ = [
    "ExpertsHandle",
    "Handle",
    "TokenLogprobs",
    "fuse_experts",
    "fuse_lm_head",
    "token_logprobs",
    "unfuse_lm_head",
]


class Handle:
    """What `fuse_lm_head` returns: `undo()` takes it back, and so does leaving it as a context manager."""

    def __init__(self, fused: "_FusedForward", backend: str, in_eval: bool) -> None:
        self._fused, self.backend, self.in_eval = fused, backend, in_eval

    def undo(self) -> None:
        """Take this handle's part back; the last one restores the model, attribute by attribute. Twice is once.

        Where another library has since put its own wrapper over `model.forward`, that wrapper stays, over the stock
        forward.
        """
        self._fused.drop(self)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


class TokenLogprobs(NamedTuple):
    """What `token_logprobs` returns. The first three have labels' shape (B, S) and are fp32."""

    logprob: Tensor
    entropy: Tensor | None
    lse: Tensor
    output: Any  # the model's own, for its aux_loss or cache; its logits are None


def fuse_lm_head(model: nn.Module, *, backend: str = "auto", in_eval: bool = True) -> Handle:
    """Let `model(..., labels=labels)` compute its loss by `fusedce.linear_cross_entropy`, without logits.

    The output then has `loss`, in fp32, and everything else that the stock forward puts there, but `logits` is None
    (and left out of a tuple). Without labels the stock path runs: the same code on the same modules, so generation has
    the same bits. `num_items_in_batch`, `shift_labels`, `logits_to_keep` and labels of −100 mean what they mean to
    transformers' ForCausalLMLoss; a batch without any label has loss 0 where transformers gives NaN.

    Args:
        model: a causal LM of transformers ≥ 5 whose head is a plain nn.Linear, tied or not, or a PeftModel around one.
        backend: see `fusedce.linear_cross_entropy`.
        in_eval: False leaves the stock path, with logits, to calls in eval mode: for a Trainer's compute_metrics.

    Returns:
        A `Handle` to undo it, also a context manager. On a model that is fused already the newest handle's options
        hold, and each handle takes back only itself.

    Raises:
        TypeError: the model has no output embeddings, its head is not a plain nn.Linear (LoRA on the head, a quantized
            one, an offloaded one), or its loss is not transformers' ForCausalLMLoss. The same at a call, where the
            head has changed since.
        NotImplementedError, at the first call with labels: the forward does something else to its logits than to
            scale, cap and cast them, or computes its loss without `self.loss_function`.

    Memory: that of `fusedce.linear_cross_entropy` in place of the logits, their fp32 copy and their gradients.

    `model.forward` becomes an attribute of the instance; state_dict, config and class stay as they are. deepcopy and
    pickle copy it with the model, so that the copy is fused too (`unfuse_lm_head(copy)` undoes it). Calls of one model
    from several threads at once are not supported, nor is nn.DataParallel, which copies attributes of instances.
    """
    target = _causal_lm(model)
    _plain_head(target)
    fused = vars(target).get("forward")
    if not isinstance(fused, _FusedForward):
        fused = _FusedForward(target)
        target.forward = fused
    handle = Handle(fused, backend, in_eval)
    fused.handles.append(handle)
    return handle


def unfuse_lm_head(model: nn.Module) -> None:
    """Undo every `fuse_lm_head` of a model: also of a copy or an unpickled one, for which there is no handle."""
    fused = vars(_causal_lm(model)).get("forward")
    if isinstance(fused, _FusedForward):
        for handle in tuple(fused.handles):
            fused.drop(handle)


def token_logprobs(
    model: nn.Module,
    *,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = True,
    **inputs: Any,
) -> TokenLogprobs:
    """Log-prob and entropy of every label under a fused model, through whatever wraps it, without the logits.

    `model(**inputs, labels=labels)` runs once, so that DDP, PEFT and autocast around the model do their part, and the
    architecture's own scaling and capping of the logits count.

    Args:
        model: fused by `fuse_lm_head`, or a module that calls a fused model.
        labels: (B, S) int64, −100 where a token takes no part. Unless `shift_labels` is among the inputs, position t
            holds the results of labels[:, t + 1] and the last position 0, as the loss of transformers shifts them.
        temperature, with_entropy: see `fusedce.linear_logprob`; a tensor (B, S) has the temperature of the logits at t.
        inputs: the model's other arguments.

    Returns:
        `TokenLogprobs(logprob, entropy, lse, output)`, differentiable as `fusedce.linear_logprob` is; 0 at −100.

    Raises:
        RuntimeError: no fused model computed a loss in the call.
    """
    # The results come back as the model's output: FSDP and DDP hook their backward to the tensors that they find there.
    out = model(**inputs, labels=labels, **{_REQUEST: _Request(temperature, with_entropy)})
    if not isinstance(out, TokenLogprobs):
        raise RuntimeError(f"fusedce.token_logprobs: {type(model).__name__} holds no model fused by fuse_lm_head")
    return out


_Result = TypeVar("_Result")
_REQUEST = "fusedce_request"  # the argument that brings a _Request through the wrappers of a model


@dataclass(frozen=True)
class _Request:
    """Asks the fused call for log-probs beside its loss."""

    temperature: float | Tensor
    with_entropy: bool


class _FusedForward:
    """Stands for `model.forward`, as an attribute of the instance; a class, so that deepcopy and pickle follow it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.replaced: Callable[..., Any] | None = vars(model).get("forward")
        self.handles: list[Handle] = []

    @property
    def stock(self) -> Callable[..., Any]:
        return self.replaced or functools.partial(type(self.model).forward, self.model)

    @property
    def __signature__(self) -> inspect.Signature:
        # the Trainer chooses the columns of a dataset by it
        return inspect.signature(self.stock)

    def drop(self, handle: Handle) -> None:
        if handle in self.handles:
            self.handles.remove(handle)
        if not self.handles and vars(self.model).get("forward") is self:
            del self.model.forward
            if self.replaced is not None:
                self.model.forward = self.replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = kwargs.pop(_REQUEST, None)
        labels = kwargs.get("labels")
        if args and labels is None:
            labels = inspect.signature(self.stock).bind_partial(*args, **kwargs).arguments.get("labels")
        handle = self.handles[-1] if self.handles else None
        if labels is None or handle is None:
            return self.stock(*args, **kwargs)
        if request is None and not (handle.in_eval or self.model.training):
            return self.stock(*args, **kwargs)
        head = _plain_head(self.model)
        call = _FusedCall(type(self.model).__name__, head, handle.backend, request)
        with _attribute(head, "forward", call.project), _attribute(self.model, "_loss_function", call.loss):
            return call.finish(self.stock(*args, **kwargs))


@contextmanager
def _attribute(owner: nn.Module, name: str, value: object) -> Iterator[None]:
    """`owner.name = value` for the duration, and no attribute left where there was none."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            # not delattr: torch.compile would replay the deletion of an attribute that it left out setting
            vars(owner).pop(name, None)


class _FusedCall:
    """One call with labels: the head's forward, the loss function, and the output without the placeholder."""

    def __init__(self, model_name: str, head: nn.Linear, backend: str, request: _Request | None) -> None:
        self.model_name, self.head, self.backend, self.request = model_name, head, backend, request
        self.has_loss = False
        self.logprob: LogProb | None = None

    def project(self, hidden: Tensor) -> Logits:
        return Logits(hidden.to(self.head.weight.device), self.head, self.model_name)

    def loss(
        self,
        logits: Logits,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """As transformers' ForCausalLMLoss, from the hidden states. Loss: () fp32."""
        if not isinstance(logits, Logits):
            raise NotImplementedError(f"fusedce: {self.model_name} computes a loss of logits that are not its head's")
        if shift_labels is None:
            shift_labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
        target = shift_labels.reshape(-1).to(logits.device)
        options = dict(logits.options(), ignore_index=ignore_index, backend=self.backend)
        self.has_loss = True
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(logits.device)
        if self.request is not None:
            self.logprob = self._logprob(self.request, logits.hidden, target, shift_labels.shape, options)
            counted = (target != ignore_index).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            return -self.logprob.logprob.sum() / counted
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = self._with_head(
            lambda hidden, weight, bias: linear_cross_entropy(
                hidden, weight, target, linear_bias=bias, reduction=reduction, **options
            ),
            logits.hidden,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def _logprob(
        self, request: _Request, hidden: Tensor, target: Tensor, shape: torch.Size, options: dict[str, Any]
    ) -> LogProb:
        """The results of hidden (..., D) and target (N,), in shape (B, S)."""
        temperature = request.temperature * options.pop("temperature")
        if isinstance(temperature, Tensor):
            temperature = temperature.reshape(-1)
        options.update(temperature=temperature, with_entropy=request.with_entropy)
        logprob, entropy, lse = self._with_head(
            lambda rows, weight, bias: linear_logprob(rows, weight, target, bias=bias, **options), hidden
        )
        entropy = None if entropy is None else entropy.reshape(shape)
        return LogProb(logprob.reshape(shape), entropy, lse.reshape(shape))

    def _with_head(self, compute: Callable[[Tensor, Tensor, Tensor | None], _Result], hidden: Tensor) -> _Result:
        """compute(hidden (N, D), weight, bias)."""
        head, hidden = self.head, hidden.reshape(-1, hidden.shape[-1])
        if not checks.is_distributed(head.weight):
            return compute(hidden, head.weight, head.bias)
        # The head is a group of FSDP2 that has been resharded: a second call of the module gathers it again, and hooks
        # its backward to what comes out.
        with _attribute(head, "forward", lambda rows: compute(rows, head.weight, head.bias)):
            return head(hidden)

    def finish(self, output: Any) -> Any:
        if not self.has_loss:
            raise NotImplementedError(
                f"fusedce: {self.model_name}.forward took labels but called no self.loss_function"
            )
        if isinstance(output, Mapping):
            output = type(output)(**{k: v for k, v in output.items() if not isinstance(v, Logits)})
        else:
            output = tuple(v for v in output if not isinstance(v, Logits))
        if self.logprob is None:
            return output
        logprob, entropy, lse = self.logprob
        return TokenLogprobs(logprob, entropy, lse, output)


def _causal_lm(model: nn.Module) -> nn.Module:
    """The causal LM in a PeftModel, or the model itself."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def _plain_head(model: nn.Module) -> nn.Linear:
    """The model's head, if the fused call can take its place, and TypeError if not."""
    name = type(model).__name__
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if head is None:
        raise TypeError(
            f"fusedce.fuse_lm_head: {name} has no output embeddings; expected a causal LM of transformers, "
            "before DDP, FSDP1 or torch.compile wrap it"
        )
    kind = type(head)
    if not isinstance(head, nn.Linear) or kind.forward is not nn.Linear.forward:
        raise TypeError(f"fusedce.fuse_lm_head: the head of {name} is a {kind.__name__}; expected a plain nn.Linear")
    if "forward" in vars(head):
        raise TypeError(
            f"fusedce.fuse_lm_head: the forward of the head of {name} was replaced, as tensor parallelism and "
            "device_map do; expected a plain nn.Linear"
        )
    if head.weight.is_meta:
        raise TypeError(f"fusedce.fuse_lm_head: the head of {name} is on the meta device; expected a loaded weight")
    loss = getattr(model, "loss_function", None)
    if getattr(loss, "__name__", None) != "ForCausalLMLoss":
        raise TypeError(
            f"fusedce.fuse_lm_head: the loss of {name} is {getattr(loss, '__name__', loss)!r}; "
            "expected transformers' ForCausalLMLoss"
        )
    return head
