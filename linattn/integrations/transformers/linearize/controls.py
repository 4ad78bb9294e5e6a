"""Controls that replace a linearized model's attention by something simpler while it is measured, and the entropy of
its weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.attention import (
    LinearAttention,
    LocalAttention,
    SoftmaxAttention,
    SplitHeads,
    attention_weights,
    named_attention,
)
from linattn.feature_maps.base import FeatureMap, Features
from linattn.integrations.transformers.linearize.observe import Attended, Batch, evaluating, observe, run
from linattn.integrations.transformers.linearize.parts import LinearizedAttention, linearized_layers, own_attention

Control = Callable[[LinearizedAttention, Tensor, Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""Returns what a layer puts out instead of y, from the layer, q, k, v, the key mask and y."""


@contextmanager
def controlled(model: nn.Module, control: Control) -> Iterator[None]:
    """Let every linearized layer put out what the control says. For runs without a cache."""

    def hook(own: nn.Module, args: tuple[Any, ...], options: dict[str, Any], y: Tensor) -> Tensor:
        assert isinstance(own, LinearizedAttention)
        q, k, v = args
        return control(own, q, k, v, options.get("key_mask"), y)

    with ExitStack() as stack:
        for layer in linearized_layers(model).values():
            stack.callback(own_attention(layer).register_forward_hook(hook, with_kwargs=True).remove)
        yield


def window_alone(
    own: LinearizedAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, y: Tensor
) -> Tensor:
    """Let every head attend by softmax to the window only, or to its own token if there is no window."""
    spec = own.spec
    local = named_attention(
        "local",
        num_heads=spec.num_heads,
        num_key_heads=spec.num_key_heads,
        head_dim=spec.head_dim,
        window=spec.window or 1,
        causal=spec.causal,
    )
    return local(q, k, v, key_mask=key_mask)


def linear_part_off(
    own: LinearizedAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, y: Tensor
) -> Tensor:
    """Leave the window beside linear attention, or the heads with a window; the others put out zeros."""
    if own.window is not None:
        return own.window(q, k, v, key_mask=key_mask)
    keep = [
        head
        for part, count in _parts(own.inner)
        for head in count * [isinstance(part, (LocalAttention, SoftmaxAttention))]
    ]
    return y * torch.tensor(keep or [False], device=y.device)[:, None, None]


def uniform_attention(
    own: LinearizedAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, y: Tensor
) -> Tensor:
    """Let every query attend equally to all keys that it sees."""
    return LinearAttention(_Equal(), causal=own.causal)(q, k, v, key_mask=key_mask)


CONTROLS: dict[str, Control] = {
    "window alone": window_alone,
    "linear part off": linear_part_off,
    "uniform attention": uniform_attention,
}


class _Equal(FeatureMap):
    """φ(x) = 1."""

    def query(self, x: Tensor) -> Features:
        return Features(torch.ones_like(x[..., :1]))

    def key(self, x: Tensor) -> Features:
        return self.query(x)


def _parts(inner: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the attentions of an inner attention, with the number of heads of each (all count as one if alone)."""
    if isinstance(inner, SplitHeads):
        return list(zip(inner.parts, inner.heads, strict=True))
    return [(inner, 1)]


def entropies(model: PreTrainedModel, batch: Batch) -> dict[str, float]:
    """Return the mean entropy of the attention weights of each layer in bits, by the name of its module. Weights of
    either sign, as the delta rule has them, count by their size."""
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
