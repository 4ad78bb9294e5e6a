"""A part of the sweep over the classes of transformers, one of each kind of attention; `make sweep` runs all."""

import pytest

from .sweep.outcomes import EQUAL, outcomes
from .sweep.small_models import classes

PART = {
    "BigBirdPegasusForCausalLM": "causal by its mask alone",
    "DeepseekV3ForCausalLM": "keys and values of all heads expanded from a cached latent",
    "InformerModel": "a model of time series",
    "JetMoeForCausalLM": "keys repeated after the cache",
    "MoonshineForConditionalGeneration": "a module that computes is_causal in each call",
    "NllbMoeForConditionalGeneration": "experts that read the mask",
    "PegasusXForConditionalGeneration": "causal by its mask alone, in a decoder",
    "Qwen2MoeForCausalLM": "a mask for a window that no layer has",
    "Qwen3_5ForCausalLM": "attention between other layers with a state",
}


@pytest.mark.parametrize("name", PART)
def test_a_class_passes_every_check(name):
    found = outcomes(name, classes()[name])
    assert found and set(found.values()) == {EQUAL}, found
