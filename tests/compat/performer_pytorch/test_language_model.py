"""`PerformerLM`: their logits where they are right, the laws, and every option that `Performer` has not."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn import generate
from linattn.compat.performer_pytorch import PerformerLM
from linattn.nn import AxialPositions, LearnedPositions, SinusoidalPositions
from tests.compat.performer_pytorch.original import original, take_linear, take_performer

SIZE = {"num_tokens": 19, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
AXIAL = {"rotary_position_emb": False, "axial_position_emb": True, "axial_position_shape": (8, 8)}
SAME = {
    "rotary": {},
    "learned": {"rotary_position_emb": False},
    "axial": AXIAL,
    "tied": {"tie_embed": True},
    "biases": {"qkv_bias": True, "attn_out_bias": True},
    "causal": {"causal": True, "generalized_attention": True, "shift_tokens": True},
    "reversible": {"reversible": True, "ff_glu": True, "use_scalenorm": True},
    "cross": {"cross_attend": True, "causal": True, "no_projection": True},
}


def make(**options: Any) -> PerformerLM:
    return PerformerLM(**SIZE | options).double().eval()


def tokens(n: int) -> Tensor:
    return torch.randint(19, (2, n))


def context(options: dict[str, Any]) -> dict[str, Tensor]:
    return {"context": torch.randn(2, 11, 32, dtype=torch.float64)} if options.get("cross_attend") else {}


@torch.no_grad()
def theirs(ours: PerformerLM, options: dict[str, Any]) -> torch.nn.Module:
    there = original.PerformerLM(**SIZE | options).double().eval()
    there.token_emb.load_state_dict(ours.embedding.state_dict())
    there.norm.load_state_dict(ours.norm.state_dict())
    positions = ours.positions
    if isinstance(positions, LearnedPositions):
        there.pos_emb.emb.weight.copy_(positions.weight)
    if isinstance(positions, AxialPositions):
        for table, weight in zip(there.pos_emb.weights, positions.weights, strict=True):
            table.copy_(weight.view_as(table))
    if there.to_out is not None:
        take_linear(there.to_out, ours.head)
    rotary = isinstance(positions, SinusoidalPositions)
    take_performer(there.performer, ours.performer, rotary)
    return there


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("n", [1, 33, 64])
def test_their_logits(name, n):
    options = SAME[name]
    model, x, given = make(**options), tokens(n), context(options)
    there = theirs(model, options)
    # their sinusoids are float32
    tolerance = 1e-4 if isinstance(model.positions, SinusoidalPositions) else 1e-9
    close = {"rtol": tolerance, "atol": tolerance}
    assert_close(model(x, **given), there(x, **given), **close)
    encodings = there(x, return_encodings=True, **given)
    assert_close(model(x, return_encodings=True, **given), encodings, **close)


@pytest.mark.parametrize("options", [{}, {"local_attn_heads": (1, 2), "local_window_size": 5, "reversible": True}])
def test_generate_takes_it(options):
    model, prompts = make(causal=True, **options), [[1, 2, 3, 4], [5], [6, 7]]
    written = generate(model, prompts, max_new_tokens=6)
    for prompt, new in zip(prompts, written, strict=True):
        row = list(prompt)
        for token in new:
            assert model(torch.tensor([row]))[0, -1].argmax() == token
            row.append(token)


def test_training_goes_on_where_the_example_stops():
    model = PerformerLM(**SIZE, causal=True, reversible=True, local_attn_heads=1, emb_dropout=0.1, ff_dropout=0.1)
    optimizer, x = torch.optim.Adam(model.parameters(), lr=1e-2), torch.arange(30).remainder(5).expand(2, 30)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[:, :-1]).mT, x[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


class TestOptions:
    def output(self, **options: Any) -> Tensor:
        torch.manual_seed(0)
        return make(**options)(torch.arange(30).remainder(19).unsqueeze(0))

    @pytest.mark.parametrize(
        "options",
        [
            {"rotary_position_emb": False},
            AXIAL,
            AXIAL | {"axial_position_shape": (16, 4)},
            {"tie_embed": True},
            {"qkv_bias": True},
            {"attn_out_bias": True},
            {"causal": True},
            {"local_attn_heads": 2},
            {"ff_mult": 2},
            {"nb_features": 9},
            {"reversible": True},
            {"ff_glu": True},
            {"generalized_attention": True},
            {"use_scalenorm": True},
            {"use_rezero": True},
            {"no_projection": True},
            {"shift_tokens": True},
            {"ortho_scaling": 1},
            {"softmax_epsilon": 0.1},
            {"dim_head": 4},
        ],
        ids=str,
    )
    def test_has_an_effect(self, options):
        assert not torch.allclose(self.output(**options), self.output())

    def test_options_of_others_have_an_effect(self):
        relu = {"generalized_attention": True}
        assert not torch.allclose(self.output(**relu, kernel_fn=torch.sigmoid), self.output(**relu))
        assert not torch.allclose(self.output(**relu, kernel_epsilon=1.0), self.output(**relu))
        local = {"local_attn_heads": 4}
        assert not torch.allclose(self.output(**local, local_window_size=4), self.output(**local))

    @pytest.mark.parametrize("name", ["emb_dropout", "ff_dropout", "attn_dropout"])
    def test_dropout_acts_in_training_only(self, name):
        model, x = make(**{name: 0.5}, feature_redraw_interval=None), tokens(9)
        assert torch.equal(model(x), model(x))
        model.train()
        assert not torch.allclose(model(x), model(x))

    def test_axial_positions_are_64_wide_unless_said_otherwise(self):
        model = make(max_seq_len=130, rotary_position_emb=False, axial_position_emb=True)
        assert model.positions.shape == (3, 64)
        assert model(torch.zeros(1, 130, dtype=torch.long)).shape == (1, 130, 19)

    @pytest.mark.parametrize("shape", [(8, 8), (4, 4, 4)])
    def test_each_axis_of_positions_begins_as_large_as_an_embedding(self, shape):
        model = make(dim=256, **(AXIAL | {"axial_position_shape": shape}))
        for table in (*model.positions.weights, model.embedding.weight):
            assert table.std().item() == pytest.approx(1, rel=0.1)

    def test_tied_embeddings_are_one_weight(self):
        assert not any("head" in name for name, _ in make(tie_embed=True).named_parameters())
        assert "head.weight" in dict(make().named_parameters())

    def test_chunks_change_nothing(self):
        chunked, whole = make(ff_chunks=3), make()
        state = {name.replace("module.module.", "module."): t for name, t in chunked.state_dict().items()}
        whole.load_state_dict(state)
        x = tokens(20)
        assert_close(chunked(x), whole(x))

    def test_cross_attend(self):
        model, x = make(cross_attend=True), tokens(5)
        first, second = torch.randn(2, 2, 7, 32, dtype=torch.float64)
        assert not torch.allclose(model(x, context=first), model(x, context=second))


class TestRedrawing:
    def rows(self, model: PerformerLM) -> Tensor:
        return torch.stack([t for name, t in model.state_dict().items() if name.endswith("rows")])

    @pytest.mark.parametrize("auto", [True, False])
    def test_check_redraw_projections(self, auto):
        """Theirs is an AttributeError: Performer has no method of that name."""
        model, changed = make(feature_redraw_interval=2, auto_check_redraw=auto).train(), []
        for _ in range(5):
            before = self.rows(model)
            if not auto:
                model.check_redraw_projections()
            model(tokens(5)).sum().backward()
            changed.append(not torch.equal(self.rows(model), before))
        assert changed == [False, False, True, False, True]

    @pytest.mark.parametrize("masked", [False, True])
    def test_a_mask_counts_no_step_twice(self, masked):
        model = make(feature_redraw_interval=9, causal=True).train()
        model(tokens(5), mask=torch.ones(2, 5, dtype=torch.bool) if masked else None)
        assert model.performer.proj_updater.calls_since_last_redraw == 1

    def test_fix_projection_matrices_(self):
        model = make(feature_redraw_interval=1).train()
        model.fix_projection_matrices_()
        before = self.rows(model)
        for _ in range(3):
            model(tokens(5))
        assert torch.equal(self.rows(model), before)

    def test_generating_counts_no_steps(self):
        model = make(feature_redraw_interval=1, causal=True).train()
        before = self.rows(model)
        generate(model, [[1, 2]], max_new_tokens=4)
        assert torch.equal(self.rows(model), before) and model.training

    def test_p9_nothing_is_saved_twice(self):
        pointers = [tensor.data_ptr() for tensor in make(causal=True).state_dict(keep_vars=True).values()]
        assert len(set(pointers)) == len(pointers)


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    def test_too_long(self):
        for options in ({}, {"rotary_position_emb": False}, AXIAL):
            with pytest.raises(ValueError, match="at most 64 tokens, max_seq_len, but there are 65"):
                make(**options)(tokens(65))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (AXIAL | {"axial_position_shape": (7, 9)}, "63 places for max_seq_len 64"),
        ],
    )
    def test_what_cannot_be_is_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            make(**options)

    def test_unknown_arguments_raise(self):
        """Theirs runs unmasked with `input_mask`, the name of the other package."""
        with pytest.raises(TypeError):
            make()(tokens(3), input_mask=torch.ones(2, 3, dtype=torch.bool))
        with pytest.raises(TypeError):
            make(feature_redraw=3)


def test_sinusoids_go_on_past_the_longest_training_sequence():
    model = make(causal=True, max_seq_len=8)
    assert len(generate(model, [[1, 2, 3]], max_new_tokens=20)[0]) == 20
    for axial in (False, True):
        model = make(causal=True, max_seq_len=8, rotary_position_emb=False, axial_position_emb=axial)
        with pytest.raises(ValueError, match="end at 8"):
            generate(model, [[1, 2, 3]], max_new_tokens=20)
