"""Rows that hold several documents, in transformers' models with linear attention: where each document begins, as the
caller tells it, and what the softmax layers between must be given so that they keep documents apart too."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

TOLD_BY = ("position_ids", "seq_idx", "cu_seq_lens_q")
LEAKING = {
    "Qwen4ExpTextPLELayer": "its n-grams look across documents",
    "Glm5NextTextAttention": "its indexed attention looks across documents",
}
"""Layers beside the scans that mix documents, whatever they are given."""
NO_POSITIONS_IN_MASK = {"granitemoehybrid"}
"""Models that do not tell their softmax layers' mask where positions restart."""


def documents_apart(
    model: PreTrainedModel, given: Mapping[str, Any], names: tuple[str, ...]
) -> tuple[Int[Tensor, "#b n"] | None, dict[str, Any]]:
    """Return the number of each token's document, None for one document per row, and the arguments to change.

    `given` are the arguments of the call, `names` the parameters of the model's forward."""
    tokens = given.get("input_ids")
    b, n = (given["inputs_embeds"] if tokens is None else tokens).shape[:2]
    cache = given.get("past_key_values", given.get("cache_params"))
    changes: dict[str, Any] = {name: None for name in ("seq_idx",) if given.get(name) is not None}
    documents = _documents(given, b, n, may_have_cache=cache is not None or _keeps_cache(model, given))
    if documents is None:
        return None, changes
    _check(model, given, cache)
    changes["use_cache"] = False
    if "position_ids" in names and given.get("position_ids") is None:
        changes["position_ids"] = _positions(documents)
    changes["attention_mask"] = None
    if type(model).__module__.split(".")[-2] in NO_POSITIONS_IN_MASK:
        changes["attention_mask"] = _masks(model, _positions(documents).expand(b, n))
    return documents, changes


def why_not_packed(model: nn.Module) -> str:
    """Return why a model cannot keep the documents of a row apart, or nothing."""
    kinds = {type(layer).__name__ for layer in model.modules()}
    return "; ".join(f"{name}: {why}" for name, why in LEAKING.items() if name in kinds)


def _documents(given: Mapping[str, Any], b: int, n: int, *, may_have_cache: bool) -> Int[Tensor, "#b n"] | None:
    """Number the documents, or return None where there is one. A compiled graph cannot look at the numbers: there,
    positions are taken for those of several documents unless there is a cache or a mask."""
    told, mask, by_positions = _told(given, b, n), given.get("attention_mask"), None
    positions = given.get("position_ids")
    if positions is not None and positions.ndim == 3:
        # text, time, height and width; without the first, positions of images do not grow by one
        positions = positions[0] if len(positions) == 4 else None
    if positions is None or n < 2 or (mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2)):
        return told
    if torch.compiler.is_compiling():
        return told if told is not None or may_have_cache or mask is not None else _restarts(positions, None)
    by_positions = _restarts(positions, mask)
    if told is None:
        return by_positions if by_positions.any() else None
    if (by_positions.diff() != told.diff()).any() and by_positions.any():
        raise ValueError("position_ids restart at other tokens than the documents of cu_seq_lens_q or seq_idx begin")
    return told


def _told(given: Mapping[str, Any], b: int, n: int) -> Int[Tensor, "#b n"] | None:
    """Number the documents by `seq_idx`, (b, n), or by `cu_seq_lens_q`, the starts of the documents of one row."""
    numbers, starts = given.get("seq_idx"), given.get("cu_seq_lens_q")
    if numbers is not None:
        return numbers
    if starts is None:
        return None
    if b != 1:
        raise ValueError(f"cu_seq_lens_q must go with one row of tokens, but there are {b}")
    return torch.bucketize(torch.arange(n, device=starts.device), starts[1:], right=True).unsqueeze(0)


def _restarts(positions: Int[Tensor, "#b n"], mask: Tensor | None) -> Int[Tensor, "#b n"]:
    """Count the tokens up to each whose position does not follow the one before. Positions of padding say nothing."""
    breaks = F.pad(positions.diff(dim=-1) != 1, (1, 0))
    if mask is not None:
        present: Bool[Tensor, "b n"] = mask[:, -positions.shape[1] :] != 0
        breaks = breaks & present & F.pad(present[:, :-1], (1, 0))
    return breaks.cumsum(-1)


def _keeps_cache(model: PreTrainedModel, given: Mapping[str, Any]) -> bool:
    wanted = given.get("use_cache")
    return (not model.training and model.config.use_cache) if wanted is None else wanted


def _check(model: PreTrainedModel, given: Mapping[str, Any], cache: Any) -> None:
    mask = given.get("attention_mask")
    if why := why_not_packed(model):
        raise ValueError(f"{type(model).__name__} cannot keep the documents of a row apart: {why}")
    if cache is not None or given.get("use_cache"):
        raise ValueError("several documents in a row have no cache to continue: give use_cache=False, and no cache")
    if mask is not None and not torch.compiler.is_compiling() and not mask.all():
        raise ValueError("several documents in a row do not go together with padding: leave the padding out")


def _positions(documents: Int[Tensor, "#b n"]) -> Int[Tensor, "#b n"]:
    place = torch.arange(documents.shape[1], device=documents.device)
    starts = F.pad(documents.diff(dim=-1) != 0, (1, 0), value=True)
    return place - torch.where(starts, place, 0).cummax(-1).values


def _masks(model: PreTrainedModel, positions: Int[Tensor, "b n"]) -> dict[str, Any]:
    """Return the masks that the model would make if it looked at positions."""
    # transformers reads the shape, the dtype and the device
    tokens = torch.empty(*positions.shape, 1, dtype=model.dtype, device=positions.device)
    causal = create_causal_mask(
        config=model.config, inputs_embeds=tokens, attention_mask=None, past_key_values=None, position_ids=positions
    )
    return {"full_attention": causal, "linear_attention": None}
