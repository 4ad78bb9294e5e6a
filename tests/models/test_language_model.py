"""The laws, for whole models with every attention: what each layer keeps, their composition keeps."""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

from linattn.attention import ATTENTIONS, traits
from linattn.models import LanguageModel, LanguageModelConfig
from linattn.ops.nested import map_state
from tests.models.causal import VOCABULARY, every_kind, every_model, small_model, some_tokens

exactly = {"rtol": 1e-9, "atol": 1e-9}


@every_model
@torch.no_grad()
def test_pieces_make_the_whole(options):
    model, tokens = small_model(options), some_tokens(2, 65)
    whole = model(tokens)
    # one after the other in a window that fills up, and in one that is full
    for cuts in ((0, *(1,) * 9, 0, 56), (33, 30, 1, 1)):
        state, pieces = None, []
        for piece in tokens.split(cuts, dim=1):
            logits, state = model.extend(piece, state)
            pieces.append(logits)
        assert_close(torch.cat(pieces, 1), whole, **exactly)


@every_model
def test_the_past_does_not_see_the_future(options):
    model, tokens = small_model(options), some_tokens(2, 70)
    changed = tokens.clone()
    changed[:, 41:] = (changed[:, 41:] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    assert_close(after[:, :41], before[:, :41], **exactly)
    assert not torch.isclose(after[:, 41:], before[:, 41:]).all(-1).any()


@every_kind
def test_prefix_logits_equal_full_logits(options):
    model, tokens = small_model(options), some_tokens(2, 65)
    full = model(tokens)
    for n in (1, 8, 63):
        assert_close(model(tokens[:, :n]), full[:, :n], **exactly)


@every_kind
def test_the_last_token_sees_the_recent_ones(options):
    model, tokens = small_model(options), some_tokens(1, 9)
    for position in (7, 8):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % VOCABULARY
        assert not torch.allclose(model(changed)[:, -1], model(tokens)[:, -1])


def masks(b: int, n: int) -> dict[str, torch.Tensor]:
    places = torch.arange(n).expand(b, n)
    counts = torch.tensor([n - 3, 1, n // 2, n]).unsqueeze(1)
    return {"right": places < counts, "left": places >= n - counts, "holes": torch.rand(b, n) < 0.6}


@every_model
@torch.no_grad()
def test_a_masked_token_is_a_missing_token(options):
    """Two rows with tokens missing on the right, two on the left, two with holes."""
    model, mask = small_model(options), torch.cat([mask[:2] for mask in masks(4, 37).values()])
    # what stands in a masked place does not matter, not even a number that is no token
    tokens = some_tokens(6, 37).masked_fill(~mask, -100)
    whole = model(tokens, key_mask=mask)
    first, state = model.extend(tokens[:, :15], key_mask=mask[:, :15])
    second, _ = model.extend(tokens[:, 15:], state, key_mask=mask[:, 15:])
    pieces = torch.cat([first, second], 1)
    for row in range(6):
        alone = model(tokens[row, mask[row]].unsqueeze(0))[0]
        assert_close(whole[row, mask[row]], alone, **exactly)
        assert_close(pieces[row, mask[row]], alone, **exactly)


@every_kind
@torch.no_grad()
def test_a_block_alone_keeps_to_the_mask(options):
    """For those who go from block to block themselves, say to checkpoint each."""
    block, mask = small_model(options).blocks[0], masks(4, 21)["holes"]
    x = torch.randn(4, 21, 16, dtype=torch.float64)
    y = block(x, key_mask=mask)
    for row in range(4):
        assert_close(y[row, mask[row]], block(x[row, mask[row]].unsqueeze(0))[0], **exactly)


@pytest.mark.parametrize("attention", ["elu", "efficient", "local+softmax"])
@pytest.mark.parametrize("where", ["right", "left", "holes"])
def test_a_token_that_is_missing_for_an_encoder_is_no_token(attention, where):
    model, tokens, mask = small_model({"attention": attention}, causal=False), some_tokens(4, 21), masks(4, 21)[where]
    y = model(tokens, key_mask=mask)
    for row in range(4):
        assert_close(y[row, mask[row]], model(tokens[row, mask[row]].unsqueeze(0))[0], **exactly)


@every_kind
def test_rows_that_are_all_masked_are_finite_and_leave_no_trace(options):
    model, tokens = small_model(options), some_tokens(2, 9)
    mask = torch.tensor([[True], [False]]).expand(2, 9)
    assert model(tokens, key_mask=mask).isfinite().all()
    logits, state = model.extend(tokens, key_mask=mask)
    assert logits.isfinite().all()
    after, _ = model.extend(tokens, state)
    assert_close(after[1:], model(tokens[1:]), **exactly)


@every_kind
def test_batch_elements_do_not_mix(options):
    model, tokens = small_model(options), some_tokens(3, 33)
    together = model(tokens)
    for row in range(3):
        assert_close(together[row], model(tokens[row : row + 1])[0], **exactly)


@every_kind
def test_states_can_be_reordered_and_kept(options):
    """Beam search picks rows; and extending twice from one state gives the same, so no state is written into."""
    model, tokens, more = small_model(options), some_tokens(3, 20), some_tokens(3, 9)
    _, state = model.extend(tokens)
    order = torch.tensor([2, 0, 0])
    picked = map_state(lambda tensor: tensor[order], state)
    first, _ = model.extend(more, picked)
    assert_close(model.extend(more, picked)[0], first, rtol=0, atol=0)
    assert_close(first, model(torch.cat([tokens[order], more], 1))[:, 20:], **exactly)


@every_kind
def test_the_state_stays_as_large_as_it_is(options):
    if "softmax" in options["attention"]:
        pytest.skip("softmax keeps all keys and values")
    model = small_model(options)

    def size(n):
        numbers = []
        map_state(lambda tensor: numbers.append(tensor.untyped_storage().nbytes()), model.extend(some_tokens(1, n))[1])
        return sum(numbers)

    assert size(40) == size(79)


@every_model
def test_gradients_reach_every_parameter(options):
    model, tokens = small_model(options).train(), some_tokens(2, 20)
    model(tokens).logsumexp(-1).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.count_nonzero() > 0, name


@every_kind
def test_gradients_of_pieces_are_those_of_the_whole(options):
    model, tokens = small_model(options), some_tokens(2, 20)
    weights = torch.randn(2, 20, VOCABULARY, dtype=torch.float64)
    whole = torch.autograd.grad((model(tokens) * weights).sum(), list(model.parameters()))
    first, state = model.extend(tokens[:, :9])
    second, _ = model.extend(tokens[:, 9:], state)
    pieces = torch.autograd.grad((torch.cat([first, second], 1) * weights).sum(), list(model.parameters()))
    for (name, _), expected, found in zip(model.named_parameters(), whole, pieces, strict=True):
        assert_close(found, expected, rtol=1e-7, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


@every_model
def test_evaluation_draws_nothing_and_changes_nothing(options):
    model, tokens = small_model(options, dropout=0.5), some_tokens(2, 30)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert_close(model(tokens), model(tokens), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("feed_forward", ["gated", "gelu", "squared_relu", "none"])
@torch.no_grad()
def test_models_can_be_pickled(feed_forward):
    model, tokens = small_model({"attention": "local+rwkv7", "feed_forward": feed_forward}), some_tokens(2, 9)
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens), model(tokens))


@pytest.mark.parametrize("place", ["embedding", "mixer", "feed_forward"])
def test_dropout_acts_in_training(place):
    model, tokens = small_model({"attention": "elu"}, dropout=0.5), some_tokens(2, 30)
    modules = {
        "embedding": model.dropout,
        "mixer": model.blocks[0].mixer.dropout,
        "feed_forward": model.blocks[0].feed_forward.dropout,
    }
    modules[place].train()
    assert not torch.allclose(model(tokens), model(tokens))


def test_which_attentions_are_not_causal():
    for name in ATTENTIONS:
        if not traits(name).causal:
            with pytest.raises(ValueError, match="causal"):
                small_model({"attention": name})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", 3),
        ("rotary", 10.0),
        ("rotary", None),
        ("convolution", 2),
        ("head_norm", True),
        ("gate", True),
        ("feed_forward", "gelu"),
        ("mlp_ratio", 2.0),
        ("norm", "layer"),
        ("head_dim", 2),
        ("key_dim", 2),
        ("num_key_heads", 2),
        ("tie_embeddings", False),
    ],
)
def test_every_option_has_an_effect(field, value):
    tokens = some_tokens(1, 20)
    torch.manual_seed(0)
    plain = small_model({"attention": "local+elu"})(tokens)
    torch.manual_seed(0)
    assert not torch.allclose(small_model({"attention": "local+elu", field: value})(tokens), plain)


def test_nanogpts_setting_has_its_number_of_parameters():
    """4 layers, 4 heads, 128 channels, 64 positions, 65 characters, tied weights."""
    config = LanguageModelConfig(
        vocab_size=65,
        dim=128,
        attention="softmax",
        positions="learned",
        max_length=64,
        rotary=None,
        feed_forward="gelu",
        norm="layer",
    )
    assert sum(parameter.numel() for parameter in LanguageModel(config).parameters()) == 807_808


def test_initial_weights_are_gpt2s():
    model = LanguageModel(LanguageModelConfig(vocab_size=500, depth=8, attention="hedgehog", gate=True))
    block = model.blocks[3]
    for weight in (model.embedding.weight, block.mixer.q_proj.weight, block.mixer.g_proj.weight):
        assert 0.019 < weight.std() < 0.021 and weight.mean().abs() < 0.001
    for weight in (block.mixer.o_proj.weight, block.feed_forward.down_proj.weight):
        assert 0.0047 < weight.std() < 0.0053


@pytest.mark.parametrize("tokens", [torch.tensor([[1, 13]]), torch.tensor([[-1, 2]])])
def test_what_is_no_token_is_refused(tokens):
    model = small_model({"attention": "elu"})
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 13\), but go from"):
        model(tokens)
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 13\), but go from"):
        model.extend(tokens)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
def test_tokens_of_other_dtypes_are_refused(dtype):
    model, tokens = small_model({"attention": "elu"}), some_tokens(1, 5)
    assert torch.equal(model(tokens.int()), model(tokens))
    with pytest.raises(ValueError, match=rf"tokens must be int64 or int32 \(b, n\), but are {dtype} \(1, 5\)"):
        model(tokens.to(dtype))


def test_learned_positions_end():
    model = small_model({"attention": "elu", "positions": "learned", "max_length": 8})
    model(some_tokens(2, 8))
    with pytest.raises(ValueError, match="positions end at 8, but there are 9 tokens"):
        model(some_tokens(2, 9))
    _, state = model.extend(some_tokens(2, 8))
    with pytest.raises(ValueError, match=r"positions must be in \[0, 8\), but go from 8 to 8"):
        model.extend(some_tokens(2, 1), state)


@every_model
def test_no_tokens_give_no_logits_and_no_gradients(options):
    model = small_model(options)
    for shape in ((2, 0), (0, 5)):
        logits = model(some_tokens(*shape))
        assert logits.shape == (*shape, VOCABULARY)
        # as training in processes needs, every weight has one
        gradients = torch.autograd.grad(logits.sum(), list(model.parameters()))
        assert not any(gradient.any() for gradient in gradients)
