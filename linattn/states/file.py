"""A state in a file, with what it belongs to. The format is safetensors: tensors named by their place in the state, and
a description in JSON. Nothing in it is executed."""

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from linattn.checks import check_instances, check_sizes, check_types, given, plain_number
from linattn.files import atomic_file, safetensors_library, write_tensors
from linattn.models.storage import check_version
from linattn.ops.nested import map_state
from linattn.states.holders import held_state, hold, options_of
from linattn.states.rows import count_rows
from linattn.version import __version__

FORMAT = "linattn state 1"
_DESCRIPTION = "linattn"


class StateFile(NamedTuple):
    """The description of a state in its file: how many tokens were read (`num_tokens`, None if `save_state` was not
    given it), the number of `rows`, the class of the `model` that read them, its `config` (of a language model, or
    one of transformers), the fingerprint of its `weights` (None for the state of an operator), the `notes` passed to
    `save_state`, and the `linattn_version` that wrote the file."""

    num_tokens: int | None
    rows: int
    model: str | None
    config: dict[str, Any] | None
    weights: str | None
    notes: dict[str, str] | None
    linattn_version: str


@check_types
def save_state(
    state: Any,
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None,
    num_tokens: int | None = None,
    notes: dict[str, str] | None = None,
) -> None:
    """Write the state to a file. The file takes its name `path` when all of it is on the disk.

    `model` is the module that the state belongs to, such as a language model: only this module will be able to load the
    state (and for a module that is no language model, any of its class with its weights). It is None for the state of
    an operator. `num_tokens` is the number of tokens that were read; `notes` are any strings by name."""
    check_sizes(least=0, **given(num_tokens=num_tokens))
    check_instances(nn.Module, **given(model=model))
    tensors: dict[str, Tensor] = {}
    tree, config = _described(held_state(state), "state", tensors), options_of(model)
    kind, weights = (None, None) if model is None else (type(model).__name__, fingerprint(model))
    file = StateFile(plain_number(num_tokens), count_rows(state), kind, config, weights, notes, __version__)
    described = {"format": FORMAT, "tree": tree, **file._asdict()}
    text = json.dumps(described | {"digest": _digest(described, tensors)}, sort_keys=True)
    with atomic_file(Path(path)) as partial:
        write_tensors(tensors, partial, {_DESCRIPTION: text})


@check_types
def load_state(path: str | os.PathLike[str], *, model: nn.Module | None) -> Any:
    """Return the state in the file `path`, on the device of `model`. Pass the model with which the state was saved: one
    of the same class and weights, a language model of the same configuration, or None for a state that was saved
    without a model.

    Raises ValueError if the file is damaged, altered, of a later version, or of another model."""
    path = Path(path)
    described, tensors = _read(path)
    written = described.pop("digest", None)
    if _digest(described, tensors) != written:
        raise ValueError(f"{path} is damaged: its content is not what was written")
    _check_model(path, described, model)
    device = next((x.device for x in model.parameters()), None) if model is not None else None
    return hold(map_state(lambda x: x.to(device), _built(described["tree"], tensors, "state")), model)


@check_types
def describe_state(path: str | os.PathLike[str]) -> StateFile:
    """Return the description of the state in the file `path`, without reading the state."""
    described, _ = _read(Path(path), with_tensors=False)
    return StateFile(**{name: described[name] for name in StateFile._fields})


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of the weights and buffers of `model` with their names, shapes and dtypes. Two models of the
    same options and fingerprint read a text into the same state. Raises ValueError for weights that several processes
    share."""
    check_instances(nn.Module, model=model)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor):
            _update(digest, name, tensor)
    return digest.hexdigest()


def digest_state(state: Any) -> str:
    """Return the SHA-256 of a state's tensors, with their names, shapes and dtypes."""
    tensors: dict[str, Tensor] = {}
    return _digest({"tree": _described(state, "state", tensors)}, tensors)


def _update(digest: Any, name: str, tensor: Shaped[Tensor, "..."]) -> None:
    if tensor.is_meta:
        raise ValueError(f"a file of a state needs the numbers of all tensors, but {name} is on the meta device")
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
    data = tensor.detach().cpu().contiguous()
    if data.nbytes and not data.data_ptr():
        raise ValueError(
            f"a file of a state needs all numbers in this process, but {name} is a {type(data).__name__}: undo what "
            "shares the model between processes first"
        )
    # numpy may be missing, and has no bfloat16
    digest.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b"")


def _digest(described: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        _update(digest, name, tensor)
    return digest.hexdigest()


def _described(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Add the tensors of a state, by name, and return how they are nested: {"kind": …, "parts": […]} for a tuple, its
    dtype for a tensor, and {"value": …} for anything else."""
    if isinstance(state, Tensor):
        # a copy, as safetensors takes no tensor that shares memory with another
        tensors[name] = state.detach().cpu().clone(memory_format=torch.contiguous_format)
        return str(state.dtype)
    if isinstance(state, tuple):
        names = getattr(state, "_fields", range(len(state)))
        parts = [_described(part, f"{name}.{key}", tensors) for key, part in zip(names, state, strict=True)]
        return {"kind": type(state).__name__, "parts": parts}
    if state is not None and not isinstance(state, bool | int | float | str):
        raise ValueError(f"a state holds tensors and numbers, but the {name} is a {type(state).__name__}")
    return {"value": state}


def _built(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    if isinstance(tree, str):
        # a copy, or the state would be a view of the whole file
        return tensors[name].clone()
    if "value" in tree:
        return tree["value"]
    kind = tree["kind"]
    if kind == "tuple":
        return tuple(_built(part, tensors, f"{name}.{i}") for i, part in enumerate(tree["parts"]))
    if (found := _kinds().get(kind)) is None:
        raise ValueError(f"the {name} is a {kind}, but no layer of this version or model has such a state")
    fields = zip(found._fields, tree["parts"], strict=True)
    return found(*(_built(part, tensors, f"{name}.{field}") for field, part in fields))


def _kinds() -> dict[str, Any]:
    """Return the named tuples of linattn that are imported, by name: a model imports the classes of its state."""
    return {
        kind.__name__: kind
        for kind in tuple.__subclasses__()
        if hasattr(kind, "_fields") and kind.__module__.startswith("linattn.")
    }


def _check_model(path: Path, described: dict[str, Any], model: nn.Module | None) -> None:
    own, theirs = None if model is None else type(model).__name__, described["model"]
    if own != theirs:
        names = [f"a {name}" if name else "an operator, without a model" for name in (theirs, own)]
        raise ValueError(f"{path} holds a state of {names[0]}, but this is {names[1]}")
    if (options := options_of(model)) is not None:
        differences = list(_differences(described["config"], options))
        if differences:
            raise ValueError(f"{path} holds a state of another model: {'; '.join(differences[:5])}")
    if model is not None and fingerprint(model) != described["weights"]:
        raise ValueError(f"{path} holds a state of other weights than this model's: a state serves only what made it")


def _differences(theirs: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    # as in the file, where a tuple is a list
    own = json.loads(json.dumps(own))
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            yield f"{name} was {theirs.get(name)!r} there and is {own.get(name)!r} here"


def _read(path: Path, *, with_tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the tensors. Raises ValueError for a file that is damaged or no state."""
    library = safetensors_library()
    if not path.is_file():
        raise FileNotFoundError(f"there is no state in {path}: no such file")
    try:
        if with_tensors:
            # read in one piece, as safe_open opens the file again for the tensors: it may have been replaced in between
            content, size = path.read_bytes(), 8
            tensors = library.torch.load(content)
            header = json.loads(content[size : size + int.from_bytes(content[:size], "little")])
            metadata = header.get("__metadata__")
        else:
            tensors = {}
            with library.safe_open(path, "pt") as file:
                metadata = file.metadata()
        text = (metadata or {}).get(_DESCRIPTION)
        described = None if text is None else json.loads(text)
    except (library.SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged, or no state: {error}") from error
    if not isinstance(described, dict) or not {"format", *StateFile._fields} <= described.keys():
        raise ValueError(f"{path} holds no state of linattn")
    check_version(described.get("linattn_version"), path)
    if described["format"] != FORMAT:
        raise ValueError(f"{path} has the format {described['format']!r}, but this version reads {FORMAT!r}")
    return described, tensors
