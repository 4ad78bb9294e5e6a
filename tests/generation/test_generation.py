import numpy
import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from linattn.generation import PromptLookup, Sampling, decoding, generate, stream
from linattn.generation.sampling import draw, probabilities
from tests.models.causal import VOCABULARY, every_kind, small_model, some_tokens

PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0], [5, 5], [7, 1, 7, 1, 7, 1, 7, 1]]
elu = {"attention": "local+elu"}


@every_kind
def test_each_row_is_what_it_would_be_alone(options):
    model = small_model(options)
    # the shortest prompt grows beyond the window of 7
    prompts = PROMPTS[:3]
    together = generate(model, prompts, max_new_tokens=8)
    assert together == [generate(model, [prompt], max_new_tokens=8)[0] for prompt in prompts]


@every_kind
def test_a_token_is_the_likeliest_after_all_those_before_it(options):
    model, prompt = small_model(options), [1, 2, 3]
    (new,) = generate(model, [prompt], max_new_tokens=9)
    logits = model(torch.tensor([prompt + new[:-1]]))
    assert new == logits[0, 2:].argmax(-1).tolist()


@every_kind
def test_a_model_that_has_written_can_learn(options):
    """Nothing of the mode without gradients that it wrote in stays behind, in it or in the state it was given."""
    model = small_model(options)
    _, state = model.extend(torch.tensor(PROMPTS[1:2]))
    generate(model, [[4, 2]], max_new_tokens=3, state=state)
    y, _ = model.extend(torch.tensor([[4, 2]]), state)
    (y.square().sum() + model(torch.tensor([[4, 2]])).square().sum()).backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("piece", [1, 4, 5, 13])
def test_prompts_are_read_in_pieces(monkeypatch, piece):
    model = small_model(elu)
    whole = generate(model, PROMPTS, max_new_tokens=8)
    lengths = []
    model.embedding.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    monkeypatch.setattr(decoding, "PREFILL", piece)
    assert generate(model, PROMPTS, max_new_tokens=8) == whole
    assert max(lengths) == piece and sum(lengths) == 13 + 7


def test_a_token_costs_the_same_at_any_position():
    model = small_model(elu).float()

    def cost(n):
        _, state = model.extend_hidden(some_tokens(1, n))
        with FlopCounterMode(display=False) as counter:
            model.extend(some_tokens(1, 1), state)
        return counter.get_total_flops()

    with torch.no_grad():
        assert cost(100) == cost(30_000) > 0


def test_a_tensor_of_prompts_is_a_list_of_equal_ones():
    model, prompts = small_model(elu), some_tokens(3, 6)
    assert generate(model, prompts, max_new_tokens=5) == generate(model, prompts.tolist(), max_new_tokens=5)


def test_a_single_prompt_has_a_single_result():
    model = small_model(elu)
    (row,), state = generate(model, [[1, 2]], max_new_tokens=5, return_state=True)
    for prompt in ([1, 2], (1, 2), torch.tensor([1, 2])):
        assert generate(model, prompt, max_new_tokens=5) == row
        assert list(stream(model, prompt, max_new_tokens=5)) == row
    again = generate(model, [1, 2], max_new_tokens=5, return_state=True)
    assert again[0] == row
    assert generate(model, [3], max_new_tokens=5, state=again[1]) == generate(model, [3], max_new_tokens=5, state=state)


def test_a_stopped_row_ends_and_the_others_go_on():
    model = small_model(elu)
    free = generate(model, PROMPTS, max_new_tokens=12)
    stop = free[0][3]
    rows = generate(model, PROMPTS, max_new_tokens=12, stop_tokens=[stop])
    for row, whole in zip(rows, free, strict=True):
        assert row == (whole[: whole.index(stop) + 1] if stop in whole else whole)
    steps = list(stream(model, PROMPTS, max_new_tokens=12, stop_tokens=[stop]))
    after = free[0].index(stop) + 1
    assert [step[0] for step in steps[after:]] == [None] * (len(steps) - after)
    # tokens that are read once, or equal no number of Python
    for stops in (torch.tensor([stop]), [torch.tensor(stop)], iter([stop])):
        assert generate(model, PROMPTS, max_new_tokens=12, stop_tokens=stops) == rows


def test_nothing_is_computed_once_all_rows_have_stopped():
    model = small_model(elu)
    (row,) = generate(model, [[1]], max_new_tokens=3)
    calls = []
    model.embedding.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].shape[1]))
    assert generate(model, [[1]], max_new_tokens=3, stop_tokens=row[:1]) == [row[:1]]
    assert calls == [1]


def test_tokens_come_as_soon_as_they_are_known():
    model = small_model(elu)
    steps = stream(model, [[1, 2]], max_new_tokens=10**9)
    assert [next(steps)[0] for _ in range(4)] == generate(model, [[1, 2]], max_new_tokens=4)[0]


def test_no_new_tokens_may_be_asked_for():
    assert generate(small_model(elu), PROMPTS, max_new_tokens=0) == [[], [], [], []]


def test_a_seed_makes_draws_repeatable_and_touches_no_other_randomness():
    model, options = small_model(elu), {"max_new_tokens": 20, "sampling": Sampling(temperature=2.0)}
    random = torch.get_rng_state()
    first = generate(model, PROMPTS, seed=1, **options)
    assert torch.equal(torch.get_rng_state(), random)
    torch.manual_seed(5)
    assert generate(model, PROMPTS, seed=1, **options) == first
    assert generate(model, PROMPTS, seed=2, **options) != first
    torch.manual_seed(1)
    assert generate(model, PROMPTS, **options) == first


def test_numbers_of_numpy_are_numbers():
    model, options = small_model(elu), {"sampling": Sampling(temperature=1.0)}
    expected = generate(model, [1, 2], max_new_tokens=3, seed=5, **options)
    assert generate(model, [1, 2], max_new_tokens=numpy.int64(3), seed=numpy.int64(5), **options) == expected


def test_dropout_is_off_but_training_goes_on():
    model = small_model(elu, dropout=0.5)
    expected = generate(model, PROMPTS, max_new_tokens=6)
    model.train()
    model.blocks[0].eval()
    steps = stream(model, PROMPTS, max_new_tokens=6)
    tokens = [next(steps) for _ in range(6)]
    assert model.training and model.blocks[1].mixer.dropout.training and not model.blocks[0].mixer.dropout.training
    assert [list(row) for row in zip(*tokens, strict=True)] == expected


def test_no_gradients_are_recorded_nor_switched_off_outside():
    steps = stream(small_model(elu), PROMPTS, max_new_tokens=3)
    next(steps)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "each prompt needs at least one token"),
        ({"prompts": [[1], []]}, "each prompt needs at least one token"),
        ({"prompts": [[1, 13]]}, r"tokens must be in \[0, 13\), but a prompt has 13"),
        ({"prompts": [[-1]]}, r"tokens must be in \[0, 13\), but a prompt has -1"),
        ({"prompts": [[True]]}, r"prompts must be tokens, .*, but are \[\[True\]\]"),
        ({"prompts": torch.ones(1, 3).bool()}, r"prompts must be tokens, .*, but are tensor\(\[\[True"),
        ({"stop_tokens": [True]}, r"stop_tokens must be tokens, .*, but are \[True\]"),
        ({"stop_tokens": [13]}, r"tokens must be in \[0, 13\), but stop_tokens has 13"),
        ({"max_new_tokens": -1}, "max_new_tokens must be a whole number of at least 0"),
    ],
)
def test_what_cannot_be_generated_from_is_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        stream(small_model(elu), **({"prompts": [[1]], "max_new_tokens": 3} | arguments))


def test_a_model_that_is_not_causal_generates_nothing():
    with pytest.raises(ValueError, match="generation needs a causal model, but this LanguageModel is not"):
        stream(small_model(elu, causal=False), [[1]], max_new_tokens=1)


def test_learned_positions_must_suffice():
    model = small_model({"attention": "elu", "positions": "learned", "max_length": 8})
    assert len(generate(model, [[1, 2, 3]], max_new_tokens=6)[0]) == 6
    with pytest.raises(ValueError, match="the model's positions end at 8, but prompt and new tokens need 9"):
        stream(model, [[1, 2, 3]], max_new_tokens=7)


nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    "wrong",
    [
        # the logits divided by the last one would overflow
        *({"temperature": value} for value in (-1.0, nan, inf, 1e-40)),
        *({"top_k": value} for value in (0, -1)),
        *({"top_p": value} for value in (0.0, -0.5, 1.5, nan)),
        *({"repetition_penalty": value} for value in (0.0, -1.0, nan, inf)),
    ],
)
def test_wrong_sampling_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be .*, but is"):
        Sampling(**wrong)


@pytest.mark.parametrize("option", [{"top_k": 3}, {"top_p": 0.5}])
def test_what_only_draws_have_needs_a_temperature(option):
    with pytest.raises(ValueError, match="with temperature 0, the default, nothing is"):
        Sampling(**option)
    Sampling(temperature=0.5, **option)


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])


def frequencies(sampling: Sampling, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
    rows = 100_000
    before = torch.zeros(rows, 5, dtype=torch.bool)
    before[:, seen] = True
    drawn = draw(LOGITS.expand(rows, 5), sampling, before, torch.Generator().manual_seed(0))
    return drawn.bincount(minlength=5) / rows


@pytest.mark.parametrize(
    ("sampling", "logits"),
    [
        (Sampling(temperature=1.0), [2, 1, 0, -1, -2]),
        (Sampling(temperature=0.5), [4, 2, 0, -2, -4]),
        (Sampling(temperature=1.0, top_k=2), [2, 1, -inf, -inf, -inf]),
        (Sampling(temperature=1.0, top_k=99), [2, 1, 0, -1, -2]),
        # the probabilities are 0.636, 0.234, 0.086, 0.032, 0.012: two reach 0.8 together, three 0.9
        (Sampling(temperature=1.0, top_p=0.8), [2, 1, -inf, -inf, -inf]),
        (Sampling(temperature=1.0, top_p=0.9), [2, 1, 0, -inf, -inf]),
        (Sampling(temperature=1.0, top_p=1.0), [2, 1, 0, -1, -2]),
        (Sampling(temperature=1.0, top_p=1e-9), [0, -inf, -inf, -inf, -inf]),
        # top_p sees what temperature and top_k leave: of four tokens at temperature 2, three reach 0.85
        (Sampling(temperature=2.0, top_k=4, top_p=0.85), [1, 0.5, 0, -inf, -inf]),
        (Sampling(temperature=0.0), [0, -inf, -inf, -inf, -inf]),
        (Sampling(temperature=1e-30), [0, -inf, -inf, -inf, -inf]),
        (Sampling(filter=lambda logits: -logits), [-inf, -inf, -inf, -inf, 0]),
        (Sampling(temperature=1.0, filter=lambda logits: -logits), [-2, -1, 0, 1, 2]),
    ],
)
def test_draws_have_their_distribution(sampling, logits):
    expected = torch.tensor(logits, dtype=torch.float32).softmax(-1)
    assert_close(frequencies(sampling), expected, rtol=0, atol=0.006)


def test_of_equally_likely_tokens_top_k_keeps_k():
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    shares = probabilities(logits, Sampling(temperature=1.0, top_k=2), torch.zeros(1, 4, dtype=torch.bool))
    assert sorted(shares[0].tolist()) == [0, 0, 0.5, 0.5] and shares[0, 0] == 0


@pytest.mark.parametrize("draft", [None, PromptLookup()])
def test_a_filter_chooses_what_is_likeliest(draft):
    """Of the tokens from 8 on, as the largest logit of these, with a draft too."""
    model, prompt = small_model(elu), [1, 2, 3, 1, 2, 3]

    def few(logits):
        return logits.index_fill(1, torch.arange(8), -inf)

    (new,) = generate(model, [prompt], max_new_tokens=9, sampling=Sampling(filter=few), draft=draft)
    logits = model(torch.tensor([prompt + new[:-1]]))
    assert new == (logits[0, 5:, 8:].argmax(-1) + 8).tolist()
    assert new != generate(model, [prompt], max_new_tokens=9)[0]


def test_a_filter_tells_logits_apart_whose_probabilities_are_equal():
    sampling = Sampling(filter=lambda logits: logits)
    assert draw(torch.tensor([[0.0, 1e-9]]), sampling, torch.zeros(1, 2, dtype=torch.bool)) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [nan, -inf])
def test_a_filter_that_leaves_nothing_is_refused(temperature, value):
    sampling = Sampling(temperature=temperature, filter=lambda logits: torch.full_like(logits, value))
    with pytest.raises(ValueError, match="the logits of the model, or the filter, hold NaN"):
        generate(small_model(elu), [[1, 2]], max_new_tokens=1, sampling=sampling)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("wrong", "came"),
    [(lambda x: x.long(), r"\(1, 13\) of torch.int64"), (lambda x: x[0], r"\(13,\)"), (lambda x: None, "a NoneType")],
)
def test_a_filter_that_returns_no_logits_is_refused(temperature, wrong, came):
    sampling = Sampling(temperature=temperature, filter=wrong)
    with pytest.raises(ValueError, match=rf"the filter must return logits \(1, 13\), .*, but returned {came}"):
        generate(small_model(elu), [1, 2], max_new_tokens=1, sampling=sampling)


def test_the_penalty_concerns_what_was_seen():
    expected = torch.tensor([1, 1, 0, -1, -4.0]).softmax(-1)
    found = frequencies(Sampling(temperature=1.0, repetition_penalty=2.0), seen=[0, 4])
    assert_close(found, expected, rtol=0, atol=0.006)


def test_the_penalty_concerns_prompt_and_new_tokens_but_no_padding():
    model = small_model(elu)
    options = {"max_new_tokens": VOCABULARY - 1, "sampling": Sampling(repetition_penalty=1e9)}
    # a logit that is penalised so much is 0 at most, and some unseen one is above it
    model.logits = lambda x: torch.nn.functional.linear(x, model.embedding.weight).abs() + 1
    rows = generate(model, [[3], [4, 5]], **options)
    assert sorted(rows[0]) == [token for token in range(VOCABULARY) if token != 3]
    assert sorted(rows[1][:-1]) == [token for token in range(VOCABULARY) if token not in (4, 5)]


@pytest.mark.parametrize("draft", [None, PromptLookup()])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_nan_are_no_text(temperature, draft):
    model = small_model(elu)
    with torch.no_grad():
        model.norm.weight.fill_(nan)
    with pytest.raises(ValueError, match="the logits of the model hold NaN"):
        generate(model, [[1, 2]], max_new_tokens=3, sampling=Sampling(temperature=temperature), draft=draft)
