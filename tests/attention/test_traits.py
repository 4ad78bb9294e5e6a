"""The facts about a few attentions and mixtures; the laws of attentions are parametrised by these facts."""

import pytest
import torch

from linattn.attention import ATTENTIONS, Traits, traits
from linattn.attention.traits import _traits

# every fact is true of one and false of another
FACTS = {
    "elu": {"causal", "bidirectional", "cross"},
    "hedgehog": {"causal", "bidirectional", "cross", "learned"},
    "local": {"causal", "bidirectional"},
    "retention": {"causal"},
    "kda": {"causal", "gated"},
    "linformer_mean": {"bidirectional", "cross", "fixed_length"},
    "linformer": {"bidirectional", "cross", "learned", "fixed_length"},
    "local+elu": {"causal", "bidirectional"},
    "elu:1+kda:3": {"causal", "gated"},
    "hedgehog+linformer_mean": {"bidirectional", "cross", "learned", "fixed_length"},
}


@pytest.mark.parametrize("spec", FACTS)
def test_facts(spec):
    assert {fact for fact, holds in traits(spec)._asdict().items() if holds} == FACTS[spec]
    assert FACTS[spec] <= {*Traits._fields}


@pytest.mark.usefixtures("unchecked")
def test_unknown_names_are_refused():
    for spec, message in (("elux", "did you mean 'elu'"), ("local+elux", "'elux' in 'local"), (3, "must be a string")):
        with pytest.raises(ValueError, match=message):
            traits(spec)


def test_nothing_else_changes():
    """Wherever the facts are asked for first: random state stays, and no other device holds what is built."""
    _traits.cache_clear()
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert all(any(traits(name)) for name in ATTENTIONS)
    assert torch.equal(before, torch.get_rng_state())
