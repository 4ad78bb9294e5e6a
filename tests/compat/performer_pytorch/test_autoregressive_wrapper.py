"""The wrapper's loss and samples, and the encoder/decoder that has one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from linattn.compat.performer_pytorch import AutoregressiveWrapper, PerformerEncDec, PerformerLM, top_k, top_p

SIZE = {"num_tokens": 19, "max_seq_len": 64, "depth": 2, "heads": 4, "dim_head": 8}
ENC_DEC = {prefix + name: value for prefix in ("enc_", "dec_") for name, value in SIZE.items()}


def wrapper(ignore_index: int = 0, pad_value: int = 0, **options: Any) -> AutoregressiveWrapper:
    net = PerformerLM(dim=32, causal=True, **SIZE | options).double().eval()
    return AutoregressiveWrapper(net, ignore_index, pad_value)


def pair(**options: Any) -> PerformerEncDec:
    return PerformerEncDec(32, **ENC_DEC | options).double().eval()


def tokens(n: int, batch: int = 2) -> Tensor:
    return torch.randint(1, 19, (batch, n))


def likeliest(model: AutoregressiveWrapper | PerformerEncDec, *args: Any, **options: Any) -> Tensor:
    return model.generate(*args, temperature=0, **options)


class TestLoss:
    def test_is_of_the_next_token(self):
        model, x = wrapper(), tokens(20)
        expected = F.cross_entropy(model.net(x[:, :-1]).mT, x[:, 1:])
        assert_close(model(x), expected)
        assert_close(model(x, return_loss=False), model.net(x))

    def test_ignore_index(self):
        x = tokens(20)
        x[:, 7] = 3
        for index in (0, 3):
            model = wrapper(ignore_index=index)
            expected = F.cross_entropy(model.net(x[:, :-1]).mT, x[:, 1:], ignore_index=index)
            assert_close(model(x), expected)

    def test_nothing_to_learn_is_no_loss(self):
        """Theirs: not a number."""
        assert wrapper()(torch.zeros(2, 9, dtype=torch.long)) == 0

    @pytest.mark.parametrize("whole", [True, False])
    def test_b11_masked_tokens_do_not_count(self, whole):
        model, x, lengths = wrapper(), tokens(20), (20, 11)
        mask = torch.arange(20) < torch.tensor(lengths)[:, None]
        losses = [model(row[None, :n]) * (n - 1) for row, n in zip(x, lengths, strict=True)]
        assert_close(model(x, mask=mask), sum(losses) / (sum(lengths) - 2))
        if whole:
            # the mask may leave out the last token
            everything = torch.ones(2, 19, dtype=torch.bool)
            assert_close(model(x, mask=everything), model(x))

    def test_left_padding(self):
        model, x = wrapper(), tokens(20, 1)
        padded = F.pad(x, (5, 0))
        assert_close(model(padded, mask=padded != 0), model(x))


class TestGenerate:
    @pytest.mark.parametrize("options", [{}, {"local_attn_heads": 2, "local_window_size": 3, "reversible": True}])
    def test_each_token_is_the_likeliest_after_those_before(self, options):
        model, start = wrapper(**options), tokens(5)
        out = likeliest(model, start, 8)
        whole = torch.cat([start, out], 1)
        assert torch.equal(model.net(whole)[:, 4:-1].argmax(-1), out)

    def test_shapes(self):
        model = wrapper()
        assert model.generate(tokens(5), 7).shape == (2, 7)
        assert model.generate(tokens(5)[0], 7).shape == (7,)
        assert model.generate(tokens(5), 0).shape == (2, 0)

    def test_a_masked_prompt_is_one_without_those_tokens(self):
        model, start = wrapper(), tokens(9)
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[0, :4], mask[1, 6:] = False, False
        out = likeliest(model, start, 6, mask=mask)
        for row, kept in enumerate(mask):
            assert torch.equal(likeliest(model, start[row, kept], 6), out[row])

    def test_rows_end_at_their_end(self):
        """Theirs go on until all rows have ended."""
        model, start = wrapper(pad_value=18), tokens(5, 3)
        out = likeliest(model, start, 30)
        end = int(out[0, 2])
        ended = likeliest(model, start, 30, eos_token=end)
        for free, row in zip(out, ended, strict=True):
            stop = (free == end).nonzero()
            length = int(stop[0]) + 1 if len(stop) else 30
            assert torch.equal(row[:length], free[: len(row)][:length]) and (row[length:] == 18).all()

    def test_temperature(self):
        model, start = wrapper(), tokens(5, 1).expand(64, 5)
        cold, hot = (model.generate(start, 1, temperature=t, filter_thres=0.0) for t in (1e-3, 1e3))
        assert len(cold.unique()) == 1 and len(hot.unique()) > 10

    def test_filters(self):
        model, start = wrapper(), tokens(5, 1).expand(64, 5)
        best = likeliest(model, start, 1)[0, 0]
        ranks = model.net(start[:1])[0, -1].argsort(descending=True)
        few = model.generate(start, 1, temperature=100.0, filter_thres=0.8).unique()
        assert 1 < len(few) <= 4 and set(few.tolist()) <= set(ranks[:4].tolist())
        nucleus = model.generate(start, 1, filter_logits_fn=top_p, filter_thres=1e-6)
        assert (nucleus == best).all()
        own = model.generate(start, 1, filter_logits_fn=lambda x, thres: x.masked_fill(x < x.max(), -torch.inf))
        assert (own == best).all()

    @pytest.mark.parametrize("recent", [1, 3, 32])
    def test_repetition_penalty(self, recent):
        model, start, theta = wrapper(tie_embed=True), tokens(5), 2.0
        # tied embeddings of this size repeat the last token
        assert (likeliest(model, start, 8) == start[:, -1:]).all()
        out = likeliest(model, start, 8, repetition_penalty=theta, repetition_penalty_ctx=recent)
        for row in torch.cat([start, out], 1):
            for n in range(5, 13):
                logits, before = model.net(row[None, :n])[0, -1], row[:n][-recent:].unique()
                logits[before] = torch.where(logits[before] < 0, logits[before] * theta, logits[before] / theta)
                assert logits.argmax() == row[n]

    def test_rows_are_penalised_apart(self):
        """Theirs penalises the tokens of the last 32 rows, for all rows."""
        model, start = wrapper(tie_embed=True), tokens(5)
        together = likeliest(model, start, 8, repetition_penalty=3.0)
        for row, first in zip(together, start, strict=True):
            assert torch.equal(likeliest(model, first, 8, repetition_penalty=3.0), row)

    def test_training_goes_on(self):
        model = wrapper(emb_dropout=0.5).train()
        start = tokens(5)
        assert torch.equal(likeliest(model, start, 6), likeliest(model, start, 6)) and model.net.training

    def test_a_model_of_ten_tokens(self):
        """Their top_k keeps int(0.1 · 9) = 0 tokens, and fails."""
        assert wrapper(num_tokens=9).generate(torch.ones(1, 3, dtype=torch.long), 4).shape == (1, 4)


def test_top_k_keeps_a_share():
    logits = torch.randn(3, 20)
    for thres, kept in ((0.9, 2), (0.75, 5), (0.0, 20), (0.99, 1), (1.0, 1)):
        out = top_k(logits, thres=thres)
        assert (out.isfinite().sum(-1) == kept).all()
        assert torch.equal(out.topk(kept).values, logits.topk(kept).values)


def test_b10_top_p_keeps_the_probability():
    """Theirs keeps 1 − thres."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for thres, kept in ((0.4, 1), (0.6, 2), (0.9, 3), (0.99, 4)):
        assert top_p(logits, thres=thres).isfinite().sum() == kept


def test_only_causal_models_foretell():
    with pytest.raises(ValueError, match="causal=True"):
        AutoregressiveWrapper(PerformerLM(dim=32, **SIZE))


def test_a_penalty_of_nothing_is_refused():
    for options in ({"repetition_penalty": 0.0}, {"repetition_penalty_ctx": 0}):
        with pytest.raises(ValueError, match="must be positive"):
            wrapper().generate(tokens(3), 2, **options)


class TestEncDec:
    def test_parts(self):
        model, source, target = pair(), tokens(13), tokens(9)
        encodings = model.enc(source, return_encodings=True)
        assert_close(model(source, target, return_loss=False), model.dec.net(target, context=encodings))
        assert_close(model(source, target), model.dec(target, context=encodings))

    def test_every_weight_learns(self):
        """Their encoder has an output layer that nothing asks."""
        model = pair(enc_reversible=True, dec_reversible=True, dec_shift_tokens=True).train()
        model(tokens(13), tokens(9)).backward()
        assert all(weight.grad is not None for weight in model.parameters())

    def test_padding_changes_nothing(self):
        model, source, target = pair(), tokens(13), tokens(9)
        enc_mask, dec_mask = torch.rand(2, 13) < 0.6, torch.arange(9) < torch.tensor([9, 5])[:, None]
        enc_mask[:, 0] = True
        logits = model(source, target, enc_mask=enc_mask, dec_mask=dec_mask, return_loss=False)
        written = likeliest(model, source, target, 6, enc_mask=enc_mask, dec_mask=dec_mask)
        for row in range(2):
            one = source[row : row + 1, enc_mask[row]], target[row : row + 1, dec_mask[row]]
            assert_close(logits[row : row + 1, dec_mask[row]], model(*one, return_loss=False))
            assert torch.equal(likeliest(model, *one, 6), written[row : row + 1])

    def test_generate(self):
        model, source, start = pair(), tokens(13), tokens(2)
        out = likeliest(model, source, start, 8)
        whole = torch.cat([start, out], 1)
        assert torch.equal(model(source, whole, return_loss=False)[:, 1:-1].argmax(-1), out)

    def test_the_source_is_read_once(self):
        model, reads = pair(), []
        model.enc.register_forward_hook(lambda *_: reads.append(1))
        # each cross attention projects the source once, then tokens only
        cross = model.dec.net.performer.net.branches[2].module
        cross.k_proj.register_forward_hook(lambda module, args, y: reads.append(args[0].shape[1]))
        model.generate(tokens(13), tokens(2), 8)
        assert reads == [1, 13]

    @pytest.mark.parametrize("name", ["tie_token_embeds", "tie_token_embed"])
    def test_embeddings_may_be_tied(self, name):
        """The second name is their readme's, which has no effect there."""
        model = pair(**{name: True}, dec_tie_embed=True)
        assert model.enc.embedding is model.dec.net.embedding
        assert pair().enc.embedding is not pair().dec.net.embedding
        model(tokens(13), tokens(9)).backward()
        with pytest.raises(ValueError, match="as many tokens"):
            pair(**{name: True}, enc_num_tokens=5)

    def test_ignore_index_and_pad_value(self):
        model = pair(ignore_index=4, pad_value=5)
        assert (model.dec.ignore_index, model.dec.pad_value) == (4, 5)

    def test_no_projection_is_of_both(self):
        model = pair(no_projection=True)
        assert not [name for name in model.state_dict() if name.endswith("rows")]

    @pytest.mark.parametrize("part", ["enc", "dec"])
    def test_no_projection_of_one_part(self, part):
        """Theirs accepts it and goes by the argument of both."""
        for both in (False, True):
            model = pair(no_projection=both, **{f"{part}_no_projection": not both})
            drawn = {name[:3] for name in model.state_dict() if name.endswith("rows")}
            assert drawn == ({part} if both else {"enc", "dec"} - {part})

    @pytest.mark.parametrize("tied", [False, True])
    def test_an_encoder_with_tied_embeddings_gives_logits(self, tied):
        """As theirs does: x Eᵀ, with the decoder's E if the two share it."""
        model, source = pair(enc_tie_embed=True, tie_token_embeds=tied), tokens(13)
        embedding = (model.dec.net if tied else model.enc).embedding
        assert_close(model.enc(source), model.enc(source, return_encodings=True) @ embedding.weight.T)
        assert list(model.state_dict()) == list(pair(tie_token_embeds=tied).state_dict())

    def test_what_is_so_anyway_may_be_said(self):
        said = pair(dec_causal=True, dec_cross_attend=True, enc_cross_attend=False)
        said.load_state_dict(pair().state_dict())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dec_causal": False}, "dec_causal can only be True"),
            ({"dec_cross_attend": False}, "dec_cross_attend can only be True"),
            ({"enc_cross_attend": True}, "enc_cross_attend can only be False"),
            ({"enc_dim": 8}, "give dim, not enc_dim"),
            ({"dec_dim": 32}, "give dim, not dec_dim"),
        ],
        ids=str,
    )
    def test_what_makes_them_a_pair_is_fixed(self, options, message):
        with pytest.raises(ValueError, match=message):
            pair(**options)

    def test_options_are_of_one_part(self):
        model = pair(enc_depth=1, dec_depth=3, enc_ff_mult=2)
        assert len(model.enc.performer.net.branches) == 2 and len(model.dec.net.performer.net.branches) == 12

    @pytest.mark.parametrize(
        "options",
        [
            {"depth": 3},
            {"tie_token": True},
            {"enc_depht": 3},
        ],
        ids=str,
    )
    def test_unknown_arguments_raise(self, options):
        with pytest.raises(TypeError, match=next(iter(options)).removeprefix("enc_").removeprefix("dec_")):
            pair(**options)

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize("name", ["enc_heads", "dec_heads", "enc_max_seq_len", "dec_nb_features"])
    def test_errors_have_the_names_of_options_as_they_are_here(self, name):
        with pytest.raises(ValueError, match=f"^{name} must be a whole number of at least 1, but is 0$"):
            pair(**{name: 0})

    def test_a_missing_argument_is_one_of_its_part(self):
        for name in ("enc_max_seq_len", "dec_max_seq_len"):
            options = {key: value for key, value in ENC_DEC.items() if key != name}
            with pytest.raises(TypeError, match=f"{name[:4]}….* missing a required argument: 'max_seq_len'"):
                PerformerEncDec(32, **options)

    def test_redrawing(self):
        model = pair(enc_feature_redraw_interval=1, dec_feature_redraw_interval=1).train()
        updaters = [part.performer.proj_updater for part in (model.enc, model.dec.net)]
        seeds = [int(updater.seed) for updater in updaters]
        for _ in range(2):
            model(tokens(13), tokens(9)).backward()
        assert all(int(updater.seed) != seed for updater, seed in zip(updaters, seeds, strict=True))
        model.check_redraw_projections()
        model.fix_projection_matrices_()
        seeds = [int(updater.seed) for updater in updaters]
        model(tokens(13), tokens(9)).backward()
        assert [int(updater.seed) for updater in updaters] == seeds
