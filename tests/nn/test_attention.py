import inspect
import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.attention.named import named_attention
from linattn.attention.softmax import SoftmaxAttention
from linattn.nn import MultiheadAttention
from linattn.ops.nested import map_state

DIM, HEADS = 24, 4
OPTIONS = {
    "plain": {},
    "grouped keys": {"num_key_heads": 2},
    "own head width": {"head_dim": 10, "bias": True},
    "narrow keys": {"key_dim": 4, "num_key_heads": 2},
    "rotary": {"rotary": 100.0},
    "convolution": {"convolution": 4},
    "norm and gate": {"head_norm": True, "gate": True},
    "convolution on projections": {"convolution": 4, "convolution_on": "projections", "key_dim": 4},
    "induction": {"convolution": 3, "convolution_on": "projections", "induction": True, "bias": True},
    "of kimi": {"unit_keys": True, "gate": True, "gate_function": "sigmoid"},
    "of mamba": {"num_key_heads": 2, "value_skip": True, "gate": True, "gated_norm": True},
    "all": {"num_key_heads": 2, "rotary": 100.0, "convolution": 3, "head_norm": True, "gate": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
every_inner = pytest.mark.parametrize("name", ["softmax", "elu", "local+elu", "ssd", "kda", "local+gated_delta"])


def attention(name: str = "elu", *, causal: bool = True, **options) -> MultiheadAttention:
    head_dim = options.get("key_dim") or options.get("head_dim") or DIM // HEADS
    key_heads = options.get("num_key_heads")
    inner = named_attention(
        name, num_heads=HEADS, head_dim=head_dim, num_key_heads=key_heads, causal=causal, window=5, max_length=100
    )
    return MultiheadAttention(DIM, HEADS, inner, **options).double().eval()


def some_inputs(b: int = 2, n: int = 33, dim: int = DIM) -> torch.Tensor:
    return torch.randn(b, n, dim, dtype=torch.float64)


def torchs(module: MultiheadAttention) -> nn.MultiheadAttention:
    """torch's module with the same weights."""
    projections = (module.q_proj, module.k_proj, module.v_proj)
    context_dim = module.k_proj.in_features
    twin = nn.MultiheadAttention(DIM, HEADS, kdim=context_dim, vdim=context_dim, batch_first=True).double().eval()
    with torch.no_grad():
        if context_dim == DIM:
            twin.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        else:
            for name, projection in zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), projections, strict=True):
                getattr(twin, name).copy_(projection.weight)
        twin.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
        twin.out_proj.weight.copy_(module.o_proj.weight)
        twin.out_proj.bias.copy_(module.o_proj.bias)
    return twin


@pytest.mark.parametrize("masked", [False, True])
def test_with_softmax_is_torchs_self_attention(masked):
    module, x = attention("softmax", causal=False, bias=True), some_inputs()
    mask = torch.rand(2, 33) < 0.5 if masked else None
    expected, _ = torchs(module)(x, x, x, key_padding_mask=None if mask is None else ~mask)
    assert_close(module(x, key_mask=mask), expected)


def test_with_softmax_is_torchs_causal_attention():
    module, x = attention("softmax", bias=True), some_inputs()
    future = torch.ones(33, 33, dtype=torch.bool).triu(1)
    assert_close(module(x), torchs(module)(x, x, x, attn_mask=future)[0])


@pytest.mark.parametrize("context_dim", [DIM, 10])
@pytest.mark.parametrize("masked", [False, True])
def test_with_softmax_is_torchs_cross_attention(masked, context_dim):
    module = attention("softmax", causal=False, bias=True, context_dim=context_dim)
    x, context = some_inputs(n=7), some_inputs(n=19, dim=context_dim)
    mask = torch.rand(2, 19) < 0.5 if masked else None
    expected, _ = torchs(module)(x, context, context, key_padding_mask=None if mask is None else ~mask)
    assert_close(module(x, context, key_mask=mask), expected)


@pytest.mark.parametrize("name", ["softmax", "elu", "taylor", "hedgehog", "linformer"])
def test_in_cross_attention_a_masked_token_is_a_missing_token(name):
    module, x, context = attention(name, causal=False), some_inputs(n=7), some_inputs(n=19)
    mask = torch.rand(2, 19) < 0.5
    y = module(x, context, key_mask=mask)
    for row in range(2):
        assert_close(y[row], module(x[row : row + 1], context[row, mask[row]].unsqueeze(0))[0])


@every_inner
@every_option
def test_pieces_make_the_whole(name, options):
    module, x = attention(name, **options), some_inputs()
    state, pieces = None, []
    for piece in x.split((10, 0, 1, 1, 21), dim=1):
        y, state = module.extend(piece, state)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), module(x))


@every_inner
@every_option
def test_a_masked_token_is_a_missing_token(name, options):
    """Two rows with tokens missing on the right, two on the left, two with holes."""
    module, x = attention(name, **options), some_inputs(b=6)
    places = torch.arange(33).expand(2, 33)
    mask = torch.cat(
        [places < torch.tensor([[30], [1]]), places >= torch.tensor([[32], [16]]), torch.rand(2, 33) < 0.6]
    )
    whole = module(x, key_mask=mask)
    first, state = module.extend(x[:, :14], key_mask=mask[:, :14])
    second, state = module.extend(x[:, 14:], state, key_mask=mask[:, 14:])
    next_x = some_inputs(b=6, n=2)
    third, _ = module.extend(next_x, state)
    for row in range(6):
        alone = module(torch.cat([x[row, mask[row]], next_x[row]]).unsqueeze(0))[0]
        assert_close(whole[row, mask[row]], alone[:-2])
        assert_close(torch.cat([first, second], 1)[row, mask[row]], alone[:-2])
        assert_close(third[row], alone[-2:])


@every_option
@pytest.mark.parametrize("name", ["softmax", "elu", "local+elu"])
def test_not_causal_masked_tokens_are_missing_too(name, options):
    module, x = attention(name, causal=False, **options), some_inputs(b=3)
    mask = torch.rand(3, 33) < 0.6
    y = module(x, key_mask=mask)
    for row in range(3):
        assert_close(y[row, mask[row]], module(x[row, mask[row]].unsqueeze(0))[0])


def test_consecutive_query_heads_share_a_key_head():
    grouped, full = attention("elu", num_key_heads=2), attention("elu")
    weights = dict(grouped.named_parameters())
    for name in ("k_proj.weight", "v_proj.weight"):
        weights[name] = weights[name].unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    x = some_inputs()
    assert_close(full(x), grouped(x))


def test_rotary_knows_only_distances():
    """Tokens that nothing precedes may stand anywhere."""
    module, x = attention("softmax", rotary=100.0), some_inputs()
    _, state = module.extend(x[:, :0])
    later = state._replace(position=state.position + 1000)
    assert_close(module.extend(x, later)[0], module(x), rtol=1e-9, atol=1e-9)


def test_heads_may_be_spread_over_ranks():
    """A rank with the rows of half the heads gives half the sum, as tensor parallel needs."""
    whole, x = attention("elu", rotary=100.0, gate=True, head_norm=True), some_inputs()
    parts = []
    for rows in torch.arange(DIM).chunk(2):
        part = attention("elu", rotary=100.0, gate=True, head_norm=True)
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            getattr(part, name).weight = nn.Parameter(getattr(whole, name).weight[rows])
        part.o_proj.weight = nn.Parameter(whole.o_proj.weight[:, rows])
        parts.append(part(x))
    assert_close(parts[0] + parts[1], whole(x))


def test_the_norm_makes_heads_of_length_one():
    module, x = attention("linear_unnormalized", head_norm=True, head_norm_eps=0.0), some_inputs()
    heads = []
    module.o_proj.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0].unflatten(-1, (HEADS, -1))))
    module(x)
    assert_close(heads[0].square().mean(-1), torch.ones(2, 33, HEADS, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def outputs_of_heads(module: MultiheadAttention, x: torch.Tensor) -> torch.Tensor:
    """Return what goes into the last projection."""
    seen = []
    hook = module.o_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    module(x)
    hook.remove()
    return seen[0]


def test_unit_keys_have_no_lengths():
    module, x = attention("linear_unnormalized", unit_keys=True), some_inputs()
    y = module(x)
    with torch.no_grad():
        module.q_proj.weight.mul_(3)
        module.k_proj.weight.mul_(5)
    assert_close(module(x), y)


def test_the_skip_adds_values():
    module, x = attention("elu", num_key_heads=2, value_skip=True), some_inputs()
    with torch.no_grad():
        module.value_skip.copy_(torch.arange(1.0, 5.0))
    v = module.v_proj(x).unflatten(-1, (2, -1)).repeat_interleave(2, 2)
    expected = torch.arange(1.0, 5.0, dtype=torch.float64)[:, None] * v
    with_skip, module.value_skip = outputs_of_heads(module, x), None
    assert_close(with_skip - outputs_of_heads(module, x), expected.flatten(2))


def test_the_norm_after_the_gate_is_of_all_heads():
    options = {"gate": True, "gate_function": "sigmoid"}
    plain, normed = attention("elu", **options), attention("elu", **options, gated_norm=True, head_norm_eps=0.0)
    plain.load_state_dict(normed.state_dict(), strict=False)
    x = some_inputs()
    y = outputs_of_heads(plain, x)
    assert_close(outputs_of_heads(normed, x), y / y.square().mean(-1, keepdim=True).sqrt())


@pytest.mark.parametrize("name", ["silu", "sigmoid"])
def test_the_gate_multiplies(name):
    module, x = attention("elu", gate=True, gate_function=name), some_inputs()
    gated, z, module.g_proj = outputs_of_heads(module, x), module.g_proj(x), None
    assert_close(gated, getattr(nn.functional, name)(z) * outputs_of_heads(module, x))


def test_convolutions_on_projections_are_followed_by_silu():
    module, x = attention("elu", convolution=4, convolution_on="projections", num_key_heads=2), some_inputs()
    plain = attention("elu", num_key_heads=2)
    plain.o_proj = module.o_proj
    for name, convolution in zip("qkv", module.convolution.parts, strict=True):
        mixed = nn.functional.silu(convolution(getattr(module, f"{name}_proj")(x)))
        # a projection that gives these numbers, whatever its input
        setattr(plain, f"{name}_proj", type("Given", (nn.Module,), {"forward": lambda self, x, y=mixed: y})())
    assert_close(module(x), plain(x))


@pytest.mark.parametrize("options", [{}, {"bias": True, "key_dim": 3, "convolution": 2}])
def test_a_new_induction_head_finds_what_followed(options):
    """A token's key is the query of the token before, by the same matrices, and its value is its own."""
    options = {"convolution": 4, "convolution_on": "projections", "induction": True, "bias": True} | options
    module, seen = attention("elu", **options), []
    module.inner.forward = lambda q, k, v, **_: seen.extend((q, k, v)) or v
    module(x := some_inputs())
    q, k, v = seen
    assert_close(k[:, :, 1:], q[:, :, :-1])
    assert not k[:, :, 0].any()
    assert_close(v.transpose(1, 2).flatten(2), nn.functional.silu(module.v_proj(x)))
    # the query is of all tokens that the key of the next one sees
    x[:, -options["convolution"]] += 1
    module(x)
    assert torch.equal(seen[3][:, :, -1], q[:, :, -1]) and not torch.isclose(seen[3][:, :, -2], q[:, :, -2]).any()


def test_an_induction_head_learns_keys_of_its_own():
    module = attention("elu", convolution=4, convolution_on="projections", induction=True)
    module(some_inputs()).square().sum().backward()
    assert not torch.allclose(module.q_proj.weight.grad, module.k_proj.weight.grad)


def test_the_limit_of_the_write_strength():
    once, twice = attention("delta"), attention("delta", beta_limit=2.0)
    twice.load_state_dict(once.state_dict())
    x = some_inputs()
    assert_close(twice.gates(x).beta, 2 * once.gates(x).beta)
    assert not torch.allclose(twice(x), once(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"convolution": 3, "convolution_on": "outputs"}, "convolution_on must be one of inputs, projections"),
        ({"beta_limit": 2.0}, "beta_limit is of attentions with the delta rule"),
        ({"induction": True}, "induction needs a convolution on projections over two tokens .* of 0 on inputs"),
        ({"induction": True, "convolution": 4}, "a convolution of 4 on inputs"),
        ({"induction": True, "convolution": 1, "convolution_on": "projections"}, "a convolution of 1 on projections"),
        (
            {"induction": True, "convolution": 2, "convolution_on": "projections", "num_key_heads": 2},
            "2 key heads for 4 query heads, and 1 writes",
        ),
        ({"gate": True, "gate_function": "relu"}, "gate_function must be one of silu, sigmoid"),
    ],
)
def test_unknown_options(options, message):
    with pytest.raises(ValueError, match=message):
        attention(**options)


def test_dropout_is_on_the_output_in_training():
    module, x = attention("elu", dropout=0.5), some_inputs()
    y = module(x)
    dropped = module.train()(x)
    kept = dropped != 0
    assert 0.3 < kept.double().mean() < 0.7
    assert_close(dropped[kept], 2 * y[kept])


def test_hidden_dropout_is_on_the_heads_outputs_in_training():
    module, seen = attention("elu", hidden_dropout=0.5), []
    module.o_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0] == 0))
    module(some_inputs())
    module.train()(some_inputs())
    assert not seen[0].any() and 0.3 < seen[1].double().mean() < 0.7


@every_option
def test_gradients_reach_inputs_and_every_parameter(options):
    module, x = attention("local+elu", **options).train(), some_inputs().requires_grad_()
    module(x).square().sum().backward()
    assert x.grad.count_nonzero(dim=-1).all()
    for name, parameter in module.named_parameters():
        assert parameter.grad.count_nonzero() > 0, name


def test_states_are_values():
    module, x = attention("local+elu", rotary=100.0, convolution=4), some_inputs(n=9)
    _, state = module.extend(x)
    copies = map_state(torch.clone, state)
    module.extend(x, state)
    kept: list[torch.Tensor] = []
    map_state(kept.append, state)
    found: list[torch.Tensor] = []
    map_state(found.append, copies)
    assert kept and all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_key_heads": 3}, "num_key_heads must divide num_heads, but they are 3 and 4"),
        ({"context_dim": 10}, "must not be causal"),
        ({"gate_function": "sigmoid"}, "gate_function is 'sigmoid', but gate is false: there is none"),
        ({"convolution_on": "projections"}, "convolution_on is 'projections', but convolution is 0: there is none"),
        ({"convolution_on": "outputs"}, "convolution_on must be one of inputs, projections, but is 'outputs'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    inner = named_attention("elu", num_heads=HEADS, head_dim=DIM // HEADS, causal=True)
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(DIM, HEADS, inner, **options)


def test_heads_must_divide_the_width():
    inner = named_attention("elu", num_heads=5, head_dim=4)
    with pytest.raises(ValueError, match="num_heads must divide dim, or head_dim be given, but they are 5 and 24"):
        MultiheadAttention(DIM, 5, inner)


def test_cross_attention_is_not_causal_and_has_no_neighbours():
    x, context = some_inputs(n=7), some_inputs(n=19)
    with pytest.raises(ValueError, match="must not be causal"):
        attention("elu")(x, context)
    for options in ({"convolution": 3}, {"rotary": 100.0}):
        with pytest.raises(ValueError, match=r"convolution, rotary, .* belong to self attention"):
            attention("elu", causal=False, **options)(x, context)
    for name in ("local", "roformer", "local+elu"):
        with pytest.raises(ValueError, match="is self attention: cross attention has keys of other tokens"):
            attention(name, causal=False, context_dim=10)
        with pytest.raises(ValueError, match="is self attention: cross attention has keys of other tokens"):
            attention(name, causal=False)(x, some_inputs(n=7))
    with pytest.raises(ValueError, match="needs its context"):
        attention("elu", causal=False, context_dim=10)(x)


def test_what_is_not_causal_cannot_be_extended():
    with pytest.raises(NotImplementedError, match="not causal"):
        attention("softmax", causal=False).extend(some_inputs())


def test_keys_may_have_other_channels_than_values():
    module = attention("taylor2", key_dim=4)
    assert module.q_proj.out_features == module.k_proj.out_features == 4 * HEADS
    assert module.v_proj.out_features == module.o_proj.in_features == DIM
    context = MultiheadAttention(DIM, HEADS, named_attention("elu", num_heads=HEADS, head_dim=4), key_dim=4)
    assert context(torch.randn(2, 7, DIM), torch.randn(2, 9, DIM)).shape == (2, 7, DIM)


def test_the_output_may_have_a_bias_of_its_own():
    def biases(**options: bool) -> list[bool]:
        attention = MultiheadAttention(8, 2, SoftmaxAttention(), **options)
        return [part.bias is not None for part in (attention.q_proj, attention.k_proj, attention.o_proj)]

    assert biases() == [False, False, False] and biases(bias=True) == [True, True, True]
    assert biases(out_bias=True) == [False, False, True] and biases(bias=True, out_bias=False) == [True, True, False]


def test_every_argument_has_a_line_of_the_docstring_in_the_same_order():
    lines = re.findall(r"^ +- `(\w+)`: .+$", MultiheadAttention.__doc__ or "", re.MULTILINE)
    assert lines == [*inspect.signature(MultiheadAttention).parameters]
