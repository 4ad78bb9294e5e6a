"""Training on texts that are longer than a window: a window begins with the state after the window before it, and
gradients end at its first token (truncated backpropagation through time)."""

from collections import deque
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

from linattn.integrations.transformers.own_model.cache import LinattnCache
from linattn.integrations.transformers.own_model.heads import LinattnForCausalLM
from linattn.models import TokenModelState
from linattn.models.token_model import TokenModel
from linattn.nn.modes import evaluating
from linattn.states import (
    concatenate,
    count_rows,
    describe_state,
    detach,
    load_state,
    repeat,
    save_state,
    select,
    to,
)
from linattn.states.requirements import require_constant_state

CONTINUES = "continues"
"""The column of examples that continue others."""


class StatefulTrainer(Trainer):
    """Trains a `LinattnForCausalLM` on windows of longer texts. A window begins with the state after the window before
    it in its text.

    Data sets have a column `continues`. An example with True there continues the example `rows` places earlier: its
    past is the state after that example, and its first token is the last token of that example, which is a target there
    and not in the state. An example with False begins without a past. States have no gradient, so an update takes the
    memory and about the time of separate windows. Without the column, this class is transformers' Trainer.

    By default `rows` is the number of examples per update of all processes: row r of an update continues row r of the
    update before, so that neighbouring updates read the same texts and teach less than others. With a multiple of that
    number in `trainer.rows`, updates take turns with more texts.

    Examples keep their order, so `train_sampling_strategy` must be "sequential". Checkpoints hold the states; a run
    may resume with another number of processes if `rows` is the same. After an epoch that ends with a batch of fewer
    examples, the size of the batches must be the same, too. `evaluate` reads each example without a past.

    Raises ValueError for attention whose state grows, such as softmax, for learned positions, which end, and with
    activation checkpointing or FSDP."""

    rows: int | None = None
    # the states before the next batches of this process, which have `rows` examples with those of other processes
    _states: deque[Any]
    _empty: Any = None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        continues = inputs.get(CONTINUES)
        inputs = {name: value for name, value in inputs.items() if name != CONTINUES}
        if continues is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._empty is None:
            self._begin(model, inputs["input_ids"])
        cache = LinattnCache(self._past(continues.bool()))
        result = super().compute_loss(model, _window(inputs, cache), return_outputs, num_items_in_batch)
        self._states.append(detach(cache.state))
        return result

    def _begin(self, model: nn.Module, tokens: Tensor) -> None:
        parts = list(model.modules())
        own = next((part for part in parts if isinstance(part, LinattnForCausalLM)), None)
        if own is None:
            raise ValueError(f"StatefulTrainer trains a LinattnForCausalLM, but the model is a {type(model).__name__}")
        require_continuation(own.model, "StatefulTrainer")
        if any(isinstance(part, FSDPModule) for part in parts):
            raise ValueError("StatefulTrainer does not work with FSDP")
        if (strategy := self.args.train_sampling_strategy) != "sequential":
            raise ValueError(f'train_sampling_strategy must be "sequential", but is "{strategy}"')
        # a call of the model itself, as mixed precision decides on the dtypes of its state
        cache = LinattnCache()
        with torch.no_grad(), evaluating(model):
            model(input_ids=tokens[:1, :0], cache=cache, use_cache=True)
        self._empty = cache.state
        if not hasattr(self, "_states"):
            self._states = deque([repeat(self._empty, len(tokens))] * self._count_batches())

    def _past(self, continues: Bool[Tensor, " b"]) -> TokenModelState:
        """Return the state before each row of the next batch."""
        state, count = self._states.popleft(), len(continues)
        if continues.any() and (before := count_rows(state)) != count:
            raise ValueError(f"a batch of {count} examples cannot continue one of {before} examples")
        # row 0 is the empty one
        rows = torch.arange(1, count + 1, device=continues.device) * continues
        return select(concatenate([self._empty, state]), rows)

    def _count_batches(self) -> int:
        """Return the number of batches of this process in `rows` examples of all processes."""
        args = self.args
        at_once = args.train_batch_size * args.world_size
        rows = self.rows or at_once * args.gradient_accumulation_steps
        if rows % (at_once * args.gradient_accumulation_steps):
            update = at_once * args.gradient_accumulation_steps
            raise ValueError(f"rows must be a multiple of the examples per update, {update}, but is {rows}")
        return rows // at_once

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        # an earlier run, which may have been interrupted, leaves no states; those of a checkpoint are loaded later
        self._empty = None
        vars(self).pop("_states", None)
        return super()._inner_training_loop(*args, **options)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._empty is not None:
            file = Path(output_dir) / f"state-{self.args.process_index:06}.safetensors"
            rows = " ".join(str(count_rows(state)) for state in self._states)
            save_state(concatenate(self._states), file, model=None, notes={"rows": rows})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None or not (files := sorted(Path(checkpoint).glob("state-*.safetensors"))):
            return
        # processes take batches in turn
        batches = [batch for turn in zip(*map(_saved_batches, files), strict=True) for batch in turn]
        size, count = self.args.train_batch_size, self._count_batches() * self.args.world_size
        if len(batches) != count:
            state = concatenate(batches)
            if (rows := count_rows(state)) != size * count:
                raise ValueError(
                    f"{checkpoint} has states of {rows} rows, but batches of {size} examples need {size * count}: "
                    "resume with the same `rows` and, after an epoch that ends with a short batch, the same batch size"
                )
            batches = [select(state, slice(start, start + size)) for start in range(0, rows, size)]
        own = batches[self.args.process_index :: self.args.world_size]
        self._states = deque(to(batch, device=self.args.device) for batch in own)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        self._signature_columns = [*columns, CONTINUES]


def _saved_batches(file: Path) -> list[Any]:
    """Return the states before the next batches of one process."""
    state, stop, batches = load_state(file, model=None), 0, []
    notes: Any = describe_state(file).notes
    for count in map(int, notes["rows"].split()):
        start, stop = stop, stop + count
        batches.append(select(state, slice(start, stop)))
    return batches


def require_continuation(model: TokenModel, purpose: str) -> None:
    """Raise ValueError unless the state of a model can go on through texts of any length."""
    require_constant_state(model, purpose)
    if model.max_length is not None:
        raise ValueError(f"{purpose} needs a model without learned positions, but these end at {model.max_length:,}")


def _window(inputs: dict[str, Any], cache: LinattnCache) -> dict[str, Any]:
    """Return the inputs without the last token, which is a target only."""
    read = {name: inputs[name][:, :-1] for name in ("input_ids", "attention_mask") if name in inputs}
    return {**inputs, **read, "cache": cache, "use_cache": True}
