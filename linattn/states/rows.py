"""The rows of states. A state holds the past of a batch of sequences, one per row; so rows can be chosen, joined and
repeated like those of any tensor. No function writes to a state that it was given."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Shaped
from torch import Tensor

from linattn.attention.base import KeysAndValues
from linattn.checks import check_instances, check_sizes
from linattn.ops import nested
from linattn.states.compression import Compressed, restore
from linattn.states.holders import held_state, hold, map_state

State = TypeVar("State")
Rows = Tensor | Sequence[int] | slice


def count_rows(state: Any) -> int:
    """Return the number of sequences whose past the state holds. Raises ValueError for what is no state."""
    rows = nested.batch_size(held_state(state))
    if rows is None:
        raise ValueError(f"a state is a tensor or nested tuples of tensors, but this is a {type(state).__name__}")
    return rows


def num_bytes(state: Any) -> int:
    """Return the bytes of a state's tensors, each counted once."""
    sizes: dict[int, int] = {}
    nested.map_state(lambda tensor: sizes.update({id(tensor): tensor.nbytes}), held_state(state))
    return sum(sizes.values())


def select(state: State, rows: Rows) -> State:
    """Return the state of some of the rows, in the order that is given: numbers from 0, as often as wanted, or a slice.
    Keys of softmax attention that a mask hides in all of these rows are left out.

    Raises ValueError if there is no such row."""
    count = count_rows(state)
    # a copy in any case: a view would keep the other rows in memory
    index = whole_numbers(range(count)[rows] if isinstance(rows, slice) else rows)
    if index is None or index.ndim != 1:
        raise ValueError(f"rows must be whole numbers in one dimension or a slice, but are {rows!r}")
    if len(index) and (int(index.min()) < 0 or int(index.max()) >= count):
        raise ValueError(f"the state has the rows 0 to {count - 1}, but {index.tolist()} were asked for")
    selected = map_state(lambda x: x.index_select(0, index.to(x.device)), state)
    return map_state(_without_hidden, selected, leaf=KeysAndValues)


def whole_numbers(numbers: Any) -> Tensor | None:
    """Return a tensor, or a sequence, of whole numbers as int64, None for anything else."""
    try:
        x = torch.as_tensor(numbers)
    except (RuntimeError, TypeError, ValueError):
        return None
    # an empty list has no dtype
    is_other = x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
    return None if is_other and x.numel() else x.long()


def _without_hidden(part: KeysAndValues) -> KeysAndValues:
    if part.key_mask is None:
        return part
    present = part.key_mask.any(0).any(0).nonzero().squeeze(1)
    # a compressed tensor is a tuple of two
    k, v, mask = map_state(lambda x: x.index_select(2, present), tuple(part))
    return KeysAndValues(k, v, None if bool(mask.all()) else mask)


def repeat(state: State, times: int) -> State:
    """Return the state with each row `times` times, for as many continuations of its past. The copies of a row are
    neighbours. A single row is expanded without a copy, as nothing writes to states."""
    check_sizes(times=times)
    if count_rows(state) == 1:
        return map_state(lambda x: x.expand(times, *x.shape[1:]), state)
    return map_state(lambda x: x.repeat_interleave(times, 0), state)


def concatenate(states: Sequence[State]) -> State:
    """Return one state with the rows of all, which must be of the same layer or model, on one device.

    Softmax attention keeps every key, so rows may have different numbers of them: the shorter ones are filled up by
    keys that a mask hides. Raises ValueError for states of different layers."""
    check_instances(Sequence, states=states)
    if not states:
        raise ValueError("there is no state to concatenate")
    for state in states:
        count_rows(state)
    return hold(_concatenated([held_state(state) for state in states], "state"), states[0])


def _concatenated(parts: list[Any], name: str) -> Any:
    if {Compressed, Tensor} <= set(map(type, parts)):
        # some had numbers that do not fit
        parts = [restore(part) for part in parts]
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        kinds = " and ".join(sorted({type(part).__name__ for part in parts}))
        raise ValueError(f"states of one layer or model can be concatenated, but the {name} is a {kinds}")
    if isinstance(first, KeysAndValues):
        return _joined_keys(parts, name)
    if isinstance(first, Tensor):
        return _joined_tensors(parts, name)
    if isinstance(first, tuple):
        if any(len(part) != len(first) for part in parts):
            raise ValueError(f"the {name} has {' and '.join(str(len(part)) for part in parts)} parts")
        names = getattr(first, "_fields", range(len(first)))
        items = zip(names, zip(*parts, strict=True), strict=True)
        joined = [_concatenated(list(of_all), f"{name}.{key}") for key, of_all in items]
        return type(first)(*joined) if hasattr(first, "_fields") else tuple(joined)
    if any(part != first for part in parts):
        raise ValueError(f"the {name} must be the same in all states, but is {' and '.join(map(str, parts))}")
    return first


def _joined_tensors(parts: list[Shaped[Tensor, "..."]], name: str) -> Shaped[Tensor, "..."]:
    first = parts[0]
    for part in parts:
        if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype or part.device != first.device:
            both = (f"(b, {', '.join(map(str, x.shape[1:]))}) of {x.dtype} on {x.device}" for x in (first, part))
            raise ValueError(f"only rows of the same size can be joined, but the {name} is {' and '.join(both)}")
    return torch.cat(parts)


def _joined_keys(parts: list[KeysAndValues], name: str) -> KeysAndValues:
    """Join the keys and values of rows with different numbers of them: hidden zeros stand in front of the shorter."""
    masks = [_mask(part) for part in parts]
    longest, heads = (max(mask.shape[i] for mask in masks) for i in (2, 1))
    k, v = (
        # a compressed tensor is a tuple of two
        [map_state(lambda x: F.pad(x, (0, 0, longest - x.shape[2], 0)), part) for part in of_all]
        for of_all in ([part.k for part in parts], [part.v for part in parts])
    )
    k, v = _concatenated(k, f"{name}.k"), _concatenated(v, f"{name}.v")
    if all(part.key_mask is None and mask.shape[2] == longest for part, mask in zip(parts, masks, strict=True)):
        return KeysAndValues(k, v)
    return KeysAndValues(k, v, torch.cat([F.pad(x.expand(-1, heads, -1), (longest - x.shape[2], 0)) for x in masks]))


def _mask(part: KeysAndValues) -> Bool[Tensor, " b #hk m"]:
    if part.key_mask is not None:
        return part.key_mask
    k: Any = part.k
    k = k if isinstance(k, Tensor) else k[0]
    return torch.ones(len(k), 1, k.shape[2], dtype=torch.bool, device=k.device)


def to(state: State, *, device: Any = None, dtype: torch.dtype | None = None) -> State:
    """Return the state on another device, and its floating-point numbers in another dtype, such as float64 for a
    model in float64. `extend` refuses a dtype that the layer does not keep; `compress` makes states smaller. With a
    `dtype`, a compressed state is restored first."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"a state's numbers are floating-point ones, but dtype is {dtype}; see compress")
    state = state if dtype is None else restore(state)
    return map_state(lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None), state)


def detach(state: State) -> State:
    """Return the state without its history, so that a gradient ends here: truncated backpropagation through time."""
    return map_state(Tensor.detach, state)
