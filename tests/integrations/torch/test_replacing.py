"""What `replace_attention` says where it finds nothing that it can replace."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

from linattn import SoftmaxAttention, TorchMultiheadAttention, named_attention, replace_attention, with_inner


class BertSelfAttention(nn.Module):
    pass


class Derived(nn.MultiheadAttention):
    pass


def test_a_class_derived_from_torchs_is_not_called_absent() -> None:
    model = nn.Sequential(Derived(16, 4), Derived(16, 4), BertSelfAttention())
    with pytest.raises(
        ValueError, match=r"derived from nn.MultiheadAttention.* 2 × .*Derived, 1 × .*with_inner"
    ) as error:
        replace_attention(model, "elu")
    assert "there is no" not in str(error.value)


@pytest.mark.parametrize("attention", [nn.MultiheadAttention(16, 4), TorchMultiheadAttention(16, 4, inner="elu")])
def test_a_choice_of_none_is_told_from_there_being_none(attention: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"`where` chose no nn.MultiheadAttention of this Sequential"):
        replace_attention(nn.Sequential(attention), "elu", where=lambda name, module: False)


def test_without_any_attention() -> None:
    with pytest.raises(ValueError, match=r"in this Linear, nor a module with Attention in its name"):
        replace_attention(nn.Linear(2, 2), "elu")


@pytest.mark.usefixtures("unchecked")
def test_a_model_or_an_attention_of_another_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model must be an nn.Module, but is a dict"):
        replace_attention({"unet": nn.MultiheadAttention(16, 4)}, "elu")
    with pytest.raises(ValueError, match=r"attention must be an nn.MultiheadAttention, but is a BertSelfAttention"):
        with_inner(BertSelfAttention(), "elu")


@pytest.mark.parametrize("options", [{"window": 5}, {"max_length": 9}])
def test_options_of_names_need_a_name(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="window and max_length are for attention by name"):
        replace_attention(nn.Sequential(nn.MultiheadAttention(16, 4)), lambda module: SoftmaxAttention(), **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda attention: attention.register_forward_hook(lambda *_: None),
        lambda attention: attention.register_full_backward_hook(lambda *_: None),
        lambda attention: prune.l1_unstructured(attention, "in_proj_weight", 0.5),
        lambda attention: setattr(attention, "forward", attention.forward),
    ],
    ids=["a hook", "a hook of gradients", "pruning", "a forward"],
)
def test_what_a_new_module_would_leave_out_is_refused(change: Callable[[nn.Module], object]) -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 4), nn.MultiheadAttention(16, 4))
    change(model[1])
    before = [*model]
    with pytest.raises(ValueError, match=r"has hooks, or a forward that something else has set"):
        replace_attention(model, "elu")
    assert all(module is own for module, own in zip(model, before, strict=True))


def test_weights_that_are_computed_from_others_are_refused() -> None:
    attention = parametrizations.weight_norm(nn.MultiheadAttention(16, 4), "in_proj_weight")
    with pytest.raises(ValueError, match="computes in_proj_weight from other parameters"):
        with_inner(attention, "elu")


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("attention", ["favor", "local:2+favor_relu:2", "hedgehog", "elu"])
def test_what_is_replaced_on_the_meta_device_is_complete_with_the_weights(attention: str, assign: bool) -> None:
    """torch's weights say nothing of random features, and no key would be missing. Uninitialised memory is NaN here."""
    usual = encoder()
    weights = {name: tensor.clone() for name, tensor in usual.state_dict().items()}
    with torch.device("meta"):
        model = encoder()
    replace_attention(model, attention)
    torch.manual_seed(1)
    replace_attention(usual, attention)
    torch.manual_seed(1)
    model = model if assign else model.to_empty(device="cpu")
    model.load_state_dict(weights, assign=assign)
    x = torch.randn(2, 5, 16)
    assert_close(model(x), usual(x), rtol=0, atol=0)


def test_an_attention_that_layers_share_is_complete_after_the_meta_device() -> None:
    inner = named_attention("favor", num_heads=4, head_dim=4)
    with torch.device("meta"):
        model = encoder()
    replace_attention(model, lambda module: inner)
    model.to_empty(device="cpu").load_state_dict(encoder().state_dict())
    assert model(torch.randn(2, 5, 16)).isfinite().all()


def test_weights_that_are_one_stay_one() -> None:
    attention = nn.MultiheadAttention(16, 4, kdim=16, vdim=8)
    attention.k_proj_weight = attention.q_proj_weight
    new, x = with_inner(attention, "softmax"), torch.randn(5, 2, 16)
    assert new.k_proj_weight is new.q_proj_weight is attention.q_proj_weight
    assert_close(new(x, x, x[..., :8]), attention(x, x, x[..., :8]))
