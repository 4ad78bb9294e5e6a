"""The attention of a linearized layer, as a submodule of a stock model's attention module: an inner attention, and the
parts that softmax did not need, with weights of their own."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from linattn.attention import InnerAttention, LocalAttention, SoftmaxAttention
from linattn.attention.named import untrained_attention
from linattn.feature_maps.per_head_linear import PerHeadLinear
from linattn.integrations.transformers.documents import DOCUMENTS, document_rows
from linattn.integrations.transformers.stock_attention.attention import OWN, attention_of
from linattn.integrations.transformers.stock_attention.cache import AttentionLayer
from linattn.linearize.start import start_remembering, with_decay
from linattn.nn import ShortConvolution, token_gates
from linattn.types import KeyMask, Keys, Outputs, Queries, Values

EXACT = (LocalAttention, SoftmaxAttention)
"""Attentions beside which a window of softmax adds nothing."""
# the logit of the share of the linear part where no data tell a better one: an eighth
MOSTLY_WINDOW = -2.0


@dataclass(frozen=True)
class LayerSpec:
    """Holds all that a linearized layer is built from.

    `method` is a name as in `named_attention`. `window` is the number of tokens that its local heads see or, if it has
    none, that a softmax beside it sees (0: there is no such softmax). `key_dim` is the number of channels that queries
    and keys are projected to (None: all stay), `convolution` the width of the convolution before the attention (0:
    none), and `decay` gives linear heads one per token. `index` counts the model's attention modules in the order in
    which they run. The rest are sizes."""

    index: int
    method: str
    window: int
    key_dim: int | None
    convolution: int
    decay: bool
    num_heads: int
    num_key_heads: int
    head_dim: int
    dim: int
    causal: bool


Prepared = tuple[Float[Tensor, "b n c"], Any]
"""The input of a layer's queries, keys and values, and the gates of its inner attention, beside the share of the linear
part if there is a window."""


@final
class LinearizedAttention(InnerAttention):
    """Attends as the `spec` says, from projected queries and keys, after a short convolution of its layer's input x, of
    which gates are made, too. With a window, y = local + σ(W x + b) ⊙ (inner − local) per head and token, where local
    is softmax over the last tokens with queries and keys as they were.

    It starts as near to softmax as it can: the convolution as the identity, decays near 1, projections and the share of
    the linear part as `closed_form` makes them. `arguments` names those of its module's `forward`, in order."""

    arguments: tuple[str, ...]

    def __init__(self, spec: LayerSpec):
        super().__init__()
        self.spec, self.causal = spec, spec.causal
        d, r = spec.head_dim, spec.head_dim if spec.key_dim is None else spec.key_dim
        if not 1 <= r <= d:
            raise ValueError(f"key_dim must be from 1 to {d}, the channels of a head, but is {r}")
        self.window = self.share = None
        sizes = {"num_heads": spec.num_heads, "num_key_heads": spec.num_key_heads, "head_dim": r}
        inner = untrained_attention(spec.method, **sizes, window=spec.window, causal=spec.causal)
        self.inner = with_decay(inner) if spec.decay else inner
        if spec.window and spec.dim and not any(isinstance(part, EXACT) for part in inner.modules()):
            self.window = LocalAttention(spec.window, causal=spec.causal)
            self.share = nn.Linear(spec.dim, spec.num_heads)
            nn.init.zeros_(self.share.weight)
            nn.init.constant_(self.share.bias, MOSTLY_WINDOW)
        self.query_map, self.key_map = (
            nn.Identity() if spec.key_dim is None else PerHeadLinear(heads, d, r)
            for heads in (spec.num_heads, spec.num_key_heads)
        )
        self.convolution = ShortConvolution(spec.dim, spec.convolution) if spec.convolution else None
        if self.convolution is not None:
            nn.init.zeros_(self.convolution.weight)
        self.token_gates = token_gates(self.inner.needs, spec.dim, num_key_heads=spec.num_key_heads, key_dim=r)
        if self.token_gates is not None:
            start_remembering(self.token_gates)

    def named(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call of the attention module by name."""
        return {**dict(zip(self.arguments, args, strict=False)), **options}

    def prepare(self, x: Float[Tensor, "b n c"], mask: Tensor | None, layer: AttentionLayer | None) -> Prepared:
        """Mix the layer's input, and make the gates of it. `mask` is what the model hands to its attention, and `layer`
        holds the past."""
        if self.convolution is not None:
            x = self._convolved(x, mask, layer)
        gates = None if self.token_gates is None else self.token_gates(x)
        return x, gates if self.share is None else (gates, self.share(x).sigmoid().transpose(1, 2))

    def forward(self, q: Queries, k: Keys, v: Values, *, key_mask: KeyMask = None, gates: Any = None) -> Outputs:
        if self.window is None:
            return self.inner(self.query_map(q), self.key_map(k), v, key_mask=key_mask, gates=gates)
        gates, share = gates
        y = self.inner(self.query_map(q), self.key_map(k), v, key_mask=key_mask, gates=gates)
        return torch.lerp(self.window(q, k, v, key_mask=key_mask), y, share.unsqueeze(-1))

    def extend(
        self, q: Queries, k: Keys, v: Values, state: Any = None, *, key_mask: KeyMask = None, gates: Any = None
    ) -> tuple[Outputs, Any]:
        if self.window is None:
            return self.inner.extend(self.query_map(q), self.key_map(k), v, state, key_mask=key_mask, gates=gates)
        (gates, share), (past, near_past) = gates, state or (None, None)
        y, past = self.inner.extend(self.query_map(q), self.key_map(k), v, past, key_mask=key_mask, gates=gates)
        near, near_past = self.window.extend(q, k, v, near_past, key_mask=key_mask)
        return torch.lerp(near, y, share.unsqueeze(-1)), (past, near_past)

    def summarize(self, k: Keys, v: Values, *, key_mask: KeyMask = None) -> Any:
        return self.inner.summarize(self.key_map(k), v, key_mask=key_mask)

    def read(self, q: Queries, summary: Any) -> Outputs:
        return self.inner.read(self.query_map(q), summary)

    def _convolved(self, x: Tensor, mask: Tensor | None, layer: AttentionLayer | None) -> Tensor:
        assert self.convolution is not None
        if mask is not None and mask.dtype == DOCUMENTS:
            rows = document_rows(mask)
            return rows.join(self.convolution(rows.split(x), key_mask=rows.present))
        mask = None if mask is None else mask[:, mask.shape[1] - x.shape[1] :]
        y, past = self.convolution.extend(x, None if layer is None else layer.convolution, key_mask=mask)
        if layer is not None:
            layer.convolution = past
        return y


def attach(module: nn.Module, own: LinearizedAttention) -> None:
    """Let the attention module of a stock model attend by `own`."""
    own.arguments = tuple(inspect.signature(module.forward).parameters)
    module.add_module(OWN, own)
    module.register_forward_pre_hook(_prepare, with_kwargs=True)


def detach(module: nn.Module) -> None:
    """Undo `attach`."""
    delattr(module, OWN)
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _prepare:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def linearized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention modules that attend by a `LinearizedAttention`, by their names."""
    return {name: module for name, module in model.named_modules() if module._modules.get(OWN) is not None}


def own_attention(module: nn.Module) -> LinearizedAttention:
    """Return the `LinearizedAttention` of an attention module that has one."""
    own = attention_of(module)
    assert isinstance(own, LinearizedAttention)
    return own


def _prepare(
    module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    own = own_attention(module)
    given = own.named(args, options)
    layer = _cache_layer(module, given.values())
    given["hidden_states"], gates = own.prepare(given["hidden_states"], given.get("attention_mask"), layer)
    return (), given if gates is None else {**given, "gates": gates}


def _cache_layer(module: nn.Module, given: Iterable[Any]) -> AttentionLayer | None:
    cache = next((value for value in given if isinstance(value, Cache)), None)
    if cache is None:
        return None
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None  # pyright: ignore
    if not isinstance(layer, AttentionLayer):
        raise ValueError(
            "a linearized model keeps states, which this cache has no place for: give no past_key_values, or a "
            "DynamicCache(config=model.config)"
        )
    return layer
