"""What torch's signature promises, as laws for every attention that goes into it."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import linattn
from linattn import TorchMultiheadAttention, named_attention, traits
from tests.integrations.torch.cases import (
    BATCH,
    CAUSAL,
    DIM,
    GLOBAL,
    HEADS,
    M,
    N,
    call,
    causal_mask,
    inputs,
    pair,
    self_inputs,
)

every_global = pytest.mark.parametrize("name", [*GLOBAL, "local+elu"])
every_causal = pytest.mark.parametrize("name", [*CAUSAL, "local+elu"])


@every_global
def test_the_weights_are_the_matrix_of_the_outputs(name):
    _, mine = pair(name, options={"batch_first": True})
    x = self_inputs()
    mask = {"key_padding_mask": torch.arange(N).expand(BATCH, -1) >= torch.tensor([[N], [5], [1]])}
    for masks in ({}, mask):
        y, weights = call(mine, x, average_attn_weights=False, **masks)
        without, none = call(mine, x, need_weights=False, **masks)
        assert none is None
        assert_close(y, without, rtol=0, atol=1e-12 if name == "softmax" else 0)
        assert_close(call(mine, x, **masks)[1], weights.mean(1))
        if "linformer" in name:
            # over projected keys; the matrix of the outputs has a test of its own, where there is one
            assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
            continue
        assert weights.shape == (BATCH, HEADS, N, N)
        v = nn.functional.linear(x, mine.in_proj_weight[2 * DIM :], mine.in_proj_bias[2 * DIM :])
        v = v.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        assert_close(mine.out_proj((weights @ v).transpose(1, 2).flatten(2)), y, rtol=1e-9, atol=1e-12)
        assert masks == {} or (weights[1, :, :, 5:] == 0).all()


@every_global
def test_layouts_are_one_function(name):
    _, mine = pair(name, options={"batch_first": True})
    turned = pair(name)[1]
    turned.load_state_dict(mine.state_dict())
    x = self_inputs()
    y, weights = call(mine, x)
    y_turned, weights_turned = call(turned, x.transpose(0, 1))
    assert_close(y_turned.transpose(0, 1), y, rtol=0, atol=1e-12)
    assert_close(weights_turned, weights, rtol=0, atol=1e-12)
    for attention in (mine, turned):
        # for one sequence, batch_first means nothing; and batch elements do not mix
        assert_close(call(attention, x[1]), (y[1], weights[1]), rtol=0, atol=1e-12)


@every_global
@pytest.mark.parametrize("kind", ["bool", "float", "large", "matrix", "matrix for each head"])
def test_a_hidden_key_is_a_missing_key(name, kind):
    _, mine = pair(name, options={"batch_first": True})
    x, hidden = self_inputs(), torch.arange(N).expand(BATCH, -1) >= torch.tensor([[N], [5], [1]])
    masks = {
        "bool": {"key_padding_mask": hidden},
        "float": {"key_padding_mask": torch.zeros(BATCH, N, dtype=torch.float64).masked_fill(hidden, -torch.inf)},
        # softmax adds it to scores that are as large as the rubbish
        "large": {"key_padding_mask": hidden * (-1e9 if name == "softmax" else -1e4)},
        "matrix": {"attn_mask": hidden[1].expand(N, N)},
        "matrix for each head": {"attn_mask": hidden[:, None, None].expand(-1, HEADS, N, -1).flatten(0, 1)},
    }[kind]
    rubbish = torch.where(hidden.unsqueeze(-1), 1e6 * torch.randn(BATCH, N, DIM), x)
    y, _ = mine(rubbish, rubbish, rubbish, **masks, need_weights=False)
    for row, n in enumerate([5, 5, 5] if kind == "matrix" else [N, 5, 1]):
        if kind != "matrix" or row == 1:
            alone, _ = call(mine, x[row, :n])
            assert_close(y[row, :n], alone, rtol=1e-9, atol=1e-12)


@every_causal
@pytest.mark.parametrize("by", ["mask", "float mask", "hint", "both", "mask for each head"])
def test_causal_by_any_sign_is_the_causal_attention(name, by):
    torch.manual_seed(0)
    made = {"num_heads": HEADS, "head_dim": DIM // HEADS, "window": 3, "max_length": 40}
    causal = named_attention(name, causal=True, **made)
    follows = named_attention(name, **made) if traits(name).bidirectional else causal
    always, told = (
        TorchMultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64, inner=inner)
        for inner in (causal, follows)
    )
    always.load_state_dict(told.state_dict())
    x, mask = self_inputs(), causal_mask(N)
    masks = {
        "mask": {"attn_mask": mask},
        "float mask": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)},
        "hint": {"is_causal": True},
        "both": {"attn_mask": mask, "is_causal": True},
        "mask for each head": {"attn_mask": mask.expand(BATCH * HEADS, N, N)},
    }[by]
    y, weights = call(told, x, **masks)
    assert_close((y, weights), call(always, x), rtol=0, atol=1e-12)
    assert (weights.triu(1) == 0).all()
    changed = x.clone()
    changed[:, 6:] = 1e3 * torch.randn_like(changed[:, 6:])
    assert_close(call(told, changed, **masks)[0][:, :6], y[:, :6], rtol=1e-9, atol=1e-12)


@every_causal
def test_a_mask_that_is_causal_by_its_hint_alone_is_refused(name):
    if name == "softmax" or not traits(name).bidirectional:
        pytest.skip("softmax reads its mask, and no other method follows the call")
    _, mine = pair(name, options={"batch_first": True})
    x, order, far = self_inputs(), causal_mask(N), torch.ones(N, N, dtype=torch.bool).tril(-3)
    hidden, nothing = torch.arange(N) == 2, torch.zeros(N, N, dtype=torch.bool)
    for mask in (order | far, order | hidden, nothing, hidden.expand(N, N)):
        for kind in (mask, torch.zeros(N, N, dtype=torch.float64).masked_fill(mask, -torch.inf)):
            for need_weights in (True, False):
                with pytest.raises(ValueError, match="says that attn_mask is the causal mask"):
                    mine(x, x, x, attn_mask=kind, is_causal=True, need_weights=need_weights)


@pytest.mark.parametrize("kind", ["bool", "float", "each head", "hides keys", "hides keys and pads"])
def test_a_mask_beside_a_causal_softmax_hides_more(kind):
    """As torch's own with the two masks in one, whether weights are wanted or not."""
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64)
    mine = TorchMultiheadAttention(
        DIM, HEADS, inner=linattn.SoftmaxAttention(causal=True), batch_first=True, dtype=torch.float64
    )
    mine.load_state_dict(theirs.state_dict())
    x, hidden = self_inputs(), torch.rand(BATCH * HEADS, N, N) < 0.5
    hidden[:, :, 0] = False
    if "keys" in kind:
        hidden = (torch.arange(N) == 3).expand(N, N)
    elif kind != "each head":
        hidden = hidden[0]
    own = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf) if kind == "float" else hidden
    padding = (torch.arange(N) == 4).expand(BATCH, N) if "pads" in kind else None
    expected, weights = theirs(
        x, x, x, attn_mask=hidden | causal_mask(N), key_padding_mask=padding, average_attn_weights=False
    )
    for need_weights in (True, False):
        y, found = mine(
            x, x, x, attn_mask=own, key_padding_mask=padding, need_weights=need_weights, average_attn_weights=False
        )
        assert_close(y, expected)
        assert found is None or assert_close(found, weights) is None


@every_causal
@pytest.mark.parametrize("causal", [False, True])
def test_weights_that_are_wanted_change_no_output(name, causal):
    if not (causal or traits(name).bidirectional):
        pytest.skip("this method is causal only")
    inner = named_attention(name, causal=causal, num_heads=HEADS, head_dim=DIM // HEADS, window=3, max_length=40)
    mine = TorchMultiheadAttention(DIM, HEADS, inner=inner, batch_first=True, dtype=torch.float64)
    x, hidden = self_inputs(), torch.arange(N) == 2
    for masks in ({}, {"key_padding_mask": hidden.expand(BATCH, N)}, {"attn_mask": hidden.expand(N, N)}):
        y, _ = mine(x, x, x, need_weights=True, **masks)
        assert_close(mine(x, x, x, need_weights=False, **masks)[0], y)


def test_causal_and_padded_in_one_mask():
    _, mine = pair("elu", options={"batch_first": True})
    x, hidden = self_inputs(), torch.arange(N) < 2
    y, _ = call(mine, x, attn_mask=causal_mask(N), key_padding_mask=hidden.expand(BATCH, -1))
    together, _ = call(mine, x, attn_mask=causal_mask(N) | hidden)
    assert_close(together, y)
    assert_close(y[:, 2:], call(mine, x[:, 2:], is_causal=True)[0])
    # nothing to see: zeros, and so the bias of the output projection
    assert_close(y[:, :2], mine.out_proj.bias.expand(BATCH, 2, -1))


def test_a_softmax_over_nothing_is_zeros_with_gradients():
    _, mine = pair(options={"batch_first": True})
    for need_weights in (True, False):
        x = self_inputs().requires_grad_()
        hidden = torch.zeros(BATCH, N, dtype=torch.bool)
        hidden[1] = True
        y, weights = call(mine, x, key_padding_mask=hidden, need_weights=need_weights)
        assert_close(y[1], mine.out_proj.bias.expand(N, -1))
        assert weights is None or (weights[1] == 0).all()
        y.sum().backward()
        assert torch.isfinite(x.grad).all()


@every_global
@pytest.mark.parametrize("n", [N, M])
def test_keys_that_all_queries_see(name, n):
    """add_bias_kv and add_zero_attn: one more key each, for every query, with the learned key and value, or zeros."""
    options = {"add_bias_kv": True, "add_zero_attn": True}
    if "local" in name:
        with pytest.raises(ValueError, match="no window has them"):
            pair(name, options=options)
        return
    if not traits(name).cross and n != M:
        return
    _, mine = pair(name, options=options | {"batch_first": True})
    x = inputs({"batch_first": True}, n=n)
    q, k, v = mine._heads(*x)
    extra = [
        torch.cat([b.view(1, HEADS, 1, -1), torch.zeros(1, HEADS, 1, DIM // HEADS)], -2)
        for b in (mine.bias_k, mine.bias_v)
    ]
    k, v = (torch.cat([e.expand(BATCH, -1, -1, -1), x], -2) for e, x in zip(extra, (k, v), strict=True))
    if not traits(name).cross:
        q = torch.cat([q[..., :2, :], q], -2)
    expected = mine.inner(q, k, v)[..., -n:, :]
    y, weights = mine(*x, average_attn_weights=False)
    assert_close(y, mine.out_proj(expected.transpose(1, 2).flatten(2)))
    # torch has them in the last columns
    if "linformer" in name:
        return
    assert weights.shape == (BATCH, HEADS, n, M + 2)
    assert_close(weights @ v.roll(-2, -2), expected, rtol=1e-9, atol=1e-12)


def test_keys_that_all_queries_see_beside_as_many_as_queries():
    """With the added key there are as many keys as queries, but the causal mask has one column fewer."""
    _, mine = pair(options={"add_bias_kv": True, "batch_first": True})
    x = self_inputs()
    masks = {"attn_mask": causal_mask(N)[:, :-1], "is_causal": True}
    plain, weighted = (mine(x, x[:, :-1], x[:, :-1], **masks, need_weights=need)[0] for need in (False, True))
    assert_close(plain, weighted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in CAUSAL if "local" not in name])
def test_keys_that_all_queries_see_in_order(name):
    _, mine = (
        pair(name, options={"add_bias_kv": True, "batch_first": True}) if traits(name).bidirectional else (None, None)
    )
    if mine is None:
        return
    x = self_inputs().requires_grad_()
    y, weights = call(mine, x, is_causal=True)
    assert (weights[..., :-1].triu(1) == 0).all() and (weights[..., -1] != 0).all()
    (gradient,) = torch.autograd.grad(y[:, 3].sum(), mine.bias_v)
    assert (gradient != 0).all()


@pytest.mark.parametrize("name", GLOBAL)
def test_dropout_drops_keys_of_a_head_and_keeps_the_mean(name):
    if name == "softmax" or "linformer" in name:
        return
    _, mine = pair(name, options={"dropout": 0.25, "batch_first": True})
    x = self_inputs(batch=1).expand(3000, -1, -1) if name == "elu" else self_inputs()
    _, exact = call(mine.eval(), x, average_attn_weights=False)
    _, dropped = call(mine.train(), x, average_attn_weights=False)
    gone = (dropped == 0).all(-2)
    assert_close(dropped, torch.where(gone.unsqueeze(-2), 0, exact / 0.75))
    assert gone.any() and not gone.all()
    if name == "elu":
        assert_close(dropped.mean(0), exact[0], rtol=0, atol=0.02)
        assert not torch.equal(gone[:, 0], gone[:, 1])


@every_global
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_tensors(name, layout):
    _, mine = pair(name, options={"batch_first": True})
    rows = [torch.randn(n, DIM, dtype=torch.float64) for n in (4, 9, 1)]
    x = torch.nested.nested_tensor(rows, layout=layout)
    y, weights = mine(x, x, x)
    assert weights.shape[:2] == (3, 9)
    for row, result in zip(rows, y.unbind(), strict=True):
        assert_close(result, call(mine, row)[0], rtol=1e-9, atol=1e-12)
    # the sum with the input, which every layer takes
    assert (x + y).is_nested
    if name == "elu":
        with pytest.raises(ValueError, match="no padding"):
            mine(x, x, x, key_padding_mask=torch.zeros(3, 9, dtype=torch.bool))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["softmax", "elu"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_every_nested_key_has_a_value(name, layout):
    _, mine = pair(name, options={"batch_first": True})

    def nested(*lengths):
        rows = [torch.randn(n, DIM, dtype=torch.float64) for n in lengths]
        return torch.nested.nested_tensor(rows, layout=layout)

    with pytest.raises(ValueError, match=r"the keys \[4, 9\] and the values \[9, 4\]"):
        mine(nested(2, 3), nested(4, 9), nested(9, 4))
    with pytest.raises(ValueError, match=r"the queries are \[2\], the keys \[4, 9\]"):
        mine(nested(2), nested(4, 9), nested(4, 9))


@pytest.mark.parametrize("name", ["softmax", "elu"])
@pytest.mark.parametrize("hint", [False, True])
def test_no_tokens_have_a_causal_mask_too(name, hint):
    _, mine = pair(name, options={"batch_first": True})
    x = torch.zeros(BATCH, 0, DIM, dtype=torch.float64)
    y, _ = call(mine, x, attn_mask=torch.zeros(0, 0, dtype=torch.bool), is_causal=hint)
    assert y.shape == x.shape


def test_return_weights_false_has_none():
    mine = TorchMultiheadAttention(DIM, HEADS, inner="elu", return_weights=False)
    x = torch.randn(N, BATCH, DIM)
    y, weights = mine(x, x, x)
    assert weights is None
    mine.return_weights = True
    assert_close(mine(x, x, x)[0], y, rtol=0, atol=0)


@every_causal
def test_copies_keep_their_causal_form(name):
    """It has the module's own weights: copied, moved and trained with them."""
    if not traits(name).bidirectional:
        return
    inner = named_attention(name, num_heads=HEADS, head_dim=DIM // HEADS, window=3, max_length=40)
    mine = TorchMultiheadAttention(DIM, HEADS, batch_first=True, inner=inner)
    for copied in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        copied = copied.double()
        with torch.no_grad():
            for weight in copied.parameters():
                weight.add_(torch.rand_like(weight))
        fresh = pair(name, options={"batch_first": True})[1]
        fresh.load_state_dict(copied.state_dict())
        x = self_inputs()
        assert_close(call(copied, x, is_causal=True), call(fresh, x, is_causal=True))
        # buffers too, such as random features
        assert all(x.dtype == torch.float64 for x in copied.state_dict().values() if x.is_floating_point())


def test_another_inner_attention_is_that_of_causal_calls_too():
    _, mine = pair("elu", options={"batch_first": True})
    _, other = pair("relu", options={"batch_first": True})
    x = self_inputs()
    mine.inner = other.inner
    for copied in (mine, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert_close(call(copied, x, is_causal=True), call(other, x, is_causal=True), rtol=0, atol=0)


@pytest.mark.usefixtures("unchecked")
def test_errors_say_what_would_do():
    _, linear = pair("elu", options={"batch_first": True})
    x = self_inputs()
    with pytest.raises(ValueError, match="hide the same keys from all queries, or be the causal mask"):
        call(linear, x, attn_mask=torch.eye(N, dtype=torch.bool))
    for name, shape in (("key_padding_mask", (BATCH, N)), ("attn_mask", (N, N))):
        with pytest.raises(ValueError, match=f"{name} adds to the scores, which only softmax attention has"):
            call(linear, x, **{name: torch.randn(shape)})
        with pytest.raises(ValueError, match=f"{name} must be bool"):
            call(linear, x, **{name: torch.ones(shape, dtype=torch.long)})
        with pytest.raises(ValueError, match=f"{name} must be"):
            call(linear, x, **{name: torch.zeros(shape[0] + 1, N, dtype=torch.bool)})
        for attention in (linear, pair("softmax", options={"batch_first": True})[1]):
            with pytest.raises(ValueError, match=f"{name} must be a tensor, but is a list"):
                call(attention, x, **{name: [[True] * N] * shape[0]})
            with pytest.raises(ValueError, match=f"query is on cpu and {name} on meta"):
                call(attention, x, **{name: torch.zeros(shape, device="meta")})
    with pytest.raises(ValueError, match="Linformer never can"):
        call(pair("linformer", options={"batch_first": True})[1], x, is_causal=True)
    made = TorchMultiheadAttention(DIM, HEADS, inner=named_attention("elu", num_heads=4, head_dim=6, causal=True))
    for attention in (made, TorchMultiheadAttention(DIM, HEADS, inner=linattn.SoftmaxAttention(causal=True))):
        with pytest.raises(ValueError, match="a query for every key, but there are 9 and 7"):
            attention(*(t.float() for t in inputs()))
    with pytest.raises(ValueError, match="a query for every key"):
        linear(*inputs({"batch_first": True}), is_causal=True)
    with pytest.raises(ValueError, match="keys and values must match"):
        linear(x, x[:, 1:], x)
    for attention in (linear, pair("softmax")[1]):
        with pytest.raises(ValueError, match="keys and values must match"):
            attention(x[0], x[0, 1:], x[0])
    with pytest.raises(ValueError, match="key must have 24 channels, but has 23"):
        linear(x, x[..., 1:], x)
    with pytest.raises(ValueError, match="must be alike"):
        linear(x, x[0], x[0])
    with pytest.raises(ValueError, match="num_heads must divide embed_dim"):
        TorchMultiheadAttention(10, 4, inner="elu")
    with pytest.raises(ValueError, match="'elo'"):
        TorchMultiheadAttention(DIM, HEADS, inner="elo")
    with pytest.raises(TypeError, match="droput"):
        TorchMultiheadAttention(DIM, HEADS, droput=0.1, inner="elu")
    with pytest.raises(TypeError, match="mask"):
        linear(x, x, x, mask=None)


@every_global
def test_cross_attention(name):
    if not traits(name).cross:
        return
    _, mine = pair(name, options={"batch_first": True})
    q, k, v = inputs({"batch_first": True})
    y, weights = mine(q, k, v)
    assert y.shape == (BATCH, N, DIM) and weights.shape[:2] == (BATCH, N)
    # each query on its own
    assert_close(mine(q[:, 3:4], k, v)[0], y[:, 3:4], rtol=1e-9, atol=1e-12)
