"""The closed-form projections: logits of few channels that are nearest to all, and exact where channels suffice."""

import copy
from typing import Any

import torch
from torch.testing import assert_close

from linattn.linearize import convert, layer_errors, linearized_layers, plan
from linattn.linearize.calls import AttentionCall
from linattn.linearize.closed_form import closest_projections
from tests.integrations.transformers.stock_attention.families import DECODERS, ENCODERS, make
from tests.integrations.transformers.stock_attention.test_attention import logits, padded, tokens


def second_moments(x: torch.Tensor) -> torch.Tensor:
    return x.mT @ x / x.shape[-2]


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and centred keys whose channels are correlated and of very different sizes."""
    sizes = torch.logspace(0, -2, 6, dtype=torch.float64)
    q, k = (torch.randn(2, 500, 6).double() * sizes @ torch.randn(2, 6, 6).double() for _ in "qk")
    return q, k - k.mean(1, keepdim=True)


def test_all_channels_give_all_logits():
    q, k = sample()
    p_q, p_k = closest_projections(second_moments(q), second_moments(k), 6)
    assert_close((q @ p_q) @ (k @ p_k).mT, q @ k.mT)


def test_few_channels_give_the_nearest_logits():
    q, k = sample()
    logits = q @ k.mT
    p_q, p_k = closest_projections(second_moments(q), second_moments(k), 2)
    u, sizes, v = torch.linalg.svd(logits, full_matrices=False)
    best = (u[..., :2] * sizes[..., None, :2]) @ v[..., :2, :]
    assert_close((q @ p_q) @ (k @ p_k).mT, best)


def test_channels_that_no_token_uses_are_left_out():
    q, k = sample()
    q[..., 0], k[..., 1] = 0, 0
    p_q, p_k = closest_projections(second_moments(q), second_moments(k), 6)
    assert_close((q @ p_q) @ (k @ p_k).mT, q @ k.mT)


def test_enough_channels_leave_softmax_as_it_was():
    # only 4 channels of the 8 of each head carry anything, so that 4 are enough; keys have a mean
    model = make(DECODERS["gpt2"])
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.bias.add_(torch.randn_like(block.attn.c_attn.bias))
            for head in block.attn.c_attn.weight[:, :32].unflatten(1, (4, 8)).unbind(1):
                head[:, 4:] = 0
            for b in block.attn.c_attn.bias[:32].unflatten(0, (4, 8)):
                b[4:] = 0
    inputs = padded((7, 10, 11), "left")
    expected, present = logits(model, **inputs), inputs["attention_mask"].bool()
    batches = [{name: inputs[name] for name in ("input_ids", "attention_mask")}, {"input_ids": tokens()}]
    convert(model, plan(model, method="softmax", key_dim=4, convolution=0), batches)
    assert_close(logits(model, **inputs)[present], expected[present])
    assert all(layer.linear_attention.key_map is not None for layer in linearized_layers(model).values())


def start(model: Any, *batches: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """Return the new weights of a conversion of a copy of the model."""
    model = copy.deepcopy(model)
    convert(model, plan(model, **{"method": "elu", "key_dim": 4, "window": 2, **options}), batches)
    return {name: x for name, x in model.state_dict().items() if "_map" in name or "share.bias" in name}


def test_a_constant_added_to_all_keys_changes_no_projection():
    model, batch = make(DECODERS["gpt2"]), {"input_ids": tokens()}
    before = start(model, batch)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.bias[32:64] += torch.randn(32)
    after = start(model, batch)
    for name in before:
        # the projected keys are centred, which their bias sees to
        assert torch.allclose(after[name], before[name]) == ("key_map.bias" not in name), name


def test_batches_add_up():
    model, ids = make(DECODERS["llama"]), tokens(4)
    one, two = (start(model, *({"input_ids": part} for part in ids.chunk(count))) for count in (1, 2))
    assert_close(one, two)


def test_the_share_knows_the_factor_of_the_logits():
    model, batch = make(DECODERS["llama"]), {"input_ids": tokens()}
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        for layer in scaled.model.layers:
            layer.self_attn.scaling /= 4
            layer.self_attn.q_proj.weight *= 4
    one, two = (start(each, batch, key_dim=None) for each in (model, scaled))
    assert len(one) == 2
    assert_close(one, two)


def test_no_other_share_is_nearer_to_softmax():
    # a BERT's layer puts out its heads beside each other, so that their errors add up
    model, inputs = make(ENCODERS["bert"]), padded((7, 10, 11), "right")
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight.mul_(20)
    batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    conversion = convert(model, plan(model, method="elu", window=2), [batch])
    errors = layer_errors(model, conversion.teacher, [batch])
    for layer in linearized_layers(model).values():
        own = layer.linear_attention
        assert own.share.bias.sigmoid().min() > 0.05 and own.share.bias.sigmoid().max() < 0.95
        for head in range(4):
            for step in (-0.1, 0.1):
                with torch.no_grad():
                    own.share.bias[head] += step
                changed = layer_errors(model, conversion.teacher, [batch])[own.spec.index]
                with torch.no_grad():
                    own.share.bias[head] -= step
                assert changed > errors[own.spec.index]


def test_packing_does_not_change_the_share():
    model, ids, shares = make(DECODERS["llama"]), tokens(2, 6), []
    packed = {"input_ids": ids.view(1, 12), "position_ids": torch.arange(6).repeat(2)[None]}
    for batch in (packed, {"input_ids": ids}):
        conversion = convert(model, plan(model, method="elu", window=2), [batch])
        shares.append([layer.linear_attention.share.bias for layer in linearized_layers(model).values()])
        conversion.undo()
    assert_close(*shares)


def test_a_window_that_is_softmax_keeps_nearly_all():
    model = make(DECODERS["llama"])
    convert(model, plan(model, method="elu", window=11), [{"input_ids": tokens()}])
    for layer in linearized_layers(model).values():
        # the window is softmax itself, so that nothing linear is wanted
        assert_close(layer.linear_attention.share.bias.sigmoid(), torch.full((4,), 0.02).double())


def test_the_mask_of_cross_attention_is_that_of_its_keys():
    """Where there are as many queries, too."""
    q, k, mask = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 5, 3), torch.tensor([[True] * 2 + [False] * 3] * 2)
    calls = [AttentionCall("", torch.nn.Identity(), q, k, k, mask, 1.0, False, None, dim, None) for dim in (None, 6)]
    assert [call.present_tokens(q).shape[1] for call in calls] == [10, 4]
    assert [call.present_tokens(k).shape[1] for call in calls] == [4, 4]
