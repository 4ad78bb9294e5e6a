"""A law of all old checkpoints that the tests load: the `state_dict` of a loaded model, in a new model of the same
constructor and options, gives the same outputs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.compat import weights
from linattn.compat.weights.loading import CONVERSIONS


class SameWhenSavedAgain(NamedTuple):
    """A forward hook: compares each output in evaluation with that of a new model of `make` with the same weights."""

    make: Callable[[], nn.Module]

    def __call__(self, model: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        saved = model.state_dict()
        if model.training:
            return
        fresh = self.make().eval()
        floating = [x.dtype for x in saved.values() if x.is_floating_point()]
        fresh.to(floating[0] if floating else None).load_state_dict(saved)
        with torch.no_grad():
            assert_close(fresh(*args, **options), output.detach(), rtol=0, atol=0)


class Make(NamedTuple):
    constructor: type[nn.Module]
    config: Mapping[str, Any]

    def __call__(self) -> nn.Module:
        return self.constructor(**CONVERSIONS[self.constructor].arguments(self.constructor, self.config))


@pytest.fixture(autouse=True)
def _every_loaded_model_can_be_saved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    load = weights.load

    def watched(constructor: Any, config: Any, state_dict: Any, **options: Any) -> nn.Module:
        model = load(constructor, config, state_dict, **options)
        model.register_forward_hook(SameWhenSavedAgain(Make(constructor, config)), with_kwargs=True)
        return model

    monkeypatch.setattr(weights, "load", watched)
