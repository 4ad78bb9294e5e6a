"""The state of a decoder that has a context is a state as any other: the laws of this folder hold for it, too."""

import pytest
import torch
from torch.testing import assert_close

from linattn import states
from linattn.attention import ATTENTIONS, traits
from linattn.models import EncoderDecoder
from linattn.models.loss import next_token_loss
from tests.models.causal import KINDS, NAMES
from tests.models.stacks import model, some_tokens
from tests.states.test_rows import assert_same

CROSS = sorted(name for name in ATTENTIONS if traits(name).cross and not traits(name).fixed_length)
CONTEXTS = {
    **{f"context {name}": {"contexts": (name,)} for name in CROSS},
    "reversible": {"reversible": True},
    "positions": {"positions": "learned"},
}
# every attention to a context, and one causal attention of each kind beside one
DECODERS = CONTEXTS | {name: {"attention": name} for name in NAMES if name in KINDS}
every_context = pytest.mark.parametrize("options", CONTEXTS.values(), ids=CONTEXTS.keys())
every_decoder = pytest.mark.parametrize("options", DECODERS.values(), ids=DECODERS.keys())


def make(options):
    decoder = model(cross=True, depth=1, **({"contexts": ("softmax",)} | options))
    return EncoderDecoder(model(causal=False, head=None, depth=1), decoder).eval()


@every_decoder
@torch.no_grad()
def test_joined_rows_go_on_as_each_does_alone(options):
    """Rows that have read different numbers of tokens, after sources of different lengths."""
    both, more = make(options), some_tokens(2, 5)
    begun = [both.begin(some_tokens(1, m)) for m in (9, 4)]
    rows = [both.decoder.extend(some_tokens(1, n), state)[1] for n, state in zip((8, 1), begun, strict=True)]
    joined = states.concatenate(rows)
    y, later = both.decoder.extend(more, joined)
    for i, state in enumerate(rows):
        own, own_later = both.decoder.extend(more[i : i + 1], state)
        assert_close(y[i : i + 1], own)
    assert_close(
        both.decoder.extend(more[:1], states.select(later, [1]))[0], both.decoder.extend(more[:1], own_later)[0]
    )
    forks = states.repeat(rows[1], 2)
    assert_close(both.decoder.extend(more, forks)[0][1:], own)
    assert_same(states.concatenate([states.select(joined, [i]) for i in (0, 1)]), joined, rtol=0, atol=0)


@every_decoder
@torch.no_grad()
def test_save_load_and_compression(options, tmp_path):
    both = make(options)
    state, path, tokens = both.begin(some_tokens(2, 9)), tmp_path / "context.state", some_tokens(2, 5)
    states.save_state(state, path, model=both.decoder, num_tokens=0)
    loaded = states.load_state(path, model=both.decoder)
    assert_close(both.decoder.extend(tokens, loaded)[0], both.decoder.extend(tokens, state)[0], rtol=0, atol=0)
    small = states.compress(state, torch.int8)
    assert states.num_bytes(small) < states.num_bytes(state)
    assert both.decoder.extend(tokens, states.restore(small))[0].isfinite().all()


@every_context
def test_a_cache_of_prefixes_has_those_of_each_source(options):
    both, text, more = make(options), some_tokens(1, 12), some_tokens(1, 3)
    cache = states.PrefixCache(both.decoder, every=7)
    begun = [both.begin(some_tokens(1, m)) for m in (9, 4)]
    with torch.no_grad():
        expected = [both.decoder.extend(more, both.decoder.extend(text, state)[1])[0] for state in begun]
        for i in (0, 1, 0):
            assert_close(both.decoder.extend(more, cache.read(text, begun[i]))[0], expected[i])
    assert len(cache) == 4


@every_context
def test_segments_are_the_whole(options):
    """Loss and gradients, those of the encoder too, which come through the state."""
    both, source, target = make(options), some_tokens(2, 9), some_tokens(2, 9)
    loss = next_token_loss(both(source, target), target)
    segmented, _ = states.segmented_loss(both.decoder, target, both.decoder.begin(both.encoder(source)), segment=5)
    assert_close(segmented, loss)
    for x, y in zip(*(torch.autograd.grad(z, [*both.parameters()]) for z in (loss, segmented)), strict=True):
        assert_close(y, x, rtol=1e-8, atol=1e-10)


def test_without_its_context_there_is_no_state():
    with pytest.raises(ValueError, match="context"):
        states.PrefixCache(make({}).decoder).read(some_tokens(1, 5))
