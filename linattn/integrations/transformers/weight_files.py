"""The files of weights that transformers writes."""

from contextlib import suppress
from pathlib import Path

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from linattn.files import set_default_mode


def finish_weights(folder: Path) -> None:
    """Give the files of weights in a folder the mode of any new file, where safetensors lets only the owner read them.
    Delete the single file of an earlier save where the new weights are in several: the single one would be loaded."""
    single = folder / SAFE_WEIGHTS_NAME
    with suppress(FileNotFoundError):
        if (folder / SAFE_WEIGHTS_INDEX_NAME).stat().st_mtime_ns > single.stat().st_mtime_ns:
            single.unlink()
    for file in folder.glob("*.safetensors"):
        set_default_mode(file)
