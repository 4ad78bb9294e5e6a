"""The Linformer with torch's signature, against its formula; what the original gets wrong (M1 to M4) is a law here."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from linattn import LinearMultiheadAttention, LinformerAttention, TorchMultiheadAttention, attention_weights
from linattn.attention.linformer import LearnedProjection, MeanPooling

DIM, HEADS, SEQ, PROJ = 24, 4, 12, 5
SHARINGS = ("none", "headwise", "key-value", "layerwise")
every_sharing = pytest.mark.parametrize("sharing", SHARINGS)


def make(sharing="none", **options):
    return LinearMultiheadAttention(
        DIM, HEADS, seq_len=SEQ, proj_k=PROJ, param_sharing=sharing, dtype=torch.float64, **options
    )


def tokens(n=SEQ, b=3):
    return torch.randn(n, b, DIM, dtype=torch.float64)


def define(attention, query, key, value):
    """softmax(Q (E K)ᵀ/√d) (F V) for each head of each sequence, with loops."""
    (wq, wk, wv), (bq, bk, bv) = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    e, f = (p.weight.expand(HEADS, -1, -1) for p in (attention.inner.key_projection, attention.inner.value_projection))
    y, weights = torch.empty_like(query), torch.empty(query.shape[1], HEADS, len(query), PROJ, dtype=query.dtype)
    for b in range(query.shape[1]):
        q, k, v = query[:, b] @ wq.mT + bq, key[:, b] @ wk.mT + bk, value[:, b] @ wv.mT + bv
        heads = []
        for h in range(HEADS):
            c = slice(h * DIM // HEADS, (h + 1) * DIM // HEADS)
            scores = q[:, c] @ (e[h, :, : len(key)] @ k[:, c]).mT / (DIM / HEADS) ** 0.5
            weights[b, h] = scores.softmax(-1)
            heads.append(weights[b, h] @ (f[h, :, : len(key)] @ v[:, c]))
        y[:, b] = attention.out_proj(torch.cat(heads, -1))
    return y, weights


@every_sharing
@pytest.mark.parametrize("m", [SEQ, 7, 1])
def test_it_is_the_papers_formula(sharing, m):
    attention, q, k, v = make(sharing), tokens(6), tokens(m), tokens(m)
    y, weights = attention(q, k, v, average_attn_weights=False)
    expected, expected_weights = define(attention, q, k, v)
    assert_close(y, expected)
    assert_close(weights, expected_weights)
    assert_close(attention(q, k, v)[1], expected_weights.mean(1))


def test_sharing_is_the_papers():
    numbers = {sharing: sum(p.numel() for p in make(sharing).inner.parameters()) for sharing in SHARINGS}
    one = SEQ * PROJ
    assert numbers == {"none": 2 * HEADS * one, "headwise": 2 * one, "key-value": one, "layerwise": one}


def test_layers_share_one_projection():
    first = make("layerwise")
    layers = nn.ModuleList([first, *(make("layerwise", projection=first.projection) for _ in range(3))])
    shared = [p for p in layers.parameters() if p.shape == (PROJ, SEQ)]
    assert len(shared) == 1
    x = tokens()
    for layer in layers:
        x = layer(x, x, x)[0]
    x.sum().backward()
    assert (shared[0].grad != 0).all()
    with pytest.raises(ValueError, match='projection needs param_sharing="layerwise"'):
        make("headwise", projection=first.projection)


@every_sharing
def test_m1_batch_elements_do_not_mix(sharing):
    attention, x = make(sharing), tokens()
    y, _ = attention(x, x, x)
    for row in range(3):
        one = x[:, row : row + 1]
        assert_close(attention(one, one, one)[0], y[:, row : row + 1], rtol=0, atol=1e-14)


@every_sharing
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("where", ["right", "left", "holes"])
def test_m2_padding_has_no_effect(sharing, kind, where):
    attention, x = make(sharing), tokens()
    hidden = {
        "right": torch.arange(SEQ) >= torch.tensor([[SEQ], [8], [1]]),
        "left": torch.arange(SEQ) < torch.tensor([[0], [4], [11]]),
        "holes": torch.rand(3, SEQ) < 0.5,
    }[where]
    mask = hidden if kind == "bool" else torch.zeros(3, SEQ).masked_fill(hidden, -torch.inf)
    rubbish = torch.where(hidden.mT.unsqueeze(-1), 1e9, x)
    y, weights = attention(rubbish, rubbish, rubbish, key_padding_mask=mask)
    for row in range(3):
        alone = x[~hidden[row], row]
        expected, expected_weights = attention(alone, alone, alone)
        assert_close(y[~hidden[row], row], expected)
        assert_close(weights[row, ~hidden[row]], expected_weights)


def test_m3_any_length_up_to_seq_len():
    attention = make()
    for n in (0, 1, 5, SEQ):
        x = tokens(n)
        y, weights = attention(x, x, x)
        assert y.shape == x.shape and weights.shape == (3, n, PROJ)
    x = tokens(SEQ + 1)
    with pytest.raises(ValueError, match="at most 12 keys, but there are 13"):
        attention(x, x, x)


def test_m4_masks():
    attention, x = make(), tokens()
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    for masks in (
        {"attn_mask": causal},
        {"is_causal": True},
        {"attn_mask": torch.zeros(SEQ, SEQ).masked_fill(causal, -torch.inf)},
    ):
        with pytest.raises(ValueError, match="Linformer never can"):
            attention(x, x, x, **masks)
    hidden = torch.arange(SEQ) > 7
    expected = attention(x, x, x, key_padding_mask=hidden.expand(3, -1))
    assert_close(attention(x, x, x, attn_mask=hidden.expand(SEQ, -1)), expected)
    assert_close(attention(x, x, x, attn_mask=torch.zeros(SEQ, SEQ, dtype=torch.bfloat16))[0], attention(x, x, x)[0])


@pytest.mark.parametrize(
    "options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str
)
def test_m4_keys_of_its_own(options):
    attention, x = make(**options), tokens()
    more = len(options)
    assert attention.projection.max_length == SEQ + more
    hidden = torch.arange(SEQ).expand(3, -1) > 6
    y, _ = attention(x, x, x, key_padding_mask=hidden)
    assert_close(y[:7], attention(x[:7], x[:7], x[:7])[0])
    # with nothing else to see, a query still sees the added keys
    y, weights = attention(x, x, x, key_padding_mask=torch.ones(3, SEQ, dtype=torch.bool))
    assert torch.isfinite(y).all()
    assert_close(weights.sum(-1), torch.ones(3, SEQ, dtype=torch.float64))
    if attention.bias_v is not None:
        (gradient,) = torch.autograd.grad(y.sum(), attention.bias_v)
        assert (gradient != 0).any()


@every_sharing
def test_m4_in_torchs_layers(sharing):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = make(sharing, batch_first=True)
    x, hidden = tokens().transpose(0, 1), torch.arange(SEQ).expand(3, -1) > 6
    trained = layer(x, src_key_padding_mask=hidden)
    with torch.no_grad():
        assert_close(layer.eval()(x, src_key_padding_mask=hidden), trained.detach())
    assert_close(layer(x[:, :7])[:, :7], trained[:, :7])


@every_sharing
def test_torchs_weights_load(sharing):
    theirs, mine = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64), make(sharing)
    before = {name: x.clone() for name, x in mine.inner.state_dict().items()}
    mine.load_state_dict(theirs.state_dict())
    assert_close(mine.in_proj_weight, theirs.in_proj_weight, rtol=0, atol=0)
    assert_close(dict(mine.inner.state_dict()), before, rtol=0, atol=0)


def test_the_projected_attention_is_exact_where_nothing_is_projected():
    """With E = F = 1 it is torch's own attention."""
    theirs = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64)
    mine = LinearMultiheadAttention(DIM, HEADS, seq_len=SEQ, proj_k=SEQ, param_sharing="key-value", dtype=torch.float64)
    mine.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        mine.projection.weight.copy_(torch.eye(SEQ))
    x = tokens()
    assert_close(mine(x, x, x), theirs(x, x, x), rtol=0, atol=1e-12)


def test_the_matrix_behind_it():
    attention = make("headwise")
    q, k, v = (t.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for t in (tokens(6), tokens(7), tokens(7)))
    assert_close(attention_weights(attention.inner, q, k) @ v, attention.inner(q, k, v))


def test_the_weights_have_no_part_in_windows_without_tokens():
    """Where the values are pooled and the keys are not."""
    inner = LinformerAttention(LearnedProjection(SEQ, 4), MeanPooling(SEQ, 4))
    attention = TorchMultiheadAttention(DIM, HEADS, inner=inner, dtype=torch.float64)
    x, hidden = tokens(), (torch.arange(SEQ) > 5).expand(3, -1)
    y, weights = attention(x, x, x, key_padding_mask=hidden, average_attn_weights=False)
    v = F.linear(x[:6], attention.in_proj_weight[2 * DIM :], attention.in_proj_bias[2 * DIM :])
    pooled = v.unflatten(0, (2, 3)).mean(1).unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)
    assert_close(y, attention.out_proj((weights[..., :2] @ pooled).permute(2, 0, 1, 3).flatten(2)))
    assert (weights[..., 2:] == 0).all()


def test_the_projection_is_no_longer_than_the_sequence():
    assert LinearMultiheadAttention(DIM, HEADS, seq_len=9, proj_k=64).projection.projected_length == 9


def test_errors():
    with pytest.raises(
        ValueError, match="param_sharing must be one of none, headwise, key-value, layerwise, but is 'head'"
    ):
        make("head")
    with pytest.raises(TypeError, match="proj"):
        LinearMultiheadAttention(DIM, HEADS, proj=4)


def test_a_shared_projection_has_its_own_lengths():
    first = LinearMultiheadAttention(8, 2, seq_len=20, proj_k=4, param_sharing="layerwise")
    for options in ({}, {"seq_len": 20, "proj_k": 4}):
        LinearMultiheadAttention(8, 2, param_sharing="layerwise", projection=first.projection, **options)
    for options in ({"seq_len": 30}, {"proj_k": 5}):
        with pytest.raises(ValueError, match=r"but the projection that was given has (20|4): leave it out"):
            LinearMultiheadAttention(8, 2, param_sharing="layerwise", projection=first.projection, **options)


@pytest.mark.usefixtures("unchecked")
def test_the_module_of_a_projection_is_no_projection():
    first = make("layerwise")
    with pytest.raises(ValueError, match=r"projection must be a SequenceProjection, such as that of .*\.projection"):
        LinearMultiheadAttention(DIM, HEADS, param_sharing="layerwise", projection=first)
