"""The attention of a stock model as it runs: which modules attend, and with which queries and keys."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.integrations.transformers.stock_attention.attention import is_causal_call
from linattn.integrations.transformers.stock_attention.cache import CachedKeys
from linattn.integrations.transformers.stock_attention.hooks import PREFIX, watched

SOFTMAX = PREFIX + "softmax"

Batch = Mapping[str, Any]
"""The arguments of one call of a model: input_ids, attention_mask, labels, pixel_values and so on."""


class Attended(NamedTuple):
    """One call of the attention function by the module `name`, whose logits are `scaling` · q·k, and whose input has
    `dim` channels (None: it is cross-attention)."""

    name: str
    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b hk m d"]
    v: Float[Tensor, "b hk m dv"]
    mask: Tensor | None
    scaling: float
    causal: bool
    sliding_window: int | None
    dim: int | None

    def present(self, x: Float[Tensor, "b hx m d"]) -> Float[Tensor, "hx tokens d"]:
        """Return the present tokens of q or k, those of all rows behind each other."""
        tokens = x.transpose(0, 1).flatten(1, 2)
        if not isinstance(self.mask, Tensor) or self.mask.dtype != torch.bool or self.mask.shape[1] != x.shape[2]:
            return tokens
        return tokens[:, self.mask.flatten()]


@contextmanager
def attending_by(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let the model attend by this function of transformers for a while. Our softmax refuses by name what none of our
    methods can replace."""
    before = model.config._attn_implementation or "eager"
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run without dropout and without gradients."""
    with keeping_modes(model), torch.no_grad():
        model.eval()
        yield


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Return each module to training or evaluation, as it was."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def observe(model: PreTrainedModel, batch: Batch, note: Callable[[Attended], None]) -> None:
    """Run the model on a batch and call `note` at each attention. The model's attention must be our softmax."""
    names = {module: name for name, module in model.named_modules()}
    dims: dict[nn.Module, int | None] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        x = options["hidden_states"] if "hidden_states" in options else args[0]
        other = options.get("key_value_states", options.get("encoder_hidden_states"))
        dims[module] = x.shape[-1] if other is None else None

    def see(module: nn.Module, q: Tensor, k: Any, v: Tensor, mask: Tensor | None = None, **options: Any) -> None:
        scaling, causal = options.get("scaling"), is_causal_call(module, options.get("is_causal"))
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        keys, window = k.new if isinstance(k, CachedKeys) else k, options.get("sliding_window")
        note(Attended(names[module], q, keys, v, mask, scaling, causal, window, dims[module]))

    with ExitStack() as stack:
        for module in names:
            if hasattr(module, "is_causal"):
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.enter_context(evaluating(model))
        stack.enter_context(watched(SOFTMAX, see))
        run(model, batch)


def run(model: PreTrainedModel, batch: Batch, **options: Any) -> Any:
    """Call the model without a cache, which would make it attend as in generation."""
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise ValueError(f'a batch holds the arguments of a call by name, as {{"input_ids": …}}, but is a {kind}')
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    return model(**{**batch, **options})
