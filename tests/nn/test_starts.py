"""Packed rows: sequences one after the other give what each gives by itself, also where the convolution looks back."""

import pytest
import torch
from torch.testing import assert_close

from linattn.attention.named import named_attention
from linattn.attention.rotary import RotaryAttention
from linattn.nn import MultiheadAttention, ShortConvolution
from linattn.nn.starts import UNKNOWN, ages
from tests.attention.cases import FADING

# heads have more channels than there are tokens, so that shapes tell them apart
DIM, HEADS, N = 96, 2, 40
# two rows of sequences of other lengths, of one and of two tokens too
BEGINNINGS = ([0, 13, 14, 16, 30], [0, 5, 21])
OPTIONS = {
    "inputs": {"convolution": 4},
    "projections": {"convolution": 3, "convolution_on": "projections"},
    "rotary": {"rotary": 100.0},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_fading = pytest.mark.parametrize("name", [*FADING, "ssd+kda"])


def layer(name: str, **options) -> MultiheadAttention:
    inner = named_attention(name, num_heads=HEADS, head_dim=DIM // HEADS, causal=True)
    return MultiheadAttention(DIM, HEADS, inner, **options).double().eval()


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.zeros(2, N, dtype=torch.bool)
    for row, places in enumerate(BEGINNINGS):
        starts[row, places] = True
    return torch.randn(2, N, DIM, dtype=torch.float64, requires_grad=True), starts


def apart(module, x: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the outputs of each sequence by itself; those of missing tokens are zeros."""
    rows = []
    for row, places in enumerate(BEGINNINGS):
        ys = []
        for start, stop in zip(places, [*places[1:], N], strict=True):
            kept = torch.ones(stop - start, dtype=torch.bool) if key_mask is None else key_mask[row, start:stop]
            y = x.new_zeros(stop - start, DIM)
            ys.append(y.index_put((kept,), module(x[row, start:stop][kept].unsqueeze(0))[0]))
        rows.append(torch.cat(ys))
    return torch.stack(rows)


@every_fading
@every_option
def test_packed_sequences_are_separate(name, options):
    module, (x, starts) = layer(name, **options), packed()
    y, expected = module(x, starts=starts), apart(module, x)
    assert_close(y, expected)
    dy, leaves = torch.randn_like(y), [x, *module.parameters()]
    found, wanted = (torch.autograd.grad(of, leaves, dy, retain_graph=True) for of in (y, expected))
    assert_close(found, wanted)


@every_option
@pytest.mark.parametrize("name", ["ssd", "kda"])
def test_in_pieces_and_with_missing_tokens_too(name, options):
    """A start may be missing itself: the next present token begins then."""
    module, (x, starts) = layer(name, **options), packed()
    key_mask = torch.rand(2, N) < 0.6
    key_mask[0, 13], key_mask[1, 0] = False, False
    # of each sequence, a token in the piece where it begins
    key_mask[0, [14, 17]], key_mask[1, 2] = True, True
    for mask in (None, key_mask):
        expected, ys, state = apart(module, x, mask), [], None
        cuts = (12, 1, 2, 4, 0, 2, 19)
        pieces = zip(x.split(cuts, 1), starts.split(cuts, 1), (x if mask is None else mask).split(cuts, 1), strict=True)
        for piece, begins, present in pieces:
            y, state = module.extend(piece, state, key_mask=None if mask is None else present, starts=begins)
            ys.append(y)
        y = torch.cat(ys, 1)
        kept = torch.ones(2, N, dtype=torch.bool) if mask is None else mask
        assert_close(y[kept], expected[kept])
        assert_close(module(x, key_mask=mask, starts=starts)[kept], expected[kept])


def test_the_convolution_by_itself():
    module, (x, starts) = ShortConvolution(DIM, 5).double(), packed()
    assert_close(module(x, starts=starts), apart(module, x))
    none = torch.zeros_like(starts)
    assert_close(module(x, starts=none), module(x))


def test_ages():
    starts, mask = torch.zeros(1, 6, dtype=torch.bool), torch.tensor([[True, False, True, True, False, True]])
    starts[0, [1, 3]] = True
    age, after = ages(starts, mask)
    assert age[0, 0] >= UNKNOWN and age[0, 1:].tolist() == [0, 0, 0, 1, 1] and after.tolist() == [2]
    age, after = ages(starts[:, :0])
    assert age.shape == (1, 0) and after[0] >= UNKNOWN


@pytest.mark.parametrize("name", ["elu", "delta", "softmax", "local+kda"])
def test_what_does_not_fade_cannot_be_packed(name):
    x, starts = packed()
    with pytest.raises(ValueError, match="packed sequences need an attention that fades by a gate in every head"):
        layer(name)(x, starts=starts)


@pytest.mark.parametrize("name", ["gla", "gla+gated_delta"])
def test_positions_that_do_not_begin_again_are_refused(name):
    """Decays of channels turn with the positions, so that outputs depend on where a sequence begins."""
    inner = RotaryAttention(named_attention(name, num_heads=HEADS, head_dim=DIM // HEADS, causal=True))
    module, (x, starts) = MultiheadAttention(DIM, HEADS, inner).double(), packed()
    with pytest.raises(ValueError, match="do not begin again in packed sequences: rotate by the option rotary"):
        module(x, starts=starts)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("make", [lambda: layer("ssd"), lambda: ShortConvolution(DIM, 3).double()])
def test_wrong_starts(make):
    module, (x, starts) = make(), packed()
    with pytest.raises(ValueError, match=r"starts must be \(2, 40\), as x, but is \(2, 39\)"):
        module(x, starts=starts[:, 1:])
    with pytest.raises(ValueError, match=r"starts must be boolean, .* but is torch.int64"):
        module(x, starts=starts.long())


def test_cross_attention_has_no_starts():
    inner = named_attention("elu", num_heads=HEADS, head_dim=DIM // HEADS)
    module, (x, starts) = MultiheadAttention(DIM, HEADS, inner).double(), packed()
    with pytest.raises(ValueError, match="starts are of self attention"):
        module(x, x, starts=starts)
