"""Loads all of a checkpoint into a model of ours, or nothing and names what does not fit."""

import re
import warnings
from collections.abc import Mapping
from functools import reduce
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from linattn.compat.weights.conversion import Conversion, Move

Model = TypeVar("Model", bound=nn.Module)
Tensors = Mapping[str, Tensor]

CONVERSIONS: dict[type[nn.Module], Conversion] = {}
"""The conversion of each constructor, which its package adds when it is imported."""

# what training puts around a model, and so before each name: DistributedDataParallel, torch.compile, and the packages'
# own AutoregressiveWrapper and Autopadder
WRAPPERS = ("module.", "_orig_mod.", "net.")
# as axial-positional-embedding up to 0.2.1 had it
OLDER = (re.compile(r"\bpos_emb\.weights_(\d+)$"), r"pos_emb.weights.\1")


def load(
    constructor: type[Model],
    config: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    *,
    aligned_rotary: bool = False,
) -> Model:
    """Return a model of `constructor`, of linattn.compat, with the weights of the original class of that name.

    `config` has the arguments that were given to the original. The model is in evaluation mode, in the weights' dtype.
    A `ValueError` names the original's tensors that are missing, have another shape or would not be used, and our
    tensors that would not be loaded.

    `aligned_rotary` is for performer-pytorch models with local heads that look both ways, trained with local-attention
    before 1.7.2. Later versions rotate queries of these heads by one window too many, and by default `load` rotates the
    weights likewise."""
    for name, value in (("config", config), ("state_dict", state_dict)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a dict, but is a {type(value).__name__}")
    if constructor not in CONVERSIONS:
        came = constructor.__name__ if isinstance(constructor, type) else f"a {type(constructor).__name__}"
        known = "".join(f", {kind.__name__}" for kind in CONVERSIONS)
        raise ValueError(
            f"old weights load into a constructor of linattn.compat{known}, but {came} came; what is "
            "in a wrapper is loaded alone, and wrapped again"
        )
    conversion = CONVERSIONS[constructor]
    model = constructor(**conversion.arguments(constructor, config))
    conversion.adapt(model)
    theirs = _names(state_dict, conversion.roots)
    moves = list(conversion.moves(model, aligned_rotary))
    _check(constructor, conversion, moves, model.state_dict(), theirs)
    floating = [theirs[move.theirs].dtype for move in moves if move.theirs and theirs[move.theirs].is_floating_point()]
    model = model.to(reduce(torch.promote_types, floating, floating[0]) if floating else None)
    ours = model.state_dict()
    with torch.no_grad():
        for move in moves:
            source = ours[move.ours] if move.theirs is None else theirs[move.theirs]
            ours[move.ours].copy_(move.change.apply(source))
    for difference in conversion.differences(model):
        warnings.warn(f"{constructor.__name__}: {difference}", stacklevel=2)
    return cast(Model, model.eval())


def _names(state_dict: Tensors, roots: tuple[str, ...]) -> Tensors:
    """Return the tensors by their names in the newest version of the package, and without the prefixes that wrappers
    add. The names in a model without a wrapper begin with one of `roots`."""
    pattern, name_now = OLDER
    theirs = {pattern.sub(name_now, name): tensor for name, tensor in state_dict.items()}
    while theirs and not any(name.startswith(roots) for name in theirs):
        wrapper = next((wrapper for wrapper in WRAPPERS if all(name.startswith(wrapper) for name in theirs)), None)
        if wrapper is None:
            break
        theirs = {name.removeprefix(wrapper): tensor for name, tensor in theirs.items()}
    return theirs


def _check(constructor: type, conversion: Conversion, moves: list[Move], ours: Tensors, theirs: Tensors) -> None:
    used = {move.theirs for move in moves if move.theirs is not None}
    filled = {move.ours for move in moves}
    assert filled <= set(ours), filled - set(ours)
    shapes = [
        (move.theirs, tuple(theirs[move.theirs].shape), tuple(move.change.shape(ours[move.ours].shape)))
        for move in moves
        if move.theirs is not None and move.theirs in theirs
    ]
    faults = {
        "missing": sorted(used - set(theirs)),
        "not used": [name for name in theirs if name not in used and not _matches(name, conversion.left_out)],
        "of another shape": [
            f"{name} is {shape}, expected {wanted}" for name, shape, wanted in shapes if shape != wanted
        ],
        "new here": [name for name in ours if name not in filled and not _matches(name, conversion.new)],
    }
    if any(faults.values()):
        lines = [f"\n  {fault}: {', '.join(names)}" for fault, names in faults.items() if names]
        raise ValueError(f"these are not the weights of a {constructor.__name__} with this config:{''.join(lines)}")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)
