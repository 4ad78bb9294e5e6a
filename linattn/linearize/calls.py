"""The calls of a model's attention function: which modules attend, and to which queries, keys and values."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from linattn.attention import InnerAttention
from linattn.integrations.transformers.documents import DOCUMENTS, document_numbers, present_keys
from linattn.integrations.transformers.stock_attention.attention import is_causal_call
from linattn.integrations.transformers.stock_attention.cache import tensor_of
from linattn.integrations.transformers.stock_attention.hooks import PREFIX, watched
from linattn.integrations.transformers.stock_attention.masks import attend_per_document
from linattn.nn.modes import evaluating

SOFTMAX = PREFIX + "softmax"

Batch = Mapping[str, Any]
"""The arguments of one call of a model: input_ids, attention_mask, labels, pixel_values and so on."""


class AttentionCall(NamedTuple):
    """The arguments of one call of the attention function by the `module` of this `name`.

    `mask` (b m) is True for present keys, or holds each token's document (None: all are present). The logits of softmax
    are `scaling` · q·k. `dim` is the number of channels of the module's input, None for cross-attention. `gates` are
    those of a linearized layer."""

    name: str
    module: nn.Module
    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b hk m d"]
    v: Float[Tensor, "b hk m dv"]
    mask: Tensor | None
    scaling: float
    causal: bool
    sliding_window: int | None
    dim: int | None
    gates: Any

    def scaled_queries(self) -> Float[Tensor, "b h n d"]:
        """Return the queries for our attentions, which divide q·k by √d themselves."""
        return self.q * (self.scaling * math.sqrt(self.q.shape[-1]))

    def attend(self, inner: InnerAttention, q: Tensor, k: Tensor, v: Tensor, gates: Any = None) -> Tensor:
        """Return the output of `inner` under the mask of this call."""
        if self.mask is not None and self.mask.dtype == DOCUMENTS:
            return attend_per_document(inner, q, k, v, self.mask, gates)
        return inner(q, k, v, key_mask=None if self.mask is None else self.mask.unsqueeze(1), gates=gates)

    def present_tokens(self, x: Float[Tensor, "b hx m d"]) -> Float[Tensor, "hx tokens d"]:
        """Concatenate the present tokens of all rows; x are queries, keys or outputs. The mask of cross-attention is
        that of its keys."""
        tokens, others = x.transpose(0, 1).flatten(1, 2), self.dim is None and x is not self.k
        if self.mask is None or self.mask.dtype == DOCUMENTS or self.mask.shape[1] != x.shape[2] or others:
            return tokens
        return tokens[:, self.mask.flatten()]


@contextmanager
def attention_function(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Make the model attend inside the block by `implementation`, the name of an attention function in transformers.

    If it is the name of our softmax, raise ValueError for a model whose attention no method of ours can replace."""
    before = attention_names(model.config)
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attention_names(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the names of a model's attention function, "", and of those of its parts, as `set_attn_implementation`
    takes them."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    names = {name: attention_names(part) for name, part in parts.items() if part is not None}
    return {"": config._attn_implementation or "eager", **names}


@torch.no_grad()
def observe(model: PreTrainedModel, batch: Batch, note: Callable[[AttentionCall], None]) -> None:
    """Run a model on a batch, and call `note` at each attention. The model's attention function must be our softmax."""
    names = {module: name for name, module in model.named_modules()}
    dims: dict[nn.Module, int | None] = {}

    def record_dim(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        x = options["hidden_states"] if "hidden_states" in options else args[0]
        encoder = options.get("key_value_states", options.get("encoder_hidden_states"))
        dims[module] = x.shape[-1] if encoder is None else None

    def see(module: nn.Module, q: Tensor, k: Any, v: Tensor, mask: Tensor | None = None, **options: Any) -> None:
        scaling, causal = options.get("scaling"), is_causal_call(module, mask, options.get("is_causal"), q.shape[2])
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        k, v = tensor_of(k), tensor_of(v)
        documents = document_numbers(mask)
        mask = present_keys(mask) if documents is None else documents
        window, gates = options.get("sliding_window"), options.get("gates")
        note(AttentionCall(names[module], module, q, k, v, mask, scaling, causal, window, dims[module], gates))

    with ExitStack() as stack:
        for module in names:
            if hasattr(module, "is_causal"):
                stack.callback(module.register_forward_pre_hook(record_dim, with_kwargs=True).remove)
        stack.enter_context(evaluating(model))
        stack.enter_context(watched(SOFTMAX, see))
        run(model, batch)


def run(model: PreTrainedModel, batch: Batch) -> Any:
    """Call the model on its device. It makes no cache, because with one it would attend as in generation."""
    check_batch(batch)
    inputs = {name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in batch.items()}
    parameters = inspect.signature(model.forward).parameters
    # some models that generate pass all other arguments on to the decoder inside
    any_name = model.can_generate() and any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if any_name or "use_cache" in parameters:
        inputs["use_cache"] = False
    return model(**inputs)


def check_batch(batch: object) -> None:
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise ValueError(f'a batch holds the arguments of a call by name, as {{"input_ids": …}}, but is a {kind}')
