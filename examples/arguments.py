"""Types of arguments for the programs here; those of numbers are the command line's own."""

import argparse
from pathlib import Path


def existing(text: str) -> Path:
    """Return the path of an argument that names a file, which must be there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)
