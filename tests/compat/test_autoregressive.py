"""Calls of both packages' wrappers that cannot be meant: each is refused before anything is computed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linattn.compat import linear_attention_transformer as lat
from linattn.compat import performer_pytorch as performer

SIZE = {"num_tokens": 11, "dim": 16, "depth": 1, "heads": 2, "max_seq_len": 32, "dim_head": 8, "causal": True}


def performer_wrapper() -> performer.AutoregressiveWrapper:
    return performer.AutoregressiveWrapper(performer.PerformerLM(**SIZE))


def lat_wrapper() -> lat.AutoregressiveWrapper:
    return lat.AutoregressiveWrapper(lat.LinearAttentionTransformerLM(**SIZE))


both = pytest.mark.parametrize("make", [performer_wrapper, lat_wrapper])


def some_tokens() -> Tensor:
    return torch.randint(1, 11, (2, 7))


@both
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "mask",
    [
        # numbers would choose tokens by their place
        torch.ones(2, 7, dtype=torch.long),
        torch.ones(2, 5, dtype=torch.bool),
        torch.ones(1, 7, dtype=torch.bool),
        torch.ones(7, dtype=torch.bool),
        [[True] * 7] * 2,
    ],
    ids=["numbers", "short", "one row", "no batch", "a list"],
)
def test_a_mask_that_does_not_fit_is_refused(make, mask):
    model = make()
    for call in (model.generate, model):
        arguments = (some_tokens(), 3) if call == model.generate else (some_tokens(),)
        with pytest.raises(ValueError, match="key_mask must be"):
            call(*arguments, **{model.mask_name: mask})


@both
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tokens", [torch.ones(1, 2, 7, dtype=torch.long), torch.ones(2, 7)], ids=["3d", "floats"])
def test_tokens_of_another_shape_or_kind_are_refused(make, tokens):
    model = make()
    for call in (lambda: model.generate(tokens, 3), lambda: model(tokens)):
        with pytest.raises(ValueError, match="must be int64 or int32"):
            call()


@both
@pytest.mark.usefixtures("unchecked")
def test_one_sequence_without_a_batch_is_no_batch(make):
    model, tokens = make(), some_tokens()[0]
    assert model.generate(tokens, 3).shape == (3,)
    for call in (lambda: model(tokens, return_loss=True), lambda: model.net(tokens)):
        with pytest.raises(ValueError, match="must be int64 or int32"):
            call()


@both
def test_a_mask_of_no_context_is_refused(make):
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="context_mask is of a context"):
        make().generate(some_tokens(), 3, context_mask=mask)


@both
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("temperature", None), ("filter_logits_fn", None), ("eos_token", [1]), ("seq_len", 3.0)],
)
def test_options_of_another_type_are_refused(make, name, value):
    options: dict[str, Any] = {"seq_len": 3, name: value}
    with pytest.raises(ValueError, match=f"{name} must be"):
        make().generate(some_tokens(), **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("wrapper", "net"),
    [
        (performer.AutoregressiveWrapper, performer.Performer(16, 1, 2, 8, causal=True)),
        (performer.AutoregressiveWrapper, nn.Linear(2, 2)),
        (lat.AutoregressiveWrapper, lat.Autopadder(lat_wrapper().net)),
        # the cross entropy of embeddings would be that of channels in the place of tokens
        (lat.AutoregressiveWrapper, lat.LinearAttentionTransformerLM(**SIZE, return_embeddings=True)),
    ],
    ids=["stack", "layer", "Autopadder", "embeddings"],
)
def test_only_a_model_with_logits_is_wrapped(wrapper, net):
    with pytest.raises(ValueError, match=f"returns logits, not this {type(net).__name__}"):
        wrapper(net)
