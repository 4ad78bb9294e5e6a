"""Wherever a name is given, an unknown one is answered with the names there are and the one that was probably meant."""

from collections.abc import Callable

import pytest
import torch

import linattn
from tests.laws import tokens

q, k, v = tokens(3, dtype=torch.float32)


def config(field: str, value: str) -> object:
    return linattn.LanguageModelConfig.from_dict({"vocab_size": 7, field: value})


CASES: dict[str, tuple[Callable[[str], object], dict[str, str]]] = {
    "attention": (
        lambda name: linattn.named_attention(name, num_heads=4, head_dim=8),
        {
            "performer": "favor",
            "Performer": "favor",
            "linear-transformer": "elu",
            "retnet": "retention",
            "mamba2": "ssd",
            "deltanet": "delta",
            "gated deltanet": "gated_delta",
            "kimi_delta_attention": "kda",
            "gated_linear_attention": "gla",
            "based": "taylor2",
            "sdpa": "softmax",
            "sliding window": "local",
            "linformr": "linformer",
            "local+performer": "favor",
            "favor+": "favor",
            "elu_plus_one": "elu",
        },
    ),
    "attend": (lambda name: linattn.attend(q, k, v, name), {"performer": "favor"}),
    "config attention": (lambda name: config("attention", name), {"local+performer": "favor"}),
    "config norm": (lambda name: config("norm", name), {"RMSNorm": "rms", "layers": "layer"}),
    "config feed_forward": (lambda name: config("feed_forward", name), {"swiglu": "gated", "gelus": "gelu"}),
    "config positions": (lambda name: config("positions", name), {"learnt": "learned"}),
    "config field": (
        lambda name: config(name, "1"),
        {"n_head": "num_heads", "widow": "window", "tie_embedding": "tie_embeddings"},
    ),
    "feature map": (linattn.ElementwiseFeatureMap, {"elu": "elu_plus_one", "softpluss": "softplus"}),
    "feature_map": (
        lambda name: linattn.causal_linear_attention(q, k, v, feature_map=name),
        {"elu": "elu_plus_one", "rellu": "relu"},
    ),
    "normalize": (lambda name: linattn.linear_attention(q, k, v, normalize=name), {"key": "keys", "outputs": "output"}),
    "normalize of a module": (
        lambda name: linattn.LinearAttention(linattn.ElementwiseFeatureMap("relu"), normalize=name),
        {"defaults": "default", "none": "None"},
    ),
    "backend": (lambda name: linattn.linear_attention(q, k, v, backend=name), {"chunk": "chunked"}),
    "causal backend": (
        lambda name: linattn.causal_linear_attention(q, k, v, backend=name),
        {"tritron": "triton", "recurent": "recurrent"},
    ),
    "param_sharing": (
        lambda name: linattn.LinearMultiheadAttention(8, 2, param_sharing=name),
        {"headwyse": "headwise", "key_value": "key-value"},
    ),
    "reduce": (lambda name: linattn.ReversibleSequence([], reduce=name), {"means": "mean"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_nearest_name_is_suggested(case: str) -> None:
    call, names = CASES[case]
    for name, meant in names.items():
        with pytest.raises(ValueError, match=rf"\(did you mean '{meant}'\?\)") as error:
            call(name)
        assert meant in str(error.value).replace(f"'{meant}'", "", 1), "all names are listed"


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_suggested_for_what_is_like_nothing(case: str) -> None:
    with pytest.raises(ValueError, match="zzzz") as error:
        CASES[case][0]("zzzz")
    assert "did you mean" not in str(error.value)
