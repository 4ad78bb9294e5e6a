"""Losses and samples of the package's wrapper, right."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from linattn import generate
from linattn.compat.linear_attention_transformer import AutoregressiveWrapper, LinearAttentionTransformerLM
from linattn.compat.linear_attention_transformer.autoregressive_wrapper import top_k, top_p

README = {"blindspot_size": 4, "n_local_attn_heads": 2, "reversible": True, "shift_tokens": True, "ff_glu": True}


def lm(**options: Any) -> LinearAttentionTransformerLM:
    fields = {"num_tokens": 11, "dim": 16, "depth": 2, "heads": 4, "max_seq_len": 32, "local_attn_window_size": 8}
    return LinearAttentionTransformerLM(**(fields | {"causal": True} | options)).double()


def some_tokens(n: int = 20, b: int = 2) -> Tensor:
    return torch.randint(11, (b, n))


def greedily(net: LinearAttentionTransformerLM, prompt: Tensor, count: int, **context: Tensor) -> Tensor:
    """The definition: the last max_seq_len tokens again for every token."""
    tokens = prompt[None]
    for _ in range(count):
        logits = net(tokens[:, -net.max_seq_len :], **context)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(prompt) :]


def test_the_loss_is_the_next_tokens_cross_entropy():
    net, x = lm(**README), some_tokens()
    wrapper = AutoregressiveWrapper(net)
    expected = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    assert_close(wrapper(x, return_loss=True), expected)
    assert_close(wrapper(x), net(x))


@pytest.mark.parametrize("whole", [True, False], ids=["mask of all", "mask of all but the last"])
def test_masks_reach_the_loss(whole):
    net, x = lm(**README), some_tokens(21, b=3)
    mask = torch.arange(21) >= torch.tensor([[0], [4], [9]])
    losses = []
    for row, kept in zip(x, mask, strict=True):
        alone = row[kept][None]
        losses.append(F.cross_entropy(net(alone[:, :-1])[0], alone[0, 1:], reduction="none"))
    given = mask if whole else mask[:, :-1]
    loss = AutoregressiveWrapper(net)(x, return_loss=True, input_mask=given)
    assert_close(loss, torch.cat(losses).mean())


def test_a_list_is_each_sequence_alone():
    """Padding is no target; theirs counts it."""
    net, rows = lm(**README), [some_tokens(n, b=1)[0] for n in (9, 20, 2)]
    wrapper = AutoregressiveWrapper(net)
    losses = [F.cross_entropy(net(row[None, :-1])[0], row[1:], reduction="none") for row in rows]
    assert_close(wrapper(rows, return_loss=True), torch.cat(losses).mean())
    logits = wrapper(rows)
    for row, y in zip(rows, logits, strict=True):
        assert_close(y[: len(row)], net(row[None])[0])
    with pytest.raises(ValueError, match="masked by their lengths"):
        wrapper(rows, input_mask=torch.ones(3, 20, dtype=torch.bool))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rows", [[], [[1, 2], [3]], [some_tokens()], 5], ids=["none", "lists", "batches", "number"])
def test_a_list_of_no_sequences_is_refused(rows):
    with pytest.raises(ValueError, match="each a tensor of one dimension, but is"):
        AutoregressiveWrapper(lm())(rows, return_loss=True)


def test_ignored_targets_do_not_count():
    net, x = lm(), some_tokens()
    wrapper, kept = AutoregressiveWrapper(net, ignore_index=3), x[:, 1:] != 3
    expected = F.cross_entropy(net(x[:, :-1])[kept], x[:, 1:][kept])
    assert_close(wrapper(x, return_loss=True), expected)
    assert wrapper(torch.full((2, 5), 3), return_loss=True) == 0


@pytest.mark.parametrize("options", [{}, README, {"use_rotary_emb": True, "n_local_attn_heads": 2}], ids=str)
def test_generates_what_the_whole_model_would(options):
    net, prompts = lm(**options), some_tokens(9)
    new = AutoregressiveWrapper(net).generate(prompts, 12, temperature=0)
    for row, prompt in zip(new, prompts, strict=True):
        assert torch.equal(row, greedily(net, prompt, 12))


def test_masked_prompts_are_shorter_prompts():
    net, prompts = lm(**README), some_tokens(9)
    mask = torch.arange(9) >= torch.tensor([[0], [5]])
    new = AutoregressiveWrapper(net).generate(prompts, 12, temperature=0, input_mask=mask)
    for row, prompt, kept in zip(new, prompts, mask, strict=True):
        assert torch.equal(row, greedily(net, prompt[kept], 12))


@pytest.mark.parametrize("n", [28, 32, 40])
@pytest.mark.parametrize("max_seq_len", [32, 29])
def test_goes_on_where_positions_end(n, max_seq_len):
    """With the last max_seq_len tokens, as a prompt of the package's own example is as long as that. A grid of windows
    has places for 32."""
    net, prompts = lm(depth=1, max_seq_len=max_seq_len, **README), some_tokens(n)
    new = AutoregressiveWrapper(net).generate(prompts, 8, temperature=0)
    for row, prompt in zip(new, prompts, strict=True):
        assert torch.equal(row, greedily(net, prompt, 8))


def test_decoders_generate_from_their_context():
    net, prompts, context = lm(receives_context=True), some_tokens(5), torch.randn(2, 9, 16, dtype=torch.float64)
    mask = torch.arange(9).expand(2, 9) < torch.tensor([[9], [4]])
    new = AutoregressiveWrapper(net).generate(prompts, 6, temperature=0, context=context, context_mask=mask)
    for i, row in enumerate(new):
        alone = {"context": context[i : i + 1], "context_mask": mask[i : i + 1]}
        assert torch.equal(row, greedily(net, prompts[i], 6, **alone))


@pytest.mark.parametrize("n", [5, 30])
def test_after_its_end_a_row_is_padding(n):
    """Also where positions end, and every token is a call of its own."""
    net, prompts = lm(), some_tokens(n, b=4)
    plain = AutoregressiveWrapper(net).generate(prompts, 10, temperature=0)
    # of the first row, and not among the first tokens of another one
    end = next(int(token) for token in plain[0] if not (plain[:, :5] == token).any(1).all())
    new = AutoregressiveWrapper(net, pad_value=7).generate(prompts, 10, temperature=0, eos_token=end)
    for row, long in zip(new, plain, strict=True):
        stop = (long == end).nonzero()
        count = int(stop[0]) + 1 if len(stop) else len(row)
        assert torch.equal(row[:count], long[:count]) and (row[count:] == 7).all()
    assert new.shape[1] > 4


def test_one_row_comes_back_as_one_row():
    net, prompt = lm(), some_tokens(5, b=1)[0]
    wrapper = AutoregressiveWrapper(net)
    assert torch.equal(wrapper.generate(prompt, 6, temperature=0), wrapper.generate(prompt[None], 6, temperature=0)[0])
    assert wrapper.generate(prompt, 0).shape == (0,)


def test_filters_choose_what_may_be_drawn():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert torch.isfinite(top_p(logits, thres=0.9)).tolist() == [[True, True, True, False]]
    assert torch.isfinite(top_p(logits, thres=0.1)).tolist() == [[True, False, False, False]]
    assert torch.isfinite(top_k(logits, thres=0.5)).tolist() == [[True, True, False, False]]
    assert torch.isfinite(top_k(logits, thres=0.99)).sum() == 1
    net, seen = lm(), []

    def only_four(logits: Tensor, thres: float) -> Tensor:
        seen.append(thres)
        return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([4]), 0)

    new = AutoregressiveWrapper(net).generate(some_tokens(3), 5, filter_logits_fn=only_four, filter_thres=0.25)
    assert (new == 4).all() and seen == [0.25] * 5


@pytest.mark.parametrize("keep", [top_k, top_p])
@pytest.mark.parametrize("thres", [-0.5, 1.5])
def test_a_share_beyond_all_is_refused(keep, thres):
    with pytest.raises(ValueError, match=r"thres must be in \[0, 1\], but is"):
        keep(torch.zeros(1, 4), thres=thres)


def test_temperature_comes_before_the_filter():
    """At a high one all tokens are alike, and half of the probability is half of the tokens."""
    net, counts = lm(), []

    def count(logits: Tensor, thres: float) -> Tensor:
        counts.append(int(torch.isfinite(top_p(logits, thres=thres)).sum()))
        return logits

    options = {"filter_logits_fn": count, "filter_thres": 0.5}
    AutoregressiveWrapper(net).generate(some_tokens(3, b=1), 1, temperature=1e6, **options)
    assert counts == [6]


def test_generation_leaves_training_on():
    wrapper = AutoregressiveWrapper(lm(ff_dropout=0.5)).train()
    one, two = (wrapper.generate(some_tokens(5, b=1) * 0, 9, temperature=0) for _ in range(2))
    assert wrapper.training and wrapper.net.training and torch.equal(one, two)


def test_only_causal_models_are_wrapped():
    with pytest.raises(ValueError, match="make the net with causal=True"):
        AutoregressiveWrapper(lm(causal=False))


def test_the_librarys_own_functions_take_the_models():
    net, prompts = lm(**README), some_tokens(5)
    new = AutoregressiveWrapper(net).generate(prompts, 4, temperature=0)
    assert generate(net, prompts, max_new_tokens=4) == new.tolist()
    encoder = lm(causal=False, return_embeddings=True)
    decoder = lm(receives_context=True)
    state = decoder.begin(encoder(some_tokens(9)))
    assert len(generate(decoder, prompts, max_new_tokens=4, state=state)[0]) == 4
