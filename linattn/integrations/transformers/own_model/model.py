"""Our models with transformers' interface: the same weights in the same folder, no second implementation."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, initialization
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from linattn.integrations.transformers.own_model.cache import LinattnCache, old_cache_name
from linattn.integrations.transformers.own_model.config import LinattnConfig, NotCopied
from linattn.integrations.transformers.weight_files import finish_weights
from linattn.models import LanguageModel, TokenModelState
from linattn.models.language_model import INIT_STD
from linattn.nn.branch import Call
from linattn.nn.checks import check_indices, check_tokens
from linattn.nn.residual import Extension


class LinattnPreTrainedModel(NotCopied, PreTrainedModel):
    """Holds the LanguageModel as `model`, whose weights have the same names in every subclass.

    Zeros of `attention_mask` (1 present, 0 missing) may stand anywhere; positions count the present tokens, so there is
    no `position_ids`. See docs/transformers.md for what else is refused."""

    config: LinattnConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_context_parallel = False

    def __init__(self, config: LinattnConfig):
        # transformers accepts any registered name here, which would have no effect
        _refuse_attention(config._attn_implementation)
        super().__init__(config)
        self.model = _new_model(config)
        self.gradient_checkpointing = False

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> None:
        """Write the folder, and finish its weights."""
        super().save_pretrained(save_directory, *args, **options)
        finish_weights(Path(save_directory))

    def hidden(
        self,
        input_ids: Int[Tensor, "b n"] | None,
        attention_mask: Tensor | None,
        inputs_embeds: Float[Tensor, "b n d"] | None,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
        cache: LinattnCache | None = None,
    ) -> tuple[Float[Tensor, "b n d"], Bool[Tensor, "b n"] | None, tuple[Tensor, ...] | None]:
        """Return the output of the last norm, the mask of the tokens, and the hidden states if `output_hidden_states`.
        The arguments are those of transformers' models, and the `cache` with the past."""
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions: a linattn model never has the matrix of attention weights")
        tokens = checked_inputs(self.model, input_ids, inputs_embeds)
        key_mask = make_key_mask(attention_mask, tokens, 0 if cache is None else cache.get_seq_length())
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states

        def read(inputs: tuple[Tensor, Tensor | None], state: TokenModelState | None) -> tuple[Any, Any]:
            return self._run(*inputs, state, with_cache=cache is not None, with_inputs=bool(output_hidden_states))

        inputs = (tokens, key_mask)
        (*states, x) = read(inputs, None)[0] if cache is None else cache.extend(read, inputs, tokens.shape[1])
        x = self.model.norm(x)
        return x, key_mask, (*states, x) if output_hidden_states else None

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.model.config = self.config.to_language_model()
        return embeddings

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_attention(attn_implementation)

    def _checked_cache(self, cache: Cache | None, use_cache: bool | None) -> LinattnCache | None:
        if cache is not None and not isinstance(cache, LinattnCache):
            raise ValueError(f"cache must be a LinattnCache, but is a {type(cache).__name__}")
        if cache is not None and use_cache is False:
            raise ValueError("use_cache is False, but a cache was given")
        default = self.config.use_cache and self.model.causal and not self.training
        if cache is None and (default if use_cache is None else use_cache):
            cache = LinattnCache()
        if cache is not None and self.gradient_checkpointing and self.training:
            raise ValueError("activation checkpointing is for training without a cache: give use_cache=False")
        return cache

    def _run(
        self,
        tokens: Tensor,
        key_mask: Tensor | None,
        state: TokenModelState | None,
        *,
        with_cache: bool,
        with_inputs: bool,
    ) -> tuple[tuple[Tensor, ...], TokenModelState | None]:
        """Return the output of the last block, after the inputs of all blocks if `with_inputs`; and, if `with_cache`,
        the state after the tokens."""
        blocks = self.model.blocks
        record: list[Tensor] = []
        x, position = self._embed(tokens, None if state is None else state.position, key_mask)
        call = Call(key_mask)
        extension = Extension(call, None if state is None else state.stack, blocks.depth)
        recomputed = list(blocks)[:: self._checkpoint_every] if self.gradient_checkpointing and self.training else []

        def step(block: nn.Module, x: Tensor) -> Tensor:
            if with_inputs:
                record.append(x)
            if with_cache:
                return extension(block, x)
            return self._checkpoint(partial(call, block), x) if block in recomputed else call(block, x)

        x = blocks.run(x, step)
        return (*record, x), TokenModelState(tuple(extension.states), position) if with_cache else None

    def _embed(self, tokens: Tensor, position: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if tokens.dim() == 2:
            return self.model.embed(tokens, position, key_mask=key_mask)
        if self.model.positions is not None:
            raise ValueError("inputs_embeds: this model has learned positions, which belong to its own embeddings")
        return self.model.dropout(tokens), None

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Switch checkpointing: transformers' activation_checkpointing_enable and _disable call this."""
        self.gradient_checkpointing = enable
        self._checkpoint, self._checkpoint_every = gradient_checkpointing_func, every_n_layers

    def init_weights(self) -> None:
        """Do nothing: LanguageModel has initialised itself."""

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the rows that resize_token_embeddings adds."""
        if isinstance(module, (nn.Embedding, nn.Linear)):
            initialization.normal_(module.weight, std=INIT_STD)

    @torch.no_grad()
    @initialization.guard_torch_init_functions()
    def _initialize_missing_keys(self, is_quantized: bool) -> None:
        """Initialise the weights that the file of `from_pretrained` does not have; until then they are
        uninitialised."""
        if all(map(_is_loaded, chain(self.parameters(), self.buffers()))):
            return
        # torch's own modules leave loaded weights alone because of the guard, which our modules do not know
        loaded = [
            (module, name, tensor.clone())
            for module in self.model.modules()
            if not type(module).__module__.startswith("torch.")
            for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            if _is_loaded(tensor)
        ]
        # the model, and the head of a classifier
        for module in cast(Iterable[LanguageModel | nn.Linear], self.children()):
            module.reset_parameters()
        for module, name, tensor in loaded:
            getattr(module, name).copy_(tensor)


class LinattnModel(LinattnPreTrainedModel):
    """Returns the output of the last norm for each token: of a decoder, or of an encoder if the configuration's
    language model is not causal."""

    def __init__(self, config: LinattnConfig):
        super().__init__(config)
        self.model.head = None
        self.post_init()

    @old_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Float[Tensor, "b n d"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPast:
        cache = self._checked_cache(cache, use_cache)
        x, _, states = self.hidden(
            input_ids, attention_mask, inputs_embeds, output_hidden_states, output_attentions, cache
        )
        return BaseModelOutputWithPast(last_hidden_state=x, cache=cache, hidden_states=states)


def _new_model(config: LinattnConfig) -> LanguageModel:
    if torch.get_default_device().type != "meta":
        return LanguageModel(config.to_language_model())
    # only shapes, which from_pretrained fills later: this initialization must not change the caller's random state
    with torch.random.fork_rng(devices=[]):
        return LanguageModel(config.to_language_model())


def _is_loaded(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_hf_initialized", False)


def checked_inputs(model: LanguageModel, input_ids: Any, inputs_embeds: Any) -> Tensor:
    """Return the tokens (b, n) or the embeddings (b, n, d). Raise ValueError unless it is one of the two."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("exactly one of input_ids and inputs_embeds must be given")
    if inputs_embeds is not None:
        check_tokens(inputs_embeds, model.config.dim, name="inputs_embeds")
        return inputs_embeds
    check_indices(input_ids, None, name="input_ids")
    return input_ids


def make_key_mask(attention_mask: Tensor | None, tokens: Tensor, seen: int) -> Bool[Tensor, "b n"] | None:
    """Return the last columns of `attention_mask`, those of the new tokens. The first `seen` columns have been applied
    already: missing tokens are not in the state. None means that every new token is present."""
    b, n = tokens.shape[:2]
    if attention_mask is None:
        return None
    if tuple(attention_mask.shape) != (b, seen + n):
        past = f" after {seen} in the cache" if seen else ""
        raise ValueError(
            f"attention_mask must be {(b, seen + n)} for {n} tokens{past}, but is {tuple(attention_mask.shape)}"
        )
    if attention_mask.is_floating_point():
        raise ValueError(f"attention_mask must be 1 (present) and 0 (missing), but is {attention_mask.dtype}")
    mask = attention_mask[:, seen:]
    if torch.compiler.is_compiling() or not mask.numel():
        return mask != 0
    # reading the values once, on a GPU too, costs less than masking where nothing is missing
    low, high = (int(value) for value in torch.stack(mask.long().aminmax()).tolist())
    if low < 0 or high > 1:
        raise ValueError(f"attention_mask must be 1 (present) and 0 (missing), but goes from {low} to {high}")
    return None if low == 1 else mask != 0


def _refuse_attention(implementation: Any) -> None:
    if implementation not in (None, "eager"):
        raise ValueError(
            f"attn_implementation {implementation!r}: a linattn model's attention is its configuration's, "
            "language_model['attention']"
        )
