"""torch's own Transformer layers, with our attention in the place of theirs: never a crash, never behind our back."""

import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import linattn
from linattn import ATTENTIONS, TorchMultiheadAttention, named_attention, replace_attention, traits

DIM, HEADS, N, BATCH = 24, 4, 9, 3
NAMES = [name for name in ATTENTIONS if traits(name).bidirectional]
CAUSAL = [name for name in NAMES if traits(name).causal]
every_global = pytest.mark.parametrize("name", NAMES)
every_causal = pytest.mark.parametrize("name", CAUSAL)


def attention(name, **options):
    inner = named_attention(name, num_heads=HEADS, head_dim=DIM // HEADS, window=3, max_length=40)
    return TorchMultiheadAttention(DIM, HEADS, inner=inner, **options)


def encoder(name=None, *, batch_first=True, layers=2, put="before", norm_first=False):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    if name is not None and put == "before":
        layer.self_attn = attention(name, batch_first=batch_first)
    with warnings.catch_warnings():
        # torch says that it cannot take its fast path, which is what we want
        warnings.simplefilter("ignore")
        model = nn.TransformerEncoder(layer, layers)
    if name is not None and put == "after":
        replace_attention(model, name, window=3, max_length=40)
    return model.double()


def tokens(*shape):
    return torch.randn(*(shape or (BATCH, N, DIM)), dtype=torch.float64)


def count_calls(model):
    """Not by hooks: torch has no fast path where there are hooks."""
    calls = []

    def counted(forward):
        return lambda *args, **options: calls.append(1) or forward(*args, **options)

    for layer in model.layers:
        layer.self_attn.forward = counted(layer.self_attn.forward)
    return calls


def hidden():
    return torch.arange(N).expand(BATCH, -1) >= torch.tensor([[N], [5], [1]])


@every_global
@pytest.mark.parametrize("put", ["before", "after"])
@pytest.mark.usefixtures("unchecked")
def test_an_encoder_in_training_and_evaluation(name, put):
    """In evaluation, without gradients, torch would compute softmax attention from our weights, or nest the tensors."""
    model, x = encoder(name, put=put), tokens()
    calls = count_calls(model)
    trained = model.train()(x, src_key_padding_mask=hidden())
    assert len(calls) == 2
    model.eval()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            y = model(x, src_key_padding_mask=hidden())
            alone = [model(row[None, :n]) for row, n in zip(x, (N, 5, 1), strict=True)]
        assert_close(y[~hidden()], trained[~hidden()], rtol=1e-9, atol=1e-12)
        for row, one in enumerate(alone):
            assert_close(y[row, : one.shape[1]], one[0], rtol=1e-9, atol=1e-12)
    assert len(calls) == 2 + 2 * (2 + 2 * 3)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_softmax_in_an_encoder_is_torchs_encoder(batch_first, norm_first):
    theirs = encoder(batch_first=batch_first, norm_first=norm_first)
    mine = encoder("softmax", batch_first=batch_first, norm_first=norm_first)
    mine.load_state_dict(theirs.state_dict())
    x = tokens() if batch_first else tokens(N, BATCH, DIM)
    causal = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    for masks in ({}, {"src_key_padding_mask": hidden()}, {"mask": causal}, {"mask": causal, "is_causal": True}):
        expected = theirs.train()(x, **masks)
        for model in (mine.train(), mine.eval()):
            y = model(x, **masks)
            assert_close(y, expected, rtol=0, atol=1e-12)


@every_causal
def test_an_encoder_with_a_causal_mask_is_causal(name):
    model, x = encoder(name).eval(), tokens()
    causal = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    changed = x.clone()
    changed[:, 6:] = 1e3 * tokens(BATCH, 3, DIM)
    for masks in ({"mask": causal}, {"mask": causal, "is_causal": True}):
        with torch.no_grad():
            y, after = model(x, **masks), model(changed, **masks)
        assert_close(after[:, :6], y[:, :6], rtol=1e-9, atol=1e-12)
        assert not torch.allclose(after[:, 6:], y[:, 6:])


@every_causal
def test_a_decoder_keeps_order_and_padding(name):
    cross = name if traits(name).cross else "elu"
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 32, dropout=0.0, batch_first=True)
    layer.self_attn, layer.multihead_attn = attention(name, batch_first=True), attention(cross, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).double()
    x, memory = tokens(BATCH, 6, DIM), tokens()
    options = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64),
        "memory_key_padding_mask": torch.zeros(BATCH, N, dtype=torch.float64).masked_fill(hidden(), -torch.inf),
    }
    for mode in (True, False):
        model.train(mode)
        y = model(x, memory, **options)
        changed, rubbish = x.clone(), memory.clone()
        changed[:, 4:] = 1e3
        rubbish[hidden()] = 1e3
        assert_close(model(changed, rubbish, **options)[:, :4], y[:, :4], rtol=1e-9, atol=1e-12)


class VisionBlock(nn.Module):
    """As torchvision's ViT writes it."""

    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(DIM)
        self.self_attention = nn.MultiheadAttention(DIM, HEADS, dropout=0.0, batch_first=True)

    def forward(self, x):
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        return x + y


@every_global
def test_a_vision_transformer_by_one_function(name):
    model = nn.Sequential(VisionBlock(), VisionBlock()).double()
    before, x = {key: value.clone() for key, value in model.state_dict().items()}, tokens()
    expected = model(x)
    old = replace_attention(model, name, window=3, max_length=400)
    assert list(old) == ["0.self_attention", "1.self_attention"]
    assert all(type(module) is nn.MultiheadAttention for module in old.values())
    y = model(x)
    assert name == "softmax" or not torch.allclose(y, expected)
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value)
    for place, module in old.items():
        model.set_submodule(place, module)
    assert_close(model(x), expected, rtol=0, atol=0)


def test_replacing_keeps_weights_optimizers_modes_and_places():
    model = nn.Transformer(DIM, HEADS, 1, 1, 32, dropout=0.25, batch_first=True).double().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    shared = linattn.LearnedProjection(40, 5)
    old = replace_attention(
        model,
        lambda module: linattn.LinformerAttention(shared),
        where=lambda name, module: "decoder" not in name or "multihead" in name,
        return_weights=False,
    )
    assert set(old) == {"encoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"}
    new = model.encoder.layers[0].self_attn
    was = old["encoder.layers.0.self_attn"]
    assert new.in_proj_weight is was.in_proj_weight and new.out_proj is was.out_proj
    assert new.batch_first and new.dropout == 0.25 and not new.training and not new.return_weights
    assert new.inner.key_projection is model.decoder.layers[0].multihead_attn.inner.key_projection
    assert shared.weight.dtype == torch.float64
    weight = new.in_proj_weight.detach().clone()
    new(*[tokens()] * 3)[0].sum().backward()
    optimizer.step()
    assert not torch.equal(new.in_proj_weight, weight)
    # what was replaced may be replaced again
    assert set(replace_attention(model, "elu")) == {*old, "decoder.layers.0.self_attn"}


def test_a_module_in_two_places_stays_one():
    one = nn.MultiheadAttention(DIM, HEADS)
    model = nn.ModuleDict({"first": one, "second": one})
    assert set(replace_attention(model, "elu")) == {"first", "second"}
    assert model["first"] is model["second"]


@pytest.mark.parametrize(
    "options", [{"kdim": 5, "vdim": 7}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str
)
def test_every_kind_of_attention_is_replaced_by_itself(options):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64, **options)})
    x = tokens(4, BATCH, DIM), tokens(N, BATCH, options.get("kdim", DIM)), tokens(N, BATCH, options.get("vdim", DIM))
    expected = model["a"](*x)
    replace_attention(model, "softmax")
    assert isinstance(model["a"], TorchMultiheadAttention)
    assert_close(model["a"](*x), expected, rtol=0, atol=1e-12)


def test_errors():
    with pytest.raises(ValueError, match=r"no nn\.MultiheadAttention to replace in this Linear"):
        replace_attention(nn.Linear(2, 2), "elu")
    alone = nn.MultiheadAttention(DIM, HEADS)
    with pytest.raises(ValueError, match=r"with_inner\(attention, inner\)"):
        replace_attention(alone, "elu")
    assert isinstance(linattn.with_inner(alone, linattn.SoftmaxAttention()), TorchMultiheadAttention)
    with pytest.raises(ValueError, match="give max_length"):
        replace_attention(nn.Sequential(alone), "linformer")
    with pytest.raises(ValueError, match="'elo'"):
        replace_attention(nn.Sequential(alone), "elo")
