"""The laws of models by composition, encoders and decoders."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from linattn import generate, map_state
from linattn.models import SequenceModel
from linattn.nn import Branch, ReversibleSequence
from tests.models.causal import small_model
from tests.models.stacks import DIM, LONGEST, VOCABULARY, branches, model, some_tokens

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reversible": {"reversible": True},
    "learned positions": {"positions": "learned"},
    "axial positions": {"positions": "axial", "reversible": True},
    "sinusoidal positions": {"positions": "sinusoidal"},
    "factorised": {"width": 6},
    "factorised and tied": {"width": 6, "head": "tied", "reversible": True},
    "embeddings": {"head": None},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
either_order = pytest.mark.parametrize("causal", [True, False])


@every_kind
@either_order
@pytest.mark.parametrize("training", [True, False])
def test_a_masked_token_is_a_missing_token(options, causal, training):
    """Two rows with tokens missing on the right, two on the left, two with holes."""
    lm, tokens, places = model(causal=causal, **options).train(training), some_tokens(6, 40), torch.arange(40)
    mask = torch.cat(
        [places < torch.tensor([[30], [1]]), places >= torch.tensor([[39], [23]]), torch.rand(2, 40) < 0.6]
    )
    y = lm(torch.where(mask, tokens, -7), key_mask=mask)
    for row in range(6):
        assert_close(y[row, mask[row]], lm(tokens[row, mask[row]].unsqueeze(0))[0])


@every_kind
def test_pieces_make_the_whole(options):
    lm, tokens = model(**options), some_tokens(2, 40)
    state, pieces = None, []
    for piece in tokens.split((15, 0, 1, 1, 23), 1):
        y, state = lm.extend(piece, state)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), lm(tokens))


@every_kind
def test_masked_pieces_make_the_whole(options):
    lm, tokens, mask = model(**options), some_tokens(3, 30), torch.rand(3, 30) < 0.6
    first, state = lm.extend(tokens[:, :11], key_mask=mask[:, :11])
    second, _ = lm.extend(tokens[:, 11:], state, key_mask=mask[:, 11:])
    assert_close(torch.cat([first, second], 1)[mask], lm(tokens, key_mask=mask)[mask])


@every_kind
def test_the_past_does_not_see_the_future(options):
    lm, tokens = model(**options), some_tokens(2, 40)
    other = torch.cat([tokens[:, :25], (tokens[:, 25:] + 1) % VOCABULARY], 1)
    assert_close(lm(other)[:, :25], lm(tokens)[:, :25], rtol=1e-12, atol=1e-12)


@every_kind
@either_order
def test_batch_elements_do_not_mix(options, causal):
    lm, tokens = model(causal=causal, **options), some_tokens(3, 21)
    together = lm(tokens)
    for row in range(3):
        assert_close(lm(tokens[row : row + 1])[0], together[row])


@either_order
def test_every_token_is_seen(causal):
    """By the last one, and without an order by the first one too."""
    lm = model(causal=causal, attention="elu")
    rows = torch.eye(VOCABULARY, dtype=torch.float64)[some_tokens(1, 30)]
    embedded = (rows @ lm.embedding.weight).detach().requires_grad_()
    y = lm.stack(embedded)
    for place in (-1,) if causal else (-1, 0):
        (gradient,) = torch.autograd.grad(y[0, place].sum(), embedded, retain_graph=True)
        assert (gradient.abs().amax(-1) > 0).all()


@every_kind
def test_gradients_reach_every_parameter(options):
    lm = model(**options).train()
    lm(some_tokens(2, 20)).square().sum().backward()
    for name, parameter in lm.named_parameters():
        assert parameter.grad.count_nonzero() > 0, name


def test_positions_matter():
    tokens = torch.zeros(1, 6, dtype=torch.long)
    for positions in ("learned", "axial", "sinusoidal"):
        y = model(positions=positions, attention="elu", causal=False)(tokens)
        assert not torch.allclose(y[0, 2], y[0, 3])


def test_the_tied_head_is_the_embedding():
    lm = model(head="tied")
    assert not any("head" in name for name in lm.state_dict())
    x = torch.randn(2, DIM, dtype=torch.float64)
    for twin in (lm, copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert_close(twin.logits(x), x @ twin.embedding.weight.mT)
        with torch.no_grad():
            twin.embedding.weight.zero_()
        assert not twin.logits(x).any()


@pytest.mark.parametrize("positions", ["learned", "axial"])
def test_positions_end(positions):
    lm = model(positions=positions)
    assert lm.max_length == LONGEST
    lm(some_tokens(1, LONGEST))
    with pytest.raises(ValueError, match="positions end at 80, but there are 81 tokens"):
        lm(some_tokens(1, LONGEST + 1))
    _, state = lm.extend(some_tokens(1, LONGEST))
    with pytest.raises(ValueError, match=r"positions must be in \[0, 80\)"):
        lm.extend(some_tokens(1, 1), state)
    with pytest.raises(ValueError, match="positions end at 80, but prompt and new tokens need 81"):
        generate(lm, some_tokens(1, 80), max_new_tokens=2)


def test_padding_does_not_count_towards_the_longest_length():
    lm, tokens = model(positions="learned"), some_tokens(1, LONGEST + 9)
    mask = torch.arange(LONGEST + 9)[None] >= 9
    assert_close(lm(tokens, key_mask=mask)[:, 9:], lm(tokens[:, 9:]))


@pytest.mark.parametrize("options", [options for options in KINDS.values() if options.get("head", "own")], ids=str)
def test_generates_for_prompts_of_any_lengths(options):
    lm, prompts = model(**options), [some_tokens(1, n)[0].tolist() for n in (1, 9, 30)]
    for prompt, row in zip(prompts, generate(lm, prompts, max_new_tokens=12), strict=True):
        # each new token is the likeliest after all before it, which one forward of the whole sequence tells
        assert len(row) == 12
        assert lm(torch.tensor([prompt + row]))[0, len(prompt) - 1 : -1].argmax(-1).tolist() == row


def test_goes_on_from_a_state():
    lm, tokens = model(), some_tokens(2, 20)
    _, state = lm.extend(tokens[:, :12])
    assert generate(lm, tokens[:, 12:], max_new_tokens=5, state=state) == generate(lm, tokens, max_new_tokens=5)


def test_states_can_be_chosen_from():
    """As beam search does."""
    lm, tokens = model(positions="learned", attention="efficient"), some_tokens(3, 10)
    _, state = lm.extend(tokens)
    index = torch.tensor([2, 0, 2, 1])
    chosen = map_state(lambda tensor: tensor[index], state)
    new = some_tokens(4, 2)
    assert_close(lm.extend(new, chosen)[0], lm(torch.cat([tokens[index], new], 1))[:, -2:])


def test_what_is_not_causal_cannot_be_extended():
    with pytest.raises(NotImplementedError):
        model(causal=False).extend(some_tokens(1, 3))


def test_without_a_head_there_are_no_logits():
    with pytest.raises(ValueError, match="no head"):
        generate(model(head=None), some_tokens(1, 3), max_new_tokens=1)


@pytest.mark.parametrize("lm", [model(), small_model()], ids=lambda lm: type(lm).__name__)
def test_a_context_that_nothing_attends_to_is_refused(lm):
    tokens, context = some_tokens(2, 3), torch.randn(2, 4, DIM, dtype=torch.float64)
    for call in (lm.hidden, lm.extend_hidden):
        with pytest.raises(ValueError, match="nothing attends to it"):
            call(tokens, context=context)
        with pytest.raises(ValueError, match="none was given"):
            call(tokens, context_mask=torch.ones(2, 4, dtype=torch.bool))


def test_no_layer_of_a_causal_model_looks_ahead():
    """It would see the padding in the other layers' outputs, and the future."""
    causal, other = (branches("elu", causal, False, 1, ())[0] for causal in (True, False))
    shifted = Branch(causal[0].module, shift=other[0].shift), causal[1]
    other[0].shift = None
    for pair in (other, shifted):
        with pytest.raises(ValueError, match="no layer may look ahead"):
            SequenceModel(torch.nn.Embedding(3, DIM), ReversibleSequence([causal, pair]), tied=True)


def test_a_tied_model_has_no_other_head():
    with pytest.raises(ValueError, match="another head was given"):
        SequenceModel(torch.nn.Embedding(3, 2), torch.nn.Identity(), head=torch.nn.Linear(2, 3), tied=True)
