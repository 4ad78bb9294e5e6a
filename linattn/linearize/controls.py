"""Controls that replace a linearized model's attention by something simpler while it is measured, and the entropy of
its weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.attention import LinearAttention, LocalAttention, SoftmaxAttention, SplitHeads, attention_weights
from linattn.feature_maps import GeneralizedFeatureMap
from linattn.linearize.observe import Attended, Batch, evaluating, observe, run
from linattn.linearize.parts import (
    EXACT,
    LinearizedAttention,
    linearized_layers,
    own_attention,
)
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class Call(NamedTuple):
    """A call of a layer's attention `own`, with its output `y`."""

    own: LinearizedAttention
    q: Queries
    k: Keys
    v: Values
    key_mask: KeyMask
    y: Outputs


Control = Callable[[Call], Outputs]
"""Returns what a layer puts out instead of y."""


@contextmanager
def controlled(model: nn.Module, control: Control) -> Iterator[None]:
    """Let every linearized layer put out what the control says. For runs without a cache."""

    def hook(own: nn.Module, args: tuple[Any, ...], options: dict[str, Any], y: Tensor) -> Tensor:
        assert isinstance(own, LinearizedAttention)
        q, k, v = args
        return control(Call(own, q, k, v, options.get("key_mask"), y))

    with ExitStack() as stack:
        for layer in linearized_layers(model).values():
            stack.callback(own_attention(layer).register_forward_hook(hook, with_kwargs=True).remove)
        yield


def window_alone(call: Call) -> Outputs:
    """Let every head attend by softmax to the window only, or to its own token if there is no window."""
    spec = call.own.spec
    return LocalAttention(spec.window or 1, causal=spec.causal)(call.q, call.k, call.v, key_mask=call.key_mask)


def linear_part_off(call: Call) -> Outputs:
    """Leave the window beside linear attention, or the heads with a window; the others put out zeros."""
    if call.own.window is not None:
        return call.own.window(call.q, call.k, call.v, key_mask=call.key_mask)
    inner = call.own.inner
    parts = zip(inner.parts, inner.heads, strict=True) if isinstance(inner, SplitHeads) else [(inner, 1)]
    keep = [head for part, count in parts for head in count * [isinstance(part, EXACT)]]
    return call.y * torch.tensor(keep, device=call.y.device)[:, None, None]


def uniform_attention(call: Call) -> Outputs:
    """Let every query attend equally to all keys that it sees: φ(x) = 1."""
    same = GeneralizedFeatureMap(torch.ones_like)
    return LinearAttention(same, causal=call.own.causal)(call.q, call.k, call.v, key_mask=call.key_mask)


CONTROLS: dict[str, Control] = {
    "window alone": window_alone,
    "linear part off": linear_part_off,
    "uniform attention": uniform_attention,
}


def entropies(model: PreTrainedModel, batch: Batch) -> dict[str, float]:
    """Return the mean entropy of the attention weights of each layer on a `batch`, in bits, by the name of its module.
    Weights of either sign, as the delta rule has them, count by their size."""
    found: dict[str, float] = {}
    linear = {own_attention(layer): name for name, layer in linearized_layers(model).items()}

    def note(call: Attended) -> None:
        if call.name not in linear.values():
            q = call.q * (call.scaling * math.sqrt(call.q.shape[-1]))
            mask = None if call.mask is None else call.mask[:, None]
            weights = attention_weights(SoftmaxAttention(causal=call.causal), q, call.k, key_mask=mask)
            found[call.name] = _entropy(weights, call.mask)

    def hook(own: nn.Module, args: tuple[Any, ...], options: dict[str, Any], y: Tensor) -> None:
        assert isinstance(own, LinearizedAttention)
        q, k, _ = args
        one_hot = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        mask = options.get("key_mask")
        # not called as a module, which would come here again
        weights = own.forward(q, k, one_hot, **options)
        found[linear[own]] = _entropy(weights, None if mask is None else mask[:, 0])

    with ExitStack() as stack:
        for own in linear:
            stack.callback(own.register_forward_hook(hook, with_kwargs=True).remove)
        observe(model, batch, note)
        stack.enter_context(evaluating(model))
        run(model, batch)
    return found


def _entropy(weights: Float[Tensor, "b h n m"], present: Tensor | None) -> float:
    weights = weights.abs()
    shares = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    bits = torch.special.entr(shares).sum(-1).mean(1) / math.log(2)
    return float((bits if present is None or present.shape != bits.shape else bits[present]).mean())
