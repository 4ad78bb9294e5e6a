"""The stream that is normalised after each addition: torch's own layers are this, and extending gives the same."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.attention import LinearAttention, SoftmaxAttention
from linattn.compat.fast_transformers.post_norm import PostNormSequence
from linattn.feature_maps import ElementwiseFeatureMap
from linattn.nn import Branch, FeedForward, MultiheadAttention


def stack(*, causal: bool, context: bool = False) -> PostNormSequence:
    branches = []
    for _ in range(2):
        inner = LinearAttention(ElementwiseFeatureMap("elu_plus_one"), causal=causal)
        branches.append(Branch(MultiheadAttention(12, 3, inner)))
        if context:
            inner = LinearAttention(ElementwiseFeatureMap("elu_plus_one"))
            branches.append(Branch(MultiheadAttention(12, 3, inner, context_dim=5)))
        branches.append(Branch(FeedForward(12, 20)))
    return PostNormSequence(branches, [nn.LayerNorm(12) for _ in branches]).double()


@torch.no_grad()
def test_torchs_encoder_layer_is_this():
    theirs = nn.TransformerEncoderLayer(12, 3, 20, 0.0, batch_first=True).double()
    attention = MultiheadAttention(12, 3, SoftmaxAttention(), bias=True).double()
    feed_forward = FeedForward(12, 20, activation=torch.relu).double()
    for part, weight, bias in zip(
        (attention.q_proj, attention.k_proj, attention.v_proj),
        theirs.self_attn.in_proj_weight.chunk(3),
        theirs.self_attn.in_proj_bias.chunk(3),
        strict=True,
    ):
        part.weight.copy_(weight), part.bias.copy_(bias)
    attention.o_proj.load_state_dict(theirs.self_attn.out_proj.state_dict())
    feed_forward.up_proj.load_state_dict(theirs.linear1.state_dict())
    feed_forward.down_proj.load_state_dict(theirs.linear2.state_dict())
    ours = PostNormSequence([Branch(attention), Branch(feed_forward)], [theirs.norm1, theirs.norm2])
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    assert_close(ours(x), theirs.train()(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("context", [False, True])
def test_pieces_make_the_whole(context):
    model, x = stack(causal=True, context=context), torch.randn(2, 17, 12, dtype=torch.float64)
    given = {"context": torch.randn(2, 6, 5, dtype=torch.float64)} if context else {}
    state, ys = None, []
    for piece in x.split([1, 9, 1, 6], 1):
        y, state = model.extend(piece, state, **(given if state is None else {}))
        ys.append(y)
    assert_close(torch.cat(ys, 1), model(x, **given), rtol=1e-10, atol=1e-10)


def test_a_masked_token_is_a_missing_token():
    model, x = stack(causal=False), torch.randn(1, 17, 12, dtype=torch.float64)
    mask = torch.rand(1, 17) < 0.6
    assert_close(model(x, key_mask=mask)[mask], model(x[mask].unsqueeze(0))[0])


def test_as_many_norms_as_branches():
    with pytest.raises(ValueError, match="but there are 1 and 0"):
        PostNormSequence([Branch(FeedForward(4, 4))], [])
