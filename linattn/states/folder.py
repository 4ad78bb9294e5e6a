"""The files of a prefix cache: states of one model, in a folder that several processes and models may share."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from linattn.states.file import fingerprint, load_state, save_state
from linattn.states.holders import options_of

Key = tuple[int, str]
"""The number of tokens, and a digest of them."""


class StateFolder:
    """States by key, in files that are complete or absent. All files under `root` have at most `budget` bytes together:
    those that were not used for the longest time are deleted first.

    The states of a model are in a folder of their own, whose name depends on the model's class, options and weights and
    on `variant`; so no model finds the states of another."""

    def __init__(self, root: str | os.PathLike[str], model: nn.Module, variant: str, *, budget: int):
        identity = json.dumps([type(model).__name__, options_of(model), fingerprint(model), variant], sort_keys=True)
        self.root, self.budget = Path(root), budget
        self.folder = self.root / hashlib.sha256(identity.encode()).hexdigest()[:32]
        self.folder.mkdir(parents=True, exist_ok=True)

    def keys(self) -> set[Key]:
        parts = (path.stem.partition("-") for path in self.folder.glob("[0-9]*-*.state"))
        return {(int(length), digest) for length, _, digest in parts}

    def load(self, key: Key) -> Any:
        """Return the state, None if there is no such file any more, or a damaged one."""
        try:
            return load_state(self._path(key), model=None)
        except (FileNotFoundError, ValueError):
            return None

    def save(self, key: Key, state: Any) -> None:
        save_state(state, self._path(key), model=None, num_tokens=key[0])

    def touch(self, key: Key) -> None:
        """Note that the state was used now."""
        with suppress(FileNotFoundError):
            os.utime(self._path(key))

    def trim(self) -> None:
        """Delete the files that were not used for the longest time until the others fit in the budget. Half-written
        files count too."""
        files = list[tuple[int, int, Path]]()
        for path in self.root.glob("*/*.state*"):
            with suppress(FileNotFoundError):
                files.append(((status := path.stat()).st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in files) - self.budget
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key[0]}-{key[1]}.state"
