"""The attention of a linearized layer, as a submodule of a stock model's attention module: an inner attention, and the
parts that softmax did not need, with weights of their own."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast, final

from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from linattn.attention import InnerAttention
from linattn.attention.named import untrained_attention
from linattn.feature_maps.per_head_linear import PerHeadLinear
from linattn.integrations.transformers.attention import OWN
from linattn.integrations.transformers.cache import AttentionLayer
from linattn.integrations.transformers.masks import DOCUMENTS, document_rows
from linattn.nn import ShortConvolution
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


@dataclass(frozen=True)
class LayerSpec:
    """What a linearized layer is built from: the `method` is a name as in `named_attention`, with the window of its
    local heads; `key_dim` is the number of channels that queries and keys are projected to (None: all stay),
    `convolution` the width of the convolution before the attention (0: none), and `decay` gives linear heads one per
    token. `index` counts the model's attention modules in the order in which they run. The rest are sizes."""

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


@final
class LinearizedAttention(InnerAttention):
    """An inner attention from projected queries and keys. A short convolution mixes its layer's input first.

    It starts as close to its method alone as it can: the convolution as the identity, projections as `closed_form`
    makes them. `arguments` are the names of those of its module's `forward`, in order."""

    arguments: tuple[str, ...]

    def __init__(self, spec: LayerSpec):
        super().__init__()
        self.spec, self.causal = spec, spec.causal
        d, r = spec.head_dim, spec.head_dim if spec.key_dim is None else spec.key_dim
        self.inner = untrained_attention(
            spec.method,
            num_heads=spec.num_heads,
            num_key_heads=spec.num_key_heads,
            head_dim=r,
            window=spec.window,
            causal=spec.causal,
        )
        projects = spec.key_dim is not None
        self.query_map = PerHeadLinear(spec.num_heads, d, r) if projects else None
        self.key_map = PerHeadLinear(spec.num_key_heads, d, r) if projects else None
        self.convolution = ShortConvolution(spec.dim, spec.convolution) if spec.convolution else None
        if self.convolution is not None:
            nn.init.zeros_(self.convolution.weight)

    def named(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call of the attention module by name."""
        return {**dict(zip(self.arguments, args, strict=False)), **options}

    def mix(
        self, x: Float[Tensor, "b n c"], mask: Tensor | None, layer: AttentionLayer | None
    ) -> Float[Tensor, "b n c"]:
        """Convolve the layer's input; `mask` is what the model hands to its attention, `layer` holds the past."""
        if self.convolution is None:
            return x
        if mask is not None and mask.dtype == DOCUMENTS:
            rows = document_rows(mask)
            return rows.join(self.convolution(rows.split(x), key_mask=rows.present))
        mask = None if mask is None else mask[:, mask.shape[1] - x.shape[1] :]
        past = None if layer is None else layer.convolution
        y, past = self.convolution.extend(x, past, key_mask=mask)
        if layer is not None:
            layer.convolution = past
        return y

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        return self.inner(*self._projected(q, k), v, key_mask=key_mask)

    def _extend(self, q: Queries, k: Keys, v: Values, state: Any, key_mask: KeyMask) -> tuple[Outputs, Any]:
        return self.inner.extend(*self._projected(q, k), v, state, key_mask=key_mask)

    def _summarize(self, k: Keys, v: Values, key_mask: KeyMask) -> Any:
        return self.inner.summarize(k if self.key_map is None else self.key_map(k), v, key_mask=key_mask)

    def read(self, q: Queries, summary: Any) -> Outputs:
        return self.inner.read(q if self.query_map is None else self.query_map(q), summary)

    def _checked_state(self, state: Any) -> Any:
        """Leave the check to the inner attention, whose state it is."""
        return state

    def _projected(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_map is None or self.key_map is None:
            return q, k
        return self.query_map(q), self.key_map(k)


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
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module._modules.get(OWN), LinearizedAttention)
    }


def own_attention(module: nn.Module) -> LinearizedAttention:
    return cast(LinearizedAttention, module._modules[OWN])


def _prepare(
    module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    own = own_attention(module)
    given = own.named(args, options)
    layer = _cache_layer(module, given.values())
    given["hidden_states"] = own.mix(given["hidden_states"], given.get("attention_mask"), layer)
    return (), given


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
