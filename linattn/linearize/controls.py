"""Controls, simpler functions that replace a linearized model's attention in measurements; entropies of attention."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.attention import InnerAttention, LinearAttention, LocalAttention, SoftmaxAttention, SplitHeads
from linattn.checks import check_types
from linattn.feature_maps import GeneralizedFeatureMap
from linattn.integrations.transformers.stock_attention.attention import attention_of
from linattn.linearize.attention import EXACT, LinearizedAttention, linearized_layers, own_attention
from linattn.linearize.calls import AttentionCall, Batch, observe
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class LayerCall(NamedTuple):
    """A call of the attention `own` of a linearized layer, with its output `y`."""

    own: LinearizedAttention
    q: Queries
    k: Keys
    v: Values
    key_mask: KeyMask
    y: Outputs


Control = Callable[[LayerCall], Outputs]
"""Returns the output that replaces y."""


@check_types
@contextmanager
def controlled(model: nn.Module, control: Control) -> Iterator[None]:
    """Replace the output of every linearized layer by that of `control` inside the block, in calls without a cache.

    Raise ValueError at the end of the block if there was no such call."""
    calls = 0

    def hook(own: nn.Module, args: tuple[Any, ...], options: dict[str, Any], y: Tensor) -> Tensor:
        nonlocal calls
        assert isinstance(own, LinearizedAttention)
        calls, (q, k, v) = calls + 1, args
        return control(LayerCall(own, q, k, v, options.get("key_mask"), y))

    with ExitStack() as stack:
        for layer in linearized_layers(model).values():
            stack.callback(own_attention(layer).register_forward_hook(hook, with_kwargs=True).remove)
        yield
    if not calls:
        raise ValueError(
            "a control replaces the outputs of linearized layers in calls without a cache, but the block has no such "
            "call: run a linearized model there, with use_cache=False"
        )


def window_alone(call: LayerCall) -> Outputs:
    """Attend by softmax to the window only in every head, or to the token itself if there is no window. In
    cross-attention no key is near, so the output is zero."""
    spec = call.own.spec
    if not spec.dim:
        return torch.zeros_like(call.y)
    return LocalAttention(spec.window or 1, causal=spec.causal)(call.q, call.k, call.v, key_mask=call.key_mask)


def linear_part_off(call: LayerCall) -> Outputs:
    """Return the output of the softmax beside linear attention alone or, in a mixture, zeros for the linear heads."""
    if call.own.window is not None:
        return call.own.window(call.q, call.k, call.v, key_mask=call.key_mask)
    inner = call.own.inner
    parts = zip(inner.parts, inner.heads, strict=True) if isinstance(inner, SplitHeads) else [(inner, 1)]
    exact = [head for part, count in parts for head in count * [isinstance(part, EXACT)]]
    return call.y * torch.tensor(exact, device=call.y.device)[:, None, None]


def uniform_attention(call: LayerCall) -> Outputs:
    """Attend equally to all keys that a query sees: φ(x) = 1."""
    ones = GeneralizedFeatureMap(torch.ones_like)
    return LinearAttention(ones, causal=call.own.causal)(call.q, call.k, call.v, key_mask=call.key_mask)


CONTROLS: dict[str, Control] = {
    "window alone": window_alone,
    "linear part off": linear_part_off,
    "uniform attention": uniform_attention,
}


def entropies(model: PreTrainedModel, batch: Batch) -> dict[str, float]:
    """Return the mean entropy of each layer's attention weights on a `batch`, in bits, by the name of its module.

    The weights of the delta rule may be negative: the entropy is that of their absolute values."""
    bits: dict[str, float] = {}

    def note(call: AttentionCall) -> None:
        inner = attention_of(call.module) or _softmax(call)
        one_hot = torch.eye(call.k.shape[2], dtype=call.k.dtype, device=call.k.device)
        one_hot = one_hot.expand(*call.k.shape[:2], -1, -1)
        weights = call.attend(inner, call.scaled_queries(), call.k, one_hot, call.gates).abs()
        shares = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        entropy = torch.special.entr(shares).sum(-1, keepdim=True) / math.log(2)
        present = call.present_tokens(entropy)
        if not present.numel():
            raise ValueError("the batch must have a present token, but has none")
        bits[call.name] = float(present.mean())

    observe(model, batch, note)
    return bits


def _softmax(call: AttentionCall) -> InnerAttention:
    """Return the attention of a layer that was not replaced, within its sliding window if it has one."""
    if call.sliding_window is None:
        return SoftmaxAttention(causal=call.causal)
    return LocalAttention(call.sliding_window, causal=call.causal)
