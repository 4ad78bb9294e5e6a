"""A sequence in segments has the loss and all gradients of the whole."""

import gc

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.models.loss import NO_LABEL, next_token_loss
from linattn.ops.nested import map_state
from linattn.states import segmented_loss
from tests.models.causal import KINDS, MODELS, VOCABULARY, every_kind, small_model, some_tokens

ELU = {"attention": "local+elu"}


def gradients(model, loss, *others):
    return torch.autograd.grad(loss, [*model.parameters(), *others], allow_unused=True)


def past(model):
    """A state that is itself a result, and one of its tensors that has a gradient."""
    state = map_state(torch.Tensor.detach, model.extend(some_tokens(2, 5))[1])
    leaves = []

    def leaf(x):
        leaves.append(x.clone().requires_grad_(x.is_floating_point()))
        return leaves[-1]

    return map_state(leaf, state), [x for x in leaves if x.requires_grad]


def whole(model, tokens, state, key_mask=None, labels=None):
    """The same loss, at once, from `extend`."""
    logits, state = model.extend(tokens, state, key_mask=key_mask)
    if labels is None:
        return next_token_loss(logits, tokens, key_mask=key_mask), state
    return next_token_loss(logits, labels), state


EVERY = [(name, 5) for name in KINDS] + [(name, segment) for name in ("elu", "favor", "kda") for segment in (1, 64)]


@pytest.mark.parametrize(("name", "segment"), EVERY)
def test_segments_are_the_whole(name, segment):
    """Loss, last state, and the gradients of all parameters and of the state before, also through the last state."""
    model, tokens = small_model(MODELS[name]), some_tokens(2, 12 if segment > 1 else 5)
    state, leaves = past(model)

    def total(loss, after):
        parts = []
        map_state(
            lambda x: parts.append(x.square().mean()) if x.is_floating_point() and x.isfinite().all() else None, after
        )
        return loss + 0.1 * sum(parts)

    results = [whole(model, tokens, state), segmented_loss(model, tokens, state, segment=segment)]
    assert_close(results[1][0], results[0][0])
    for x, y in zip(*(gradients(model, total(*result), *leaves) for result in results), strict=True):
        assert_close(torch.zeros(()) if y is None else y, torch.zeros(()) if x is None else x, rtol=1e-8, atol=1e-10)


@every_kind
def test_without_a_past_and_with_masks(options):
    """Missing tokens anywhere, also whole segments of them."""
    model, tokens, key_mask = small_model(options), some_tokens(2, 17), torch.rand(2, 17) < 0.6
    key_mask[0, 5:12] = False
    results = [whole(model, tokens, None, key_mask), segmented_loss(model, tokens, segment=4, key_mask=key_mask)]
    assert_close(results[1][0], results[0][0])
    for x, y in zip(*(gradients(model, loss) for loss, _ in results), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert_close(y, x, rtol=1e-8, atol=1e-10)
    more = some_tokens(2, 3)
    assert_close(model.extend(more, results[1][1])[0], model.extend(more, results[0][1])[0])


def test_labels_of_their_own():
    model, tokens, labels = small_model(ELU), some_tokens(2, 17), some_tokens(2, 17)
    labels[:, :9] = NO_LABEL
    loss, _ = segmented_loss(model, tokens, segment=5, labels=labels)
    assert_close(loss, whole(model, tokens, None, labels=labels)[0])


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_tokens_for_a_target_have_no_loss(n):
    model, tokens = small_model(ELU), some_tokens(2, n)
    for labels, key_mask in ((None, None), (tokens, None), (None, torch.ones(2, n, dtype=torch.bool))):
        loss, state = segmented_loss(model, tokens, segment=4, labels=labels, key_mask=key_mask)
        expected, after = whole(model, tokens, None, key_mask, labels)
        assert loss == expected == 0
        assert not any(x is not None and x.any() for x in gradients(model, loss))
        assert_close(model.extend(tokens.new_ones(2, 1), state)[0], model.extend(tokens.new_ones(2, 1), after)[0])


def test_no_label_is_no_loss():
    loss, _ = segmented_loss(small_model(ELU), some_tokens(1, 1), segment=5)
    assert loss == 0


def test_dropout_is_the_same_when_a_segment_is_read_again():
    """Against the same segments in one graph, with the same numbers drawn; what is drawn next is the same, too."""
    model, tokens = small_model(ELU, dropout=0.5).train(), some_tokens(2, 12)

    def graph():
        state, logits = None, []
        for piece in tokens.split(4, 1):
            y, state = model.extend(piece, state)
            logits.append(y)
        return next_token_loss(torch.cat(logits, 1), tokens)

    found = []
    for compute in (graph, lambda: segmented_loss(model, tokens, segment=4)[0]):
        torch.manual_seed(3)
        loss = compute()
        found.append((loss, *gradients(model, loss), torch.rand(1)))
    for x, y in zip(*found, strict=True):
        assert_close(x, y)


def test_autocast_is_the_same_when_a_segment_is_read_again():
    model, tokens = small_model(ELU).float(), some_tokens(2, 12)
    dtypes = []
    model.blocks[0].mixer.q_proj.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = segmented_loss(model, tokens, segment=4)
    before = len(dtypes)
    loss.backward()
    assert set(dtypes) == {torch.bfloat16} and len(dtypes) == before + 3 and loss.dtype == torch.float32


def test_memory_does_not_grow_with_the_length():
    """The graphs of two segments never live at the same time, and what stays between them is their states."""
    model, live, most = small_model(ELU), {"bytes": 0}, []

    class Packed:
        def __init__(self, x):
            self.x = x
            live["bytes"] += x.nbytes
            most.append(live["bytes"])

        def __del__(self):
            live["bytes"] -= self.x.nbytes

    # graphs that are cycles of objects are collected now and then; what was there before is left out of it
    gc.collect()
    gc.freeze()
    model.embedding.register_forward_pre_hook(lambda module, inputs: (gc.collect(), None)[1])

    def peak(n):
        gc.collect()
        most.clear()
        before = live["bytes"]
        with torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.x):
            loss, _ = segmented_loss(model, some_tokens(1, n), segment=16)
            loss.backward()
        return max(most) - before

    peaks = peak(64), peak(160)
    gc.unfreeze()
    assert peaks[0] == peaks[1]


class Sums(nn.Module):
    """Its first two weights have one gradient, and that of the third is one number, expanded."""

    def __init__(self, dim):
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(dim, dtype=torch.float64) for _ in range(3))

    def forward(self, x):
        first, second, third = self.weights
        return x * (first + second) + x * third.sum()


def test_gradients_may_share_memory():
    model, tokens = small_model(ELU), some_tokens(2, 17)
    model.norm = Sums(model.config.dim)
    expected = gradients(model, whole(model, tokens, None)[0])
    for x, y in zip(gradients(model, segmented_loss(model, tokens, segment=4)[0]), expected, strict=True):
        assert_close(x, y, rtol=1e-8, atol=1e-10)


def test_parameters_have_one_gradient_each():
    """As data parallel training needs, which waits for every parameter once."""
    model, calls = small_model(ELU), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    segmented_loss(model, some_tokens(1, 20), segment=3)[0].backward()
    assert sorted(calls) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment": 0}, "segment must be a whole number of at least 1"),
        ({"labels": torch.zeros(2, 3, dtype=torch.long)}, r"labels must be \(2, 9\)"),
        ({"labels": torch.zeros(2, 9)}, r"labels must be int64 or int32 \(b, n\), but are torch.float32"),
        ({"labels": [[1] * 9] * 2}, "labels must be a tensor, but is a list"),
        ({"labels": torch.full((2, 9), VOCABULARY)}, r"labels must be in \[0, 13\), but go from 13 to 13"),
        ({"labels": torch.full((2, 9), -1)}, r"labels must be in \[0, 13\), but go from -1 to -1"),
        ({"key_mask": torch.ones(2, 8, dtype=torch.bool)}, r"key_mask must be \(2, 9\), as tokens"),
        ({"key_mask": torch.ones(2, 9)}, "key_mask must be boolean"),
        ({"tokens": [[1] * 9] * 2}, "tokens must be a tensor, but is a list"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments(options, message):
    arguments = {"segment": 4, "tokens": torch.randint(VOCABULARY, (2, 9))} | options
    with pytest.raises(ValueError, match=message):
        segmented_loss(small_model(ELU), **arguments)


@pytest.mark.usefixtures("unchecked")
def test_tokens_may_be_int32():
    model, tokens = small_model(ELU), some_tokens(2, 9)
    expected, _ = segmented_loss(model, tokens, segment=4)
    for labels in (None, tokens.int()):
        assert_close(segmented_loss(model, tokens.int(), segment=4, labels=labels)[0], expected, rtol=0, atol=0)


def test_a_model_that_is_not_causal_has_no_segments():
    with pytest.raises(ValueError, match="training in segments needs a causal model, but this LanguageModel is not"):
        segmented_loss(small_model(ELU, causal=False), some_tokens(1, 9), segment=3)


def test_the_last_token_may_have_a_label_too():
    """Also behind masked tokens."""
    model, tokens, key_mask = small_model(ELU), some_tokens(2, 17), torch.rand(2, 16) < 0.7
    for mask in (None, key_mask):
        with_last = None if mask is None else torch.cat([mask, torch.ones(2, 1, dtype=torch.bool)], 1)
        expected, _ = whole(model, tokens, None, with_last)
        loss, _ = segmented_loss(model, tokens[:, :-1], segment=5, labels=tokens, key_mask=mask)
        assert_close(loss, expected)
    with pytest.raises(ValueError, match=r"labels must be \(2, 16\), as the tokens, or \(2, 17\), but are \(2, 18\)"):
        segmented_loss(model, tokens[:, :-1], segment=5, labels=some_tokens(2, 18))
