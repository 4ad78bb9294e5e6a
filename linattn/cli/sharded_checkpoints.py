"""The checkpoint of a model whose weights are sharded: each process writes its part, and any number of processes reads
them, sharded or not. The weights are in the file that a model in one process has, too."""

import os
import shutil
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from transformers import PreTrainedModel

from linattn.models.storage import ARCHITECTURE, WEIGHTS

OPTIMIZER = "optimizer"
"""The folder of the optimizer's parts."""
WHOLE_OPTIMIZER = "optimizer.pt"
"""The Trainer's file of an optimizer that is not sharded."""


def save_weights(model: PreTrainedModel, folder: Path, *, first: bool) -> None:
    """Write the weights and the configuration for any loader. torch joins the parts of the processes on the disk, so
    that no process holds all weights; the `first` process does the rest."""
    parts = folder / "parts"
    writer = HuggingFaceStorageWriter(str(parts), save_distributed=True, enable_consolidation=True)
    save(get_model_state_dict(model), storage_writer=writer)
    if first:
        os.replace(next(parts.glob("model-*.safetensors")), folder / WEIGHTS)
        shutil.rmtree(parts)
        config = copy(model.config)
        config.architectures, config.dtype = [ARCHITECTURE], str(model.dtype).removeprefix("torch.")
        config.save_pretrained(folder)


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Let each process read its part of the weights from the file of all."""
    weights = get_model_state_dict(model)
    load(weights, storage_reader=HuggingFaceStorageReader(str(folder)))
    set_model_state_dict(model, weights)


def save_optimizer(model: PreTrainedModel, optimizer: Optimizer, folder: Path) -> None:
    save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / OPTIMIZER)


def load_optimizer(model: PreTrainedModel, optimizer: Optimizer, folder: Path) -> None:
    """Load the state of the optimizer, sharded or not, from a checkpoint that is sharded or not."""
    options = StateDictOptions()
    if (folder / OPTIMIZER).exists():
        state = get_optimizer_state_dict(model, optimizer)
        load(state, checkpoint_id=folder / OPTIMIZER)
    else:
        options = StateDictOptions(full_state_dict=True)
        state = _by_names(model, optimizer, torch.load(folder / WHOLE_OPTIMIZER, weights_only=True))
    set_optimizer_state_dict(model, optimizer, state, options=options)


def _by_names(model: PreTrainedModel, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with the names of parameters in the place of their numbers."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [group | {"params": [order[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[i]: x for i, x in state["state"].items()}, "param_groups": groups}
