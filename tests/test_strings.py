"""Names of attentions and feature maps: taken where heads are known, refused elsewhere."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

import linattn

q, k, v = torch.randn(3, 2, 4, 5, 8)
torchs = nn.MultiheadAttention(32, 4, batch_first=True)

TAKEN: dict[str, Callable[[str], object]] = {
    "MultiheadAttention": lambda name: linattn.MultiheadAttention(32, 4, name)(torch.randn(2, 5, 32)),
    "TorchMultiheadAttention": lambda name: linattn.TorchMultiheadAttention(32, 4, inner=name)(
        *torch.randn(3, 5, 2, 32)
    ),
    "attend": lambda name: linattn.attend(q, k, v, name),
    "replace_attention": lambda name: linattn.replace_attention(nn.Sequential(torchs), name),
    "with_inner": lambda name: linattn.with_inner(torchs, name)(*torch.randn(3, 2, 5, 32)),
}
REFUSED: dict[str, Callable[[str], object]] = {
    "LinearAttention": lambda name: linattn.LinearAttention(name),
    "RotaryAttention": lambda name: linattn.RotaryAttention(name),
    "RotaryLinearAttention": lambda name: linattn.RotaryLinearAttention(name),
    "SplitHeads": lambda name: linattn.SplitHeads((2, name), (2, linattn.SoftmaxAttention())),
    "attention_weights": lambda name: linattn.attention_weights(name, q, k),
    "compare_with_softmax": lambda name: linattn.compare_with_softmax(q, k, name),
}


def test_whatever_takes_an_attention_or_a_map_is_listed() -> None:
    found = set()
    for public in linattn.__all__:
        function = getattr(linattn, public)
        if callable(function) and not inspect.isabstract(function):
            kinds = (str(x.annotation) for x in inspect.signature(function).parameters.values())
            if any("InnerAttention" in kind or "FeatureMap" in kind for kind in kinds):
                found.add(public)
    assert found == {*TAKEN, *REFUSED}


@pytest.mark.parametrize("public", TAKEN)
@pytest.mark.usefixtures("unchecked")
def test_a_name_is_taken_where_the_heads_are_known(public: str) -> None:
    for name in ("elu", "local+elu", "softmax:1+favor:3"):
        TAKEN[public](name)
    with pytest.raises(ValueError, match=r"'performer' .*did you mean 'favor'"):
        TAKEN[public]("performer")
    wrongs = (
        (3, "a int"),
        (nn.Linear(2, 2), "a Linear"),
        (linattn.LinearAttention, "the class LinearAttention: call it"),
    )
    for wrong, message in wrongs:
        with pytest.raises(ValueError, match=f"an InnerAttention is needed here, but this is {message}"):
            TAKEN[public](wrong if public != "replace_attention" else lambda module, wrong=wrong: wrong)


@pytest.mark.parametrize("public", REFUSED)
@pytest.mark.usefixtures("unchecked")
def test_elsewhere_the_error_says_how_to_make_one(public: str) -> None:
    with pytest.raises(ValueError, match="is needed here, but this is the name 'elu'") as error:
        REFUSED[public]("elu")
    command = str(error.value).split(": ")[1].removesuffix(" makes one").replace("=…", "=4")
    made = eval(command, {"linattn": linattn, "head_dim": 8, "num_heads": 4, "num_key_heads": 4})
    REFUSED[public](made)


@pytest.mark.usefixtures("unchecked")
def test_a_feature_map_is_no_attention() -> None:
    feature_map = linattn.ElementwiseFeatureMap("relu")
    for make in (TAKEN["MultiheadAttention"], TAKEN["with_inner"], REFUSED["RotaryAttention"]):
        with pytest.raises(ValueError, match=r"but this is a ElementwiseFeatureMap: linattn.LinearAttention\("):
            make(feature_map)


def test_a_module_with_a_name_is_the_one_with_the_object() -> None:
    x = torch.randn(2, 5, 32)
    torch.manual_seed(0)
    named = linattn.MultiheadAttention(32, 4, "hedgehog", num_key_heads=2, key_dim=6)
    torch.manual_seed(0)
    inner = linattn.named_attention("hedgehog", num_heads=4, num_key_heads=2, head_dim=6)
    made = linattn.MultiheadAttention(32, 4, inner, num_key_heads=2, key_dim=6)
    made.load_state_dict(named.state_dict())
    assert torch.equal(named(x), made(x))
