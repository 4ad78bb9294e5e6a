"""Rows that hold several documents, in transformers' models with linear attention: the number of each token's document,
from the arguments of the call, and the masks that keep documents apart in the softmax layers."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from linattn.integrations.transformers.documents import positions_in
from linattn.integrations.transformers.hybrids.places import lacks_mark

DOCUMENT_ARGUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q")
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""The name of the cache, and those that transformers still renames to it, after our hook."""
LEAKING = {
    "Qwen4ExpTextPLELayer": "its n-grams look across documents",
    "Glm5NextTextAttention": "its indexed attention looks across documents",
}
"""Layers that mix the documents of a row for all arguments, each with the reason."""
NO_POSITIONS_IN_MASK = {"granitemoehybrid"}
"""Models whose masks for softmax layers ignore the positions."""


def document_numbers(
    model: PreTrainedModel, arguments: Mapping[str, Any], names: tuple[str, ...], obstacle: str
) -> tuple[Int[Tensor, "#b n"] | None, dict[str, Any]]:
    """Return the number of each token's document (None: each row is one document), and new values for some arguments.

    `names` are the parameters of the model's forward, and `obstacle` is its `packing_obstacle`."""
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    # seq_idx is for kernels only: other functions of these models raise an error
    changes: dict[str, Any] = {} if arguments.get("seq_idx") is None else {"seq_idx": None}
    if tokens is None:
        return None, changes
    documents, restarts = _numbers(arguments, *tokens.shape[:2]), _restarts(model, arguments)
    if documents is None:
        documents = restarts
    elif restarts is not None and (restarts.diff() != documents.diff()).any():
        raise ValueError("position_ids restart at other tokens than the documents of cu_seq_lens_q or seq_idx begin")
    if documents is None:
        return None, changes
    _check(model, arguments, obstacle)
    changes |= {"use_cache": False, "attention_mask": None}
    if restarts is None and "position_ids" in names:
        changes["position_ids"] = positions_in(documents)
    if type(model).__module__.split(".")[-2] in NO_POSITIONS_IN_MASK:
        changes["attention_mask"] = _masks(model, positions_in(documents).expand(tokens.shape[:2]))
    return documents, changes


def packing_obstacle(model: nn.Module) -> str:
    """Return the reasons why a model cannot keep the documents of a row apart, an empty text if it can."""
    kinds = {type(layer).__name__: layer for layer in model.modules()}
    reasons = {name: why for name, why in LEAKING.items() if name in kinds}
    reasons |= {name: "its scan gets no documents" for name, layer in kinds.items() if lacks_mark(layer)}
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())


def _numbers(arguments: Mapping[str, Any], b: int, n: int) -> Int[Tensor, "#b n"] | None:
    """Number the documents by `seq_idx`, (b, n), or by `cu_seq_lens_q`, the starts of the documents of one row."""
    numbers, starts = arguments.get("seq_idx"), arguments.get("cu_seq_lens_q")
    if numbers is None and starts is not None:
        if b != 1:
            raise ValueError(f"cu_seq_lens_q must go with one row of tokens, but there are {b}")
        numbers = torch.bucketize(torch.arange(n, device=starts.device), starts[1:], right=True).unsqueeze(0)
    return numbers if numbers is None or torch.compiler.is_compiling() or numbers.diff().any() else None


def _restarts(model: PreTrainedModel, arguments: Mapping[str, Any]) -> Int[Tensor, "#b n"] | None:
    """Number the documents: one begins at each position that is not its predecessor plus one, but never at or right
    after padding. Return None if there is only one.

    A compiled graph, which cannot depend on the values, always gets numbers, unless there is a mask or a cache."""
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if positions is not None and positions.ndim == 3:
        # text, time, height and width; without the first, positions of images do not grow by one
        positions = positions[0] if len(positions) == 4 else None
    if (
        positions is None
        or positions.shape[1] < 2
        or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2))
    ):
        return None
    if torch.compiler.is_compiling() and (mask is not None or _has_cache(model, arguments)):
        return None
    breaks = F.pad(positions.diff(dim=-1) != 1, (1, 0))
    if mask is not None:
        present = mask[:, -positions.shape[1] :] != 0
        breaks = breaks & present & F.pad(present[:, :-1], (1, 0))
    return breaks.cumsum(-1) if torch.compiler.is_compiling() or breaks.any() else None


def _has_cache(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    use_cache = arguments.get("use_cache")
    use_cache = model.config.use_cache and not model.training if use_cache is None else use_cache
    return use_cache or cache_in(arguments) is not None


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a model, None if there is none."""
    return next((arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


def num_tokens(arguments: Mapping[str, Any]) -> int:
    tokens = arguments.get("input_ids")
    return (arguments["inputs_embeds"] if tokens is None else tokens).shape[1]


def _check(model: PreTrainedModel, arguments: Mapping[str, Any], obstacle: str) -> None:
    """Raise ValueError for a model or an argument that does not allow several documents in a row."""
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if obstacle:
        raise ValueError(f"{type(model).__name__} cannot keep the documents of a row apart: {obstacle}")
    if cache_in(arguments) is not None or arguments.get("use_cache"):
        raise ValueError("several documents in a row have no cache to continue: give use_cache=False, and no cache")
    if mask is not None and (torch.compiler.is_compiling() or not mask.all()):
        raise ValueError("several documents in a row do not go together with padding: give no attention_mask")
    if positions is not None and positions.ndim == 3 and len(positions) != 4:
        raise ValueError(
            f"several documents in a row need position_ids of text, but they are {tuple(positions.shape)} and have "
            "those of images only"
        )


def _masks(model: PreTrainedModel, positions: Int[Tensor, "b n"]) -> dict[str, Any]:
    """Return the masks that the model would make from these positions if it did not ignore them."""
    # transformers reads only the shape, the dtype and the device
    tokens = torch.empty(*positions.shape, 1, dtype=model.dtype, device=positions.device)
    causal = create_causal_mask(
        config=model.config, inputs_embeds=tokens, attention_mask=None, cache=None, position_ids=positions
    )
    return {"full_attention": causal, "linear_attention": None}
