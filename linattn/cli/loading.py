"""Opens what is named on a command line: a model with its vocabulary, and the state of a text that it has read."""

import argparse
from pathlib import Path
from typing import Any

import torch

from linattn.cli.run_folder import is_pretrained, open_run
from linattn.console.errors import CommandError, explained
from linattn.console.processes import world_size
from linattn.models.token_model import TokenModel
from linattn.states import describe_state, load_state


def open_model(folder: Path, arguments: argparse.Namespace) -> tuple[TokenModel, Any]:
    """Return the model of a run, or of a folder that transformers loads, and its vocabulary. The model is on the GPU
    unless --cpu forbids it."""
    if is_pretrained(folder):
        if world_size() > 1:
            raise CommandError(f"{folder} is no run, so it takes one process, but there are {world_size()}")
        # this takes seconds to import
        from linattn.cli.pretrained import load_for_requests

        return load_for_requests(folder, arguments)
    described = open_run(folder)
    vocabulary, model = described.vocabulary(), described.model()
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise CommandError(f"the weights in {folder} are not finite: their training has diverged")
    return model.cuda() if torch.cuda.is_available() and not arguments.cpu else model, vocabulary


def load_past(model: TokenModel, arguments: argparse.Namespace) -> Any:
    """Return the state of --state, None without one."""
    if arguments.state is None:
        return None
    with explained("the state cannot be used", ValueError, FileNotFoundError):
        state, rows = load_state(arguments.state, model=model), describe_state(arguments.state).rows
        if rows != 1:
            raise ValueError(f"{arguments.state} has those of {rows} texts, not of one")
        return state
