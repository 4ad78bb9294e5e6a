"""The attention of a linearized layer keeps the interface of every inner attention."""

from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

from linattn.attention import GateNeeds, InnerAttention, LinearAttention
from linattn.feature_maps import ElementwiseFeatureMap
from linattn.linearize.attention import LayerSpec, LinearizedAttention
from linattn.linearize.initialization import with_decay


def subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


@pytest.mark.parametrize(
    "kind", [kind for kind in subclasses(InnerAttention) if kind.__module__.startswith("linattn.")]
)
def test_no_attention_overrides_the_methods_that_check(kind):
    assert not {"forward", "extend", "summarize"} & set(vars(kind))


def attention(*, window: int = 3, causal: bool = True, **changes: object) -> LinearizedAttention:
    sizes = {"index": 0, "method": "elu", "key_dim": None, "convolution": 0, "decay": causal, "num_heads": 4}
    sizes |= {"num_key_heads": 2, "head_dim": 8, "dim": 12, "window": window, "causal": causal}
    torch.manual_seed(0)
    return LinearizedAttention(LayerSpec(**sizes | changes)).double()


def inputs(n: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(2, h, n, 8, dtype=torch.float64) for h in (4, 2, 2))


@pytest.mark.parametrize("window", [0, 3])
def test_pieces_make_the_whole(window):
    own, (q, k, v), x = attention(window=window), inputs(9), torch.randn(2, 9, 12, dtype=torch.float64)
    _, gates = own.prepare(x, None, None)
    whole, state, pieces = own(q, k, v, gates=gates), None, []
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        _, part = own.prepare(x[:, start:stop], None, None)
        y, state = own.extend(*(z[:, :, start:stop] for z in (q, k, v)), state, gates=part)
        pieces.append(y)
    assert_close(torch.cat(pieces, 2), whole)


@pytest.mark.parametrize("method", ["elu", "gated_delta", "kda"])
def test_under_autocast_queries_and_keys_may_be_wider_than_values(method):
    """They are where a model normalizes them."""
    own, (q, k, v) = attention(method=method).float(), (x.float() for x in inputs(9))
    with torch.autocast("cpu", torch.bfloat16):
        _, gates = own.prepare(torch.randn(2, 9, 12), None, None)
        assert own(q, k, v.bfloat16(), gates=gates).dtype == torch.bfloat16


@pytest.mark.parametrize("causal", [True, False])
def test_arguments_are_checked_as_everywhere(causal):
    own, (q, k, v) = attention(causal=causal), inputs(5)
    _, gates = own.prepare(torch.randn(2, 5, 12, dtype=torch.float64), None, None)
    for wrong in (None, gates._replace(share=None), gates.inner):
        with pytest.raises(ValueError, match="those that its `prepare` returns"):
            own(q, k, v, gates=wrong)
    with pytest.raises(ValueError, match="`prepare`"):
        attention(causal=causal, window=0)(q, k, v, gates=gates._replace(inner=None))
    with pytest.raises(ValueError, match="key heads"):
        own(q[:, :3], k, v, gates=gates)
    if causal:
        with pytest.raises(ValueError, match="a tuple of 2"):
            own.extend(q, k, v, (None,), gates=gates)


def test_a_decay_comes_with_a_new_attention():
    before = LinearAttention(ElementwiseFeatureMap("elu_plus_one"), causal=True)
    after = with_decay(before)
    assert before.needs is None and after.needs == GateNeeds(decay="head")
    assert with_decay(after) is after


def test_a_decay_is_refused_without_an_order():
    with pytest.raises(ValueError, match="causal"):
        attention(causal=False, decay=True)
