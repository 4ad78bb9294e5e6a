"""The attention of a linearized layer: a submodule of a stock model's attention module, with weights of its own."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from linattn.attention import InnerAttention, LocalAttention, SoftmaxAttention
from linattn.attention.gates import AnyGates
from linattn.attention.named import untrained_attention
from linattn.feature_maps.per_head_linear import PerHeadLinear
from linattn.integrations.transformers.documents import document_numbers, document_rows, present_keys
from linattn.integrations.transformers.stock_attention.attention import OWN, attention_of
from linattn.integrations.transformers.stock_attention.cache import AttentionLayer
from linattn.linearize.initialization import initialize_decays, with_decay
from linattn.nn import ShortConvolution, token_gates
from linattn.ops.nested import checked_parts
from linattn.types import KeyMask, Keys, Outputs, Queries, Values

EXACT = (LocalAttention, SoftmaxAttention)
"""Attentions beside which a window of softmax adds nothing."""
# the logit of the share of the linear part, an eighth, where no batch was measured
INITIAL_SHARE = -2.0


@dataclass(frozen=True)
class LayerSpec:
    """Describes a linearized layer completely, so that config.json can hold it.

    `index` counts the model's attention modules in the order in which they run. `method` is a name as in
    `named_attention`. `window` is the number of tokens that local heads see or, if the method has none, that a softmax
    beside it sees (0: no softmax). `key_dim` is the number of channels that queries and keys are projected to (None:
    no projection), `convolution` the width of the convolution before the attention (0: none). With `decay`, linear
    heads have one decay per token. `dim` is the number of channels of the layer's input, 0 for cross-attention."""

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


class LayerGates(NamedTuple):
    """The gates of the `inner` attention of a linearized layer, and the `share` of its output beside the window's; None
    for what the layer does not have."""

    inner: AnyGates
    share: Float[Tensor, "b h n"] | None


@final
class LinearizedAttention(InnerAttention):
    """Attends as the `spec` describes, from queries and keys that it projects to fewer channels.

    With a window, y = local + s (inner − local) with a share s = σ(W x + b) per head and token. x is the layer's input
    after a short convolution, and local is softmax over the last tokens, with queries and keys before the projection.

    The initial weights are near softmax: the convolution is the identity, decays are near 1, and `closed_form` computes
    projections and shares. `arguments` are the names of the parameters of the stock module's `forward`, in order."""

    arguments: tuple[str, ...]

    def __init__(self, spec: LayerSpec):
        super().__init__()
        self.spec, self.causal = spec, spec.causal
        d, r = spec.head_dim, spec.head_dim if spec.key_dim is None else spec.key_dim
        if not 1 <= r <= d:
            raise ValueError(f"key_dim must be from 1 to {d}, the channels of a head, but is {r}")
        sizes = {"num_heads": spec.num_heads, "num_key_heads": spec.num_key_heads, "head_dim": r}
        inner = untrained_attention(spec.method, **sizes, window=spec.window, causal=spec.causal)
        if inner.same_tokens and not spec.dim:
            raise ValueError(f"{spec.method} attends to the queries' own tokens, and cross-attention to others")
        self.inner = with_decay(inner) if spec.decay else inner
        self.window = self.share = None
        if spec.window and spec.dim and not any(isinstance(part, EXACT) for part in inner.modules()):
            self.window = LocalAttention(spec.window, causal=spec.causal)
            self.share = nn.Linear(spec.dim, spec.num_heads)
            nn.init.zeros_(self.share.weight)
            nn.init.constant_(self.share.bias, INITIAL_SHARE)
        self.query_map, self.key_map = (
            nn.Identity() if spec.key_dim is None else PerHeadLinear(heads, d, r)
            for heads in (spec.num_heads, spec.num_key_heads)
        )
        self.convolution = ShortConvolution(spec.dim, spec.convolution) if spec.convolution else None
        if self.convolution is not None:
            nn.init.zeros_(self.convolution.weight)
        self.token_gates = token_gates(self.inner.needs, spec.dim, num_key_heads=spec.num_key_heads, key_dim=r)
        if self.token_gates is not None:
            initialize_decays(self.token_gates)

    def prepare(
        self, x: Float[Tensor, "b n c"], mask: Tensor | None, layer: AttentionLayer | None
    ) -> tuple[Float[Tensor, "b n c"], LayerGates | None]:
        """Return the layer's input x after the convolution, and the gates that are computed from it (None: no gates).

        `mask` is the model's attention mask, `layer` the cache's part for this layer, with the convolution's past."""
        if self.convolution is not None:
            x = self._convolved(x, mask, layer)
        if self.token_gates is None and self.share is None:
            return x, None
        share = None if self.share is None else self.share(x).sigmoid().transpose(1, 2)
        return x, LayerGates(None if self.token_gates is None else self.token_gates(x), share)

    def read(self, q: Queries, summary: Any) -> Outputs:
        return self.inner.read(self.query_map(q), summary)

    def _summarize(self, k: Keys, v: Values, key_mask: KeyMask) -> Any:
        return self.inner.summarize(self.key_map(k), v, key_mask=key_mask)

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        return self._extend(q, k, v, None, key_mask)[0]

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: Any, key_mask: KeyMask, gates: LayerGates | None = None
    ) -> tuple[Outputs, Any]:
        """Return the outputs and the new state: the inner attention's, and the window's or None. If not causal, both
        are None."""
        inner_gates, share = gates or (None, None)
        past, window_past = checked_parts(state, 2)
        y, past = _results(self.inner, self.query_map(q), self.key_map(k), v, past, key_mask, inner_gates)
        if self.window is None or share is None:
            return y, (past, None)
        local, window_past = _results(self.window, q, k, v, window_past, key_mask)
        # under autocast, queries and keys after a norm are wider than values, and so are outputs of the delta rule
        return torch.lerp(local, y.to(local.dtype), share.to(local.dtype).unsqueeze(-1)), (past, window_past)

    def _checked_state(self, state: Any) -> Any:
        return checked_parts(state, 2)

    def _checked_gates(self, gates: Any, k: Tensor) -> tuple[Any, ...]:
        """Raise ValueError if a share is missing, or not needed; the inner attention checks its own gates."""
        if (getattr(gates, "share", None) is None) != (self.share is None):
            raise ValueError("the gates of a linearized attention must be those that its `prepare` returns")
        return () if gates is None else (gates,)

    def _convolved(self, x: Tensor, mask: Tensor | None, layer: AttentionLayer | None) -> Tensor:
        assert self.convolution is not None
        documents = document_numbers(mask)
        if documents is not None:
            rows = document_rows(documents)
            return rows.join(self.convolution(rows.split(x), key_mask=rows.present))
        mask = present_keys(mask)
        mask = None if mask is None else mask[:, mask.shape[1] - x.shape[1] :]
        convolution = self.convolution

        def read(inputs: tuple[Tensor, Tensor | None], past: Tensor | None) -> tuple[Tensor, Tensor]:
            return convolution.extend(inputs[0], past, key_mask=inputs[1])

        return read((x, mask), None)[0] if layer is None else layer.convolution.extend(read, (x, mask))


def _results(
    inner: InnerAttention, q: Queries, k: Keys, v: Values, state: Any, key_mask: KeyMask, gates: Any = None
) -> tuple[Outputs, Any]:
    """Return the outputs and the new state, None if `inner` is not causal."""
    if inner.causal:
        return inner.extend(q, k, v, state, key_mask=key_mask, gates=gates)
    return inner(q, k, v, key_mask=key_mask, gates=gates), None


def attach(module: nn.Module, own: LinearizedAttention) -> None:
    """Make the attention module of a stock model attend by `own`."""
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


def named_arguments(own: LinearizedAttention, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of the attention module by name, `args` by position and `options` by keyword."""
    return {**dict(zip(own.arguments, args, strict=False)), **options}


def _prepare(
    module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    own = own_attention(module)
    inputs = named_arguments(own, args, options)
    layer = _cache_layer(module, inputs.values())
    inputs["hidden_states"], gates = own.prepare(inputs["hidden_states"], inputs.get("attention_mask"), layer)
    return (), inputs if gates is None else {**inputs, "gates": gates}


def _cache_layer(module: nn.Module, inputs: Iterable[Any]) -> AttentionLayer | None:
    """Return the layer, for this attention module, of the cache among its inputs; None if there is no cache."""
    cache = next((value for value in inputs if isinstance(value, Cache)), None)
    if cache is None:
        return None
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None  # pyright: ignore
    if not isinstance(layer, AttentionLayer):
        raise ValueError(
            "a linearized model keeps states, which this cache has no place for: give no cache, or a "
            "DynamicCache(config=model.config)"
        )
    return layer
