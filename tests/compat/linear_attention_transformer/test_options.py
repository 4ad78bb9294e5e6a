"""Every option has its effect, and what is wrong or cannot be is refused."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from linattn.attention import LinformerAttention, LocalAttention
from linattn.compat.linear_attention_transformer import (
    Autopadder,
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
    LinformerContextSettings,
    LinformerSettings,
)
from linattn.nn import Chunked, FeedForward, GatedFeedForward, MultiheadAttention, ReversibleSequence, TokenShift
from tests.compat.constructors import has_window

SIZES = {"dim": 16, "depth": 2, "heads": 4, "max_seq_len": 64}


def lm(**options: Any) -> LinearAttentionTransformerLM:
    torch.manual_seed(0)
    window = {"local_attn_window_size": 8} if has_window(options, lm=True) else {}
    return LinearAttentionTransformerLM(num_tokens=11, **(SIZES | window | options)).double().eval()


def stack(**options: Any) -> LinearAttentionTransformer:
    torch.manual_seed(0)
    window = {"local_attn_window_size": 8} if has_window(options, lm=False) else {}
    return LinearAttentionTransformer(**(SIZES | window | options)).double().eval()


def found(model: nn.Module, kind: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def some_tokens(n: int = 40, b: int = 2) -> Tensor:
    return torch.randint(11, (b, n))


def sees(model: nn.Module, n: int = 40) -> Tensor:
    """(n, n): whether output i depends on input j."""
    x = torch.randn(1, n, 16, dtype=torch.float64, requires_grad=True)
    y = model(x)
    rows = [torch.autograd.grad(y[0, i].sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0 for i in range(n)]
    return torch.stack(rows)


def test_every_option_has_a_test():
    """Of this file, by name."""
    source = inspect.getsource(inspect.getmodule(test_every_option_has_a_test))
    for name in inspect.signature(LinearAttentionTransformerLM).parameters:
        assert f"{name}=" in source or f'"{name}"' in source, name


# without a shape of their own: the same weights give another output
@pytest.mark.parametrize(
    ("base", "option"),
    [
        ({}, {"causal": True}),
        ({"dim_head": 4}, {"heads": 2, "dim_head": 8}),
        ({}, {"n_local_attn_heads": 1}),
        ({"n_local_attn_heads": 1}, {"n_local_attn_heads": (1, 2)}),
        ({"n_local_attn_heads": 2}, {"local_attn_window_size": 16}),
        ({"n_local_attn_heads": 2, "causal": True}, {"blindspot_size": 4}),
        ({}, {"shift_tokens": True}),
        ({}, {"reversible": True}),
        ({"n_local_attn_heads": 2, "use_rotary_emb": True}, {"use_rotary_emb": False}),
    ],
    ids=str,
)
def test_options_without_weights_change_the_output(base, option):
    base = base if "use_rotary_emb" in base else {"use_axial_pos_emb": False} | base
    one, other, x = lm(**base), lm(**(base | option)), some_tokens()
    other.load_state_dict(one.state_dict(), strict="use_rotary_emb" not in base)
    assert not torch.allclose(one(x), other(x))


def test_dim_head_and_heads_are_the_width_of_attention():
    for attention in found(lm(dim_head=5, receives_context=True), MultiheadAttention):
        assert attention.q_proj.out_features == attention.o_proj.in_features == 20
    assert found(lm(), MultiheadAttention)[0].q_proj.out_features == 4 * 64
    assert found(lm(dim_head=None), MultiheadAttention)[0].q_proj.out_features == 16


def test_depth_is_the_number_of_layers():
    assert len(stack(depth=3).stack.branches) == 6
    assert len(stack(depth=3, attend_axially=True, receives_context=True).stack.branches) == 18


def test_emb_dim_and_num_tokens_are_the_embeddings():
    model = lm(emb_dim=6)
    assert model.embedding.weight.shape == (11, 6) and model.head.weight.shape == (11, 6)
    assert model(some_tokens()).shape == (2, 40, 11)


@pytest.mark.parametrize("emb_dim", [None, 6])
def test_return_embeddings_has_the_width_of_the_stack(emb_dim):
    """For a decoder of the same dim, factorised or not."""
    assert lm(emb_dim=emb_dim, return_embeddings=True)(some_tokens()).shape == (2, 40, 16)


def test_ff_glu_is_for_every_feed_forward():
    options = {"attend_axially": True, "receives_context": True}
    assert len(found(stack(ff_glu=True, **options), GatedFeedForward)) == 6
    assert len(found(stack(**options), FeedForward)) == 6


def test_ff_dropout_is_in_every_feed_forward():
    model = stack(ff_dropout=0.5, attend_axially=True).train()
    seen: list[Tensor] = []
    for module in found(model, FeedForward):
        module.down_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0] == 0))
    model(torch.randn(2, 40, 16, dtype=torch.float64))
    assert len(seen) == 4 and all(0.4 < zeros.double().mean() < 0.6 for zeros in seen)


def test_attention_dropouts_are_before_and_after_its_last_projection():
    model = stack(attn_dropout=0.5, attn_layer_dropout=0.9, n_local_attn_heads=2).train()
    before, after = [], []
    for module in found(model, MultiheadAttention):
        module.o_proj.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0] == 0))
        module.register_forward_hook(lambda module, inputs, output: after.append(output == 0))
    model(torch.randn(2, 40, 16, dtype=torch.float64))
    assert all(0.4 < zeros.double().mean() < 0.6 for zeros in before)
    assert all(0.8 < zeros.double().mean() < 0.97 for zeros in after)
    assert len(before) == len(after) == 2


def test_ff_chunks_are_pieces_of_the_sequence():
    model, pieces = lm(ff_chunks=4), []
    for module in found(model, Chunked):
        module.module.register_forward_pre_hook(lambda module, inputs: pieces.append(inputs[0].shape[1]))
    with torch.no_grad():
        model(some_tokens())
    assert pieces == [10] * 8


def test_reversible_saves_no_activations():
    """For backward, whatever the depth; the numbers are those of the two streams' mean."""

    def saved(depth: int, reversible: bool) -> int:
        model, sizes = stack(depth=depth, reversible=reversible), []
        weights = {p.data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(0 if x.data_ptr() in weights else x.numel()), lambda x: x
        ):
            model(torch.randn(2, 40, 16, dtype=torch.float64))
        return sum(sizes)

    assert saved(1, True) == saved(4, True) < saved(1, False) < saved(4, False) / 3
    assert len(found(stack(reversible=True), ReversibleSequence)) == 1


def test_local_heads_see_their_window_and_others_everything():
    near = sees(stack(n_local_attn_heads=4, depth=1, local_attn_window_size=8))
    i, j = torch.arange(40)[:, None], torch.arange(40)
    assert torch.equal(near, (i // 8 - j // 8).abs() <= 1)
    assert sees(stack(n_local_attn_heads=3, depth=1)).all()


def test_local_heads_come_first_and_each_layer_has_its_own():
    inners = [attention.inner for attention in found(stack(n_local_attn_heads=(1, 4)), MultiheadAttention)]
    assert inners[0].heads == (1, 3) and isinstance(inners[0].parts[0], LocalAttention)
    assert isinstance(inners[1], LocalAttention)


def test_with_a_blindspot_every_token_sees_its_whole_past():
    """Its own block through the local heads."""
    model = stack(blindspot_size=8, n_local_attn_heads=1, depth=1, causal=True)
    assert torch.equal(sees(model), torch.ones(40, 40).tril().bool())


def test_attend_axially_sees_the_column():
    model = stack(attend_axially=True, depth=1, n_local_attn_heads=4, local_attn_window_size=8)
    i, j = torch.arange(40)[:, None], torch.arange(40)
    # columns of what the local heads saw
    near = ((i // 8 - j // 8).abs() <= 1).double()
    column = (i % 8 == j % 8).double()
    assert torch.equal(sees(model), column @ near > 0)


def test_shift_tokens_shifts_before_attention_and_feed_forward():
    causal, every = stack(shift_tokens=True, causal=True), stack(shift_tokens=True)
    assert [shift.offsets for shift in found(causal, TokenShift)] == [(1, 0)] * 4
    assert [shift.offsets for shift in found(every, TokenShift)] == [(1, 0, -1)] * 4


def test_linformer_settings_are_of_the_global_heads():
    model = lm(linformer_settings=LinformerSettings(k=5), n_local_attn_heads=1)
    (first, _) = found(model, LinformerAttention)
    assert first.key_projection.weight.shape == first.value_projection.weight.shape == (5, 64)


def test_context_linformer_settings_are_of_the_context():
    settings = LinformerContextSettings(seq_len=20, k=5)
    model = lm(causal=True, receives_context=True, context_linformer_settings=settings)
    assert [inner.key_projection.weight.shape for inner in found(model, LinformerAttention)] == [(5, 20)] * 2
    with pytest.raises(ValueError, match="at most 20 keys, but there are 21"):
        model(some_tokens(), context=torch.randn(2, 21, 16, dtype=torch.float64))


def test_receives_context_reads_it():
    model, x = lm(receives_context=True, causal=True), some_tokens()
    one, other = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    assert not torch.allclose(model(x, context=one), model(x, context=other))
    hidden = other.clone()
    hidden[:, 3:] = one[:, 3:]
    mask = torch.arange(9).expand(2, 9) >= 3
    assert_close(model(x, context=hidden, context_mask=mask), model(x, context=one, context_mask=mask))


@pytest.mark.parametrize("axial", [True, False])
@pytest.mark.parametrize("longest", [64, 50])
def test_max_seq_len_is_where_positions_end(axial, longest):
    """A grid of windows may be larger: its other positions are never trained."""
    model = lm(use_axial_pos_emb=axial, max_seq_len=longest, causal=True)
    model(some_tokens(longest))
    with pytest.raises(ValueError, match=f"positions end at {longest}"):
        model(some_tokens(longest + 1))
    _, state = model.extend(some_tokens(longest - 1))
    with pytest.raises(ValueError, match=rf"positions must be in \[0, {longest}\)"):
        model.extend(some_tokens(2), state)
    tables = [tuple(table.shape) for table in model.positions.parameters()]
    assert tables == ([(-(-longest // 8), 16), (8, 16)] if axial else [(longest, 16)])


@pytest.mark.parametrize("axial", [True, False])
def test_each_table_of_positions_begins_as_large_as_an_embedding(axial):
    model = lm(use_axial_pos_emb=axial, emb_dim=256)
    for table in (*model.positions.parameters(), model.embedding.weight):
        assert table.std().item() == pytest.approx(1, rel=0.1)


def test_with_rotary_positions_there_is_no_longest_length():
    model = lm(use_rotary_emb=True, n_local_attn_heads=2, causal=True)
    assert model.max_length is None
    assert torch.isfinite(model(some_tokens(200))).all()


def test_rotary_positions_are_relative():
    """Tokens that begin anywhere attend alike; theirs differ by a fifth in the linear heads."""
    model = stack(rotary=True, n_local_attn_heads=2, depth=1, causal=True, local_attn_window_size=8)
    x = torch.randn(1, 16, 16, dtype=torch.float64)
    _, state = model.extend(x[:, :0])
    attention = state[0].module
    local, *others = attention.inner
    moved = local._replace(position=local.position + 8_000)
    later = (state[0]._replace(module=attention._replace(inner=(moved, *others))), *state[1:])
    assert_close(model.extend(x, later)[0], model(x), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(stack(n_local_attn_heads=2, depth=1, causal=True)(x), model(x))


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("n", [1, 39, 40, 41])
def test_automatic_padding_has_no_effect(pad_left, n):
    """On the numbers; the net sees a multiple of the window and the blindspot."""
    options = {"causal": True, "blindspot_size": 6, "n_local_attn_heads": 2, "shift_tokens": True}
    for net, x in ((lm(**options), some_tokens(n)), (stack(**options), torch.randn(2, n, 16, dtype=torch.float64))):
        lengths: list[int] = []
        net.register_forward_pre_hook(lambda net, inputs, lengths=lengths: lengths.append(inputs[0].shape[1]))
        padder = Autopadder(net, pad_left=pad_left)
        mask = torch.rand(2, n) < 0.8
        assert_close(padder(x), net(x))
        assert_close(padder(x, input_mask=mask)[mask], net(x, input_mask=mask)[mask])
        assert padder.pad_to == 24 and lengths[0] % 24 == 0 and lengths[1] == n


@pytest.mark.parametrize("n", [16, 17, 39, 40])
def test_automatic_padding_ends_at_the_longest_sequence(n):
    """Linformer's projections have no weights for padding beyond it."""
    options = {"max_seq_len": 40, "n_local_attn_heads": 2, "local_attn_window_size": 16}
    for net, x in (
        (lm(linformer_settings=LinformerSettings(4), **options), some_tokens(n)),
        (stack(linformer_settings=LinformerSettings(4), **options), torch.randn(2, n, 16, dtype=torch.float64)),
    ):
        assert_close(Autopadder(net)(x), net(x))


@pytest.mark.usefixtures("unchecked")
def test_a_padder_refuses_what_its_net_would():
    padder, x = Autopadder(lm(n_local_attn_heads=1, local_attn_window_size=8)), some_tokens()
    with pytest.raises(ValueError, match=r"x must be \(b, n\) or \(b, n, d\), but is \(39,\)"):
        padder(x[0, :39])
    for mask in (torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 39, dtype=torch.long), [True]):
        with pytest.raises(ValueError, match="key_mask must be"):
            padder(x[:, :39], mask)
    with pytest.raises(ValueError, match="net must be a model of this package, but is a Linear"):
        Autopadder(torch.nn.Linear(2, 2))


REFUSED = [
    ({"causal": True, "linformer_settings": LinformerSettings(k=5)}, "need causal=False"),
    ({"n_local_attn_heads": (1, 2, 3)}, "a number for 3 layers, but depth is 2"),
    ({"n_local_attn_heads": 5}, "from 0 to heads, 4, but is"),
    ({"blindspot_size": 4}, "needs causal=True"),
    ({"blindspot_size": 0, "causal": True}, "at least 1, but is 0"),
    ({"blindspot_size": 4, "causal": True}, "only local heads see a token's own block of 4"),
    ({"blindspot_size": 9, "causal": True, "n_local_attn_heads": 2}, "a local_attn_window_size of at least 9"),
    ({"linformer_settings": LinformerSettings(k=65)}, "projected_length must be at most max_length"),
    ({"linformer_settings": 5}, r"linformer_settings must be LinformerSettings\(k\), but is 5"),
    ({"linformer_settings": (5, 5)}, r"must be LinformerSettings\(k\), but is \(5, 5\)"),
    (
        {"receives_context": True, "context_linformer_settings": LinformerSettings(k=5)},
        r"must be LinformerContextSettings\(seq_len, k\), but is LinformerSettings\(k=5\)",
    ),
    ({"ff_chunks": 0}, "ff_chunks must be a whole number of at least 1"),
    ({"dim_head": None, "heads": 3}, "heads must divide dim, or dim_head be given, but they are 3 and 16"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lm(**options)


@pytest.mark.parametrize("name", ["pkm_layers", "pkm_num_keys", "bucket_size", "n_local_heads"])
def test_unknown_options_are_refused(name):
    with pytest.raises(TypeError, match=name):
        lm(**{name: 1})


def test_a_context_must_be_wanted_and_there():
    context, mask = torch.randn(2, 9, 16, dtype=torch.float64), torch.ones(2, 9, dtype=torch.bool)
    for model, x in ((lm, some_tokens()), (stack, torch.randn(2, 40, 16, dtype=torch.float64))):
        with pytest.raises(ValueError, match="nothing attends to it"):
            model()(x, context=context)
        with pytest.raises(ValueError, match="context_mask is of a context"):
            model(receives_context=True)(x, context_mask=mask)
        with pytest.raises(ValueError, match="needs its context"):
            model(receives_context=True)(x)
