"""Resampling of random features: after a number of training steps, alike on every rank, never in evaluation."""

from typing import final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from linattn.checks import check_sizes, given
from linattn.feature_maps import RandomProjection
from linattn.feature_maps.random_projection import draw_rows


@final
class ProjectionUpdater(nn.Module):
    """Resamples the random features in `instance`; each sample serves `feature_redraw_interval` training steps.

    A step is a call of `redraw_projections` in training: `Performer` calls it at the start of each training forward.
    Evaluation does not count, nor does the recomputation of activation checkpointing, which sees the features of the
    first forward if the backward pass comes before the next sample. The next sample follows from `seed` alone. So ranks
    that begin alike stay alike, without a broadcast, and a loaded model goes on as the saved one would have."""

    calls_since_last_redraw: Tensor
    seed: Tensor
    fixed: Tensor

    def __init__(self, instance: nn.Module, feature_redraw_interval: int | None):
        super().__init__()
        check_sizes(**given(feature_redraw_interval=feature_redraw_interval))
        self.feature_redraw_interval = feature_redraw_interval
        # in a tuple it is no submodule: the model that holds both would save every weight twice
        self._instance = (instance,)
        self.register_buffer("calls_since_last_redraw", torch.empty((), dtype=torch.int64))
        self.register_buffer("seed", torch.empty((), dtype=torch.int64))
        self.register_buffer("fixed", torch.empty((), dtype=torch.bool))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.calls_since_last_redraw.zero_()
        self.fixed.zero_()
        self.seed.copy_(_new_seed(None))

    @property
    def instance(self) -> nn.Module:
        return self._instance[0]

    def fix_projections_(self) -> None:
        """Never resample again. This is saved with the model."""
        self.fixed.fill_(True)

    def redraw_projections(self) -> None:
        """Count a training step, and resample if the features have served their number of steps."""
        if self.feature_redraw_interval is None or not (self.training and self.instance.training):
            return
        parts = [part for part in self.instance.modules() if isinstance(part, RandomProjection)]
        if not parts:
            return
        rows, kinds = [part.rows for part in parts], [2 * part.scaling + part.orthogonal for part in parts]
        # opaque to the compiler, which would break its graph where the counter decides
        step = torch.ops.linattn.count_step if torch.compiler.is_compiling() else count_step
        step(rows, kinds, self.calls_since_last_redraw, self.seed, self.fixed, self.feature_redraw_interval)

    def extra_repr(self) -> str:
        return f"feature_redraw_interval={self.feature_redraw_interval}"


class Redrawing(nn.Module):
    """The methods of models that hold projection updaters."""

    def check_redraw_projections(self) -> None:
        """Count a training step; after `feature_redraw_interval` of them the random features are resampled."""
        for updater in self._updaters():
            updater.redraw_projections()

    def fix_projection_matrices_(self) -> None:
        """Never resample the random features again."""
        for updater in self._updaters():
            updater.fix_projections_()

    def _updaters(self) -> list[ProjectionUpdater]:
        return [part for part in self.modules() if isinstance(part, ProjectionUpdater)]


@torch.no_grad()
def count_step(rows: list[Tensor], kinds: list[int], calls: Tensor, seed: Tensor, fixed: Tensor, interval: int) -> None:
    """If `calls` has reached `interval`, resample all `rows` from `seed`, and set `calls` to 0 and `seed` to the next
    one; then add 1 to `calls`. If `fixed`, do nothing. Tensors change in place, as others hold references to them.

    A kind is 2 · scaling + orthogonal, the two options of the `RandomProjection` with these rows in one number."""
    # a forward inside of a backward pass in this thread is a checkpoint's recomputation
    if torch._C._current_graph_task_id() != -1 or fixed:
        return
    if calls >= interval:
        generator = torch.Generator().manual_seed(int(seed))
        for part, kind in zip(rows, kinds, strict=True):
            part.copy_(draw_rows(part.shape[0], part.shape[1], bool(kind % 2), kind // 2, generator))
        seed.copy_(_new_seed(generator))
        calls.zero_()
    calls += 1


def _new_seed(generator: torch.Generator | None) -> Int[Tensor, ""]:
    return torch.randint(2**62, (), generator=generator, device="cpu")


torch.library.custom_op("linattn::count_step", count_step, mutates_args=("rows", "calls", "seed"))
