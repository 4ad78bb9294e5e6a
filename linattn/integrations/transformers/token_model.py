"""Causal language models of transformers as models of tokens, whose state is a value: for batches whose rows come and
go."""

import copy
from inspect import signature
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from linattn.attention.base import KeysAndValues
from linattn.integrations.transformers.state_layer import StateLayer
from linattn.models import TokenModelState
from linattn.models.token_model import TokenModel
from linattn.nn.modes import evaluating
from linattn.ops.nested import checked_kind, for_batch, map_state
from linattn.states import concatenate, select
from linattn.states.holders import options_of
from linattn.types import TokenIds, TokenMask

LAYERS = (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""The layers of transformers' caches, beside ours, whose rows can be joined."""


@final
class PretrainedTokenModel(TokenModel):
    """Holds a causal language `model` of transformers, for a `ContinuousBatch` or a `PrefixCache`. The `stack` of its
    state has what the model's cache holds, and `position` is the number of tokens per row.

    Raises ValueError for a model whose cache is of another kind, or whose rows depend on those beside them."""

    causal = True

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self._options = signature(model.forward).parameters.keys() & {"position_ids", "logits_to_keep"}
        with torch.no_grad(), evaluating(model):
            self._begin()
            self._check_rows()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_length(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    def extend_hidden(  # pyright: ignore[reportIncompatibleMethodOverride]: it takes no context
        self, tokens: TokenIds, state: TokenModelState | None = None, *, key_mask: TokenMask = None
    ) -> tuple[Float[Tensor, "b last v"], TokenModelState]:
        """Return the logits after the last of the next tokens, and the new state. A masked token is a missing token;
        with one, no logits are returned."""
        b, n = tokens.shape
        state = for_batch(self._empty if state is None else checked_kind(state, TokenModelState), b)
        if key_mask is not None and not bool(key_mask.all()):
            rows = [self.extend_hidden(tokens[i : i + 1, mask], select(state, [i])) for i, mask in enumerate(key_mask)]
            return tokens.new_zeros(b, 0, self.vocab_size).float(), concatenate([state for _, state in rows])
        if not n:
            return tokens.new_zeros(b, 0, self.vocab_size).float(), state
        assert state.position is not None
        longest, places = int(state.position.max()), torch.arange(n, device=tokens.device)
        options: dict[str, Any] = {"position_ids": state.position.unsqueeze(1) + places, "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if name in self._options}
        # only keys of softmax attention stand beside those of longer rows
        has_keys = any(isinstance(layer, DynamicLayer) for layer in self._example.layers)
        if has_keys and (present := _present(state.position, longest, n)) is not None:
            options["attention_mask"] = present.long()
        cache = copy.copy(self._example)
        layers = zip(self._example.layers, state.stack, strict=True)
        cache.layers = [_layer(example, each, longest) for example, each in layers]
        output = self.model(tokens, use_cache=True, cache=cache, **options)
        position = state.position + n
        return output.logits[:, -1:], TokenModelState(_stack(cache, position), position)

    def logits(self, x: Float[Tensor, "*b v"]) -> Float[Tensor, "*b v"]:
        return x

    def _begin(self) -> None:
        """Find the layers of the cache, and the state before the first token."""
        name, token = type(self.model).__name__, torch.zeros(1, 1, dtype=torch.long, device=self.device)
        cache = self.model(token, use_cache=True).get("cache")
        if type(cache) is not DynamicCache:
            raise ValueError(f"the rows of {name} cannot be joined: its cache is a {type(cache).__name__}")
        if other := {type(x).__name__ for x in cache.layers if type(x) not in LAYERS and not isinstance(x, StateLayer)}:
            raise ValueError(f"the rows of {name} cannot be joined: its cache has layers {', '.join(sorted(other))}")
        if "chunked_attention" in (getattr(self.config, "layer_types", None) or ()):
            raise ValueError(f"the rows of {name} cannot be joined: its chunked attention has chunks at fixed places")
        self._example = DynamicCache(config=self.config)
        for layer in self._example.layers:
            if isinstance(layer, StateLayer):
                layer.activate_past_recording()
        output = self.model(token, use_cache=True, cache=self._example)
        self._vocab_size = output.logits.shape[-1]
        self._empty = TokenModelState(tuple(map(_empty, self._example.layers)), token.new_zeros(1))

    def _check_rows(self) -> None:
        """Raise ValueError unless rows of different lengths give the logits in one batch that each gives alone."""
        texts = [[i % self.vocab_size for i in text] for text in ((3, 1, 4, 1, 5), (9, 2))]
        texts = [torch.tensor([text], device=self.device) for text in texts]
        states = [self.extend_hidden(text[:, :-1])[1] for text in texts]
        alone = torch.cat(
            [self.extend_hidden(text[:, -1:], state)[0] for text, state in zip(texts, states, strict=True)]
        )
        together, _ = self.extend_hidden(torch.cat([text[:, -1:] for text in texts]), concatenate(states))
        tolerance = torch.finfo(alone.dtype).eps ** 0.5 * float(alone.abs().max())
        if not torch.allclose(alone, together, rtol=0, atol=tolerance):
            raise ValueError(f"the rows of {type(self.model).__name__} cannot be joined: they depend on one another")


@options_of.register
def _(model: PretrainedTokenModel) -> dict[str, Any]:
    return {"class": type(model.model).__name__} | (options_of(model.model) or {})


def _present(position: Int[Tensor, " b"], longest: int, n: int) -> Bool[Tensor, "b m"] | None:
    """Return which columns hold a token of a row, or None if all do. Row i has read `position[i]` tokens, at most
    `longest`, and n more follow for each; shorter rows are padded on the left."""
    places = torch.arange(longest + n, device=position.device)
    return None if bool((position == longest).all()) else places >= (longest - position).unsqueeze(1)


def _stack(cache: Cache, position: Int[Tensor, " b"]) -> tuple[Any, ...]:
    """Return the state of each layer of a cache whose rows have read so many tokens."""
    present = _present(position, int(position.max()), 0)
    return tuple(_layer_state(layer, present) for layer in cache.layers)


def _layer_state(layer: Any, present: Bool[Tensor, "b m"] | None) -> tuple[Any, ...]:
    if isinstance(layer, StateLayer):
        return tuple(history.state for history in layer.histories)
    linear, keys = (), None
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        linear = tuple(layer.conv_states.values()), tuple(layer.recurrent_states.values())
    if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        length = layer.keys.shape[2]
        mask = None if present is None or not length else present[:, -length:].unsqueeze(1)
        keys = KeysAndValues(layer.keys, layer.values, mask)
    return linear, keys


def _layer(example: Any, state: tuple[Any, ...], longest: int) -> Any:
    """Return a layer like the `example` with a state whose longest row has so many tokens."""
    if isinstance(example, StateLayer):
        layer = type(example)()
        for history, each in zip(layer.histories, state, strict=True):
            history.state = each
        layer.seen = longest
        return layer
    (linear, keys), layer = state, copy.copy(example)
    if linear:
        # transformers writes to these
        layer.conv_states, layer.recurrent_states = (
            dict(enumerate(map_state(torch.clone, tensors))) for tensors in linear
        )
    if keys is not None:
        layer.keys, layer.values, layer.cumulative_length = keys.k, keys.v, longest
    return layer


def _empty(layer: Any) -> tuple[Any, ...]:
    """Return the state of no tokens of a layer that has read some."""
    if isinstance(layer, StateLayer):
        return tuple(history.begin() for history in layer.histories)
    linear, keys = _layer_state(layer, None)
    return map_state(torch.zeros_like, linear), map_state(lambda x: x[:, :, :0], keys)
