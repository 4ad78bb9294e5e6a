"""A draft changes no token, and a state that generation returns is that of all tokens."""

import pytest
import torch
from torch.testing import assert_close

from linattn.generation import Draft, ModelDraft, PromptLookup, Sampling, generate, stream
from linattn.ops.nested import map_state
from tests.models.causal import KINDS, MODELS, VOCABULARY, every_kind, small_model

PROMPT = [7, 1, 2, 3, 7, 1, 2]
SAMPLING = Sampling(temperature=1.5, top_k=5, repetition_penalty=1.3)


class Oracle(Draft):
    """Guesses from a known text; every `wrong`-th guess is wrong."""

    def __init__(self, text, wrong):
        super().__init__()
        self.text, self.wrong = text, wrong

    def begin(self):
        self.count = 0

    def extend(self, tokens):
        self.count += len(tokens)

    def propose(self, count):
        guesses = enumerate(self.text[self.count : self.count + count], self.count)
        return [(token + (i % self.wrong == 0)) % VOCABULARY for i, token in guesses]


def test_a_draft_ends_where_its_model_does():
    """A smaller model with fewer positions guesses as far as it has some."""
    model, options = small_model({"attention": "elu"}), {"attention": "elu", "positions": "learned", "max_length": 12}
    draft = ModelDraft(small_model(options), max_tokens=3)
    (expected,) = generate(model, [PROMPT], max_new_tokens=30)
    assert generate(model, [PROMPT], max_new_tokens=30, draft=draft) == [expected]
    assert draft.drafted > 0
    oracle = ModelDraft(model, max_tokens=3)
    model.positions = None
    generate(model, [PROMPT], max_new_tokens=30, draft=oracle)
    assert oracle.accepted == oracle.drafted > draft.drafted


def test_a_draft_of_another_vocabulary_is_refused():
    draft = ModelDraft(small_model({"attention": "elu", "vocab_size": VOCABULARY + 1}))
    with pytest.raises(ValueError, match=f"the draft's model has {VOCABULARY + 1} tokens, but the model {VOCABULARY}"):
        generate(small_model({"attention": "elu"}), [PROMPT], max_new_tokens=3, draft=draft)
    with pytest.raises(ValueError, match="a draft needs a causal model"):
        ModelDraft(small_model({"attention": "elu", "causal": False}))


class Oracles(Draft):
    """For several rows, whose prompts begin with different tokens: a wrong guess after so many for each."""

    def __init__(self, texts, wrongs):
        super().__init__()
        self.texts = {text[0]: Oracle(text, wrong) for text, wrong in zip(texts, wrongs, strict=True)}

    def begin(self):
        self.oracle = None

    def extend(self, tokens):
        if self.oracle is None:
            self.oracle = self.texts[tokens[0]]
            self.oracle.begin()
        self.oracle.extend(tokens)

    def propose(self, count):
        assert self.oracle is not None
        return self.oracle.propose(count)


@every_kind
def test_drafted_is_not_drafted(options):
    """Whatever is guessed, right or wrong, and drawn in any way, and whether or not a state was there before."""
    model = small_model(options)
    _, state = model.extend(torch.tensor([[4, 4, 2]]))
    for sampling, wrongs in ((Sampling(), (1, 10**9)), (SAMPLING, (3,))):
        call = {"max_new_tokens": 10, "sampling": sampling, "seed": 5, "state": state}
        plain = generate(model, [PROMPT], **call)
        drafts = [Oracle(PROMPT + plain[0], wrong) for wrong in wrongs]
        for draft in drafts:
            assert generate(model, [PROMPT], draft=draft, **call) == plain
            assert draft.accepted <= draft.drafted
            assert draft.wrong == 3 or draft.accepted == (0 if draft.wrong == 1 else draft.drafted)


@every_kind
def test_each_row_has_its_own_draft(options):
    """Rows accept and end at different tokens, and the state is that of all tokens of each row."""
    model, rows = small_model(options), [PROMPT, [5], [2, 2, 2, 2]]
    free = generate(model, rows, max_new_tokens=8)
    # the token that stops some row, but as late as can be
    stop = max(
        {token for row in free for token in row}, key=lambda token: sum((*row, token).index(token) for row in free)
    )
    plain = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    draft = Oracles([row + new for row, new in zip(rows, free, strict=True)], (10**9, 1, 3))
    options = {"max_new_tokens": 8, "stop_tokens": [stop]}
    found, state = generate(model, rows, draft=draft, return_state=True, **options)
    assert found == plain and draft.drafted > draft.accepted > 0
    more = torch.randint(VOCABULARY, (3, 2))
    y, _ = model.extend(more, state)
    for i, (prompt, row) in enumerate(zip(rows, plain, strict=True)):
        _, own = model.extend(torch.tensor([prompt + row]))
        assert_close(y[i : i + 1], model.extend(more[i : i + 1], own)[0])
    assert list(stream(model, rows, draft=draft, **options)) == list(stream(model, rows, **options))


@pytest.mark.parametrize("options", [{"attention": "local+elu"}, {"attention": "gated_delta", "convolution": 3}])
def test_guesses_of_the_prompt_and_of_a_model(options):
    model, other = small_model(options), small_model({"attention": "elu"})
    plain = generate(model, [PROMPT], max_new_tokens=30)
    drafts = PromptLookup(longest=3, shortest=1), ModelDraft(model), ModelDraft(other)
    for draft in drafts:
        assert generate(model, [PROMPT], max_new_tokens=30, draft=draft) == plain
    assert drafts[0].drafted > drafts[0].accepted > 0
    assert drafts[1].accepted == drafts[1].drafted > 15


def test_right_guesses_save_calls():
    model, calls = small_model({"attention": "local+elu"}), []
    plain = generate(model, [PROMPT], max_new_tokens=60)
    model.embedding.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].shape[1]))
    generate(model, [PROMPT], max_new_tokens=60, draft=Oracle(PROMPT + plain[0], 10**9))
    assert len(calls) < 10
    calls.clear()
    generate(model, [PROMPT], max_new_tokens=60, draft=(wrong := Oracle(PROMPT + plain[0], 1)))
    # wrong guesses: tokens that wait are read again, never many, and soon most calls have no guesses
    assert len(calls) == 60 and max(calls) <= 24 and wrong.drafted < 90


@pytest.mark.parametrize(("name", "drafted"), [*((name, False) for name in KINDS), ("mixture", True), ("kda", True)])
def test_the_state_that_is_returned_goes_on(name, drafted):
    """In rows that stop at different tokens; and a state after no new token is that of the prompt."""
    model, draft = small_model(MODELS[name]), PromptLookup(shortest=1) if drafted else None
    prompts = [PROMPT] if draft else [PROMPT, [5], [2, 2, 2, 2]]
    free = generate(model, prompts, max_new_tokens=4)
    for call in ({"max_new_tokens": 6, "stop_tokens": [free[0][3]]}, {"max_new_tokens": 0}):
        rows, state = generate(model, prompts, return_state=True, draft=draft, **call)
        more = torch.randint(VOCABULARY, (len(prompts), 4))
        y, _ = model.extend(more, state)
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            _, own = model.extend(torch.tensor([prompt + row]))
            assert_close(y[i : i + 1], model.extend(more[i : i + 1], own)[0])
        parts = []
        map_state(parts.append, state)
        assert not any(x.is_inference() for x in parts)


def test_samples_with_a_draft_have_the_same_distribution():
    """Chi-square over the second token, with independent draws: 7 degrees of freedom, 0.1 % at 24.3."""
    torch.manual_seed(0)
    model, count = small_model({"attention": "elu", "vocab_size": 8, "depth": 1}), 200
    logits = model(torch.tensor([[1, 2, 3]]))[0, -1]
    expected = torch.zeros(8, dtype=torch.float64)
    for token, share in enumerate((logits / 4).softmax(-1)):
        expected += share * (model(torch.tensor([[1, 2, 3, token]]))[0, -1] / 4).softmax(-1)
    found, draft = torch.zeros(8), Oracle([1, 2, 3, int(logits.argmax()), int(expected.argmax())], 10**9)
    for seed in range(count):
        rows = generate(
            model, [[1, 2, 3]], max_new_tokens=3, sampling=Sampling(temperature=4.0), seed=seed, draft=draft
        )
        found[rows[0][1]] += 1
    assert draft.accepted > 0
    assert ((found - count * expected) ** 2 / (count * expected)).sum() < 24.3


def test_prompt_lookup_takes_the_last_earlier_place_of_the_longest_run():
    draft = PromptLookup(max_tokens=3, longest=3, shortest=2)
    draft.extend([1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3])
    assert draft.propose(8) == [4, 9, 2]
    draft.extend([7, 2, 3])
    assert draft.propose(2) == [7, 2]
    draft.extend([6])
    assert not draft.propose(8)


def test_a_text_that_goes_round_goes_on():
    draft = PromptLookup()
    assert draft.propose(3) == ()
    draft.extend([1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert draft.propose(7) == [1, 2, 3, 1, 2, 3, 1]
    draft.extend([5, 5, 5, 5])
    assert draft.propose(4) == [5, 5, 5, 5]


def test_min_p_keeps_what_is_likely_enough():
    model = small_model({"attention": "elu"})
    probabilities = model(torch.tensor([PROMPT]))[0, -1].softmax(-1)
    allowed = set((probabilities >= 0.4 * probabilities.max()).nonzero().flatten().tolist())
    sampling = Sampling(temperature=1.0, min_p=0.4)
    drawn = {generate(model, [PROMPT], max_new_tokens=1, sampling=sampling, seed=i)[0][0] for i in range(60)}
    assert drawn <= allowed and len(allowed) < VOCABULARY


@pytest.mark.parametrize("draft", [None, PromptLookup()], ids=["plain", "drafted"])
def test_positions_for_the_state_are_counted_before_the_first_token(draft):
    model = small_model({**MODELS["learned positions"], "max_length": 12})
    assert len(generate(model, [PROMPT], max_new_tokens=6, draft=draft)[0]) == 6
    assert len(generate(model, [PROMPT], max_new_tokens=5, draft=draft, return_state=True)[0][0]) == 5
    with pytest.raises(ValueError, match="end at 12, but prompt and new tokens need 13"):
        generate(model, [PROMPT], max_new_tokens=6, draft=draft, return_state=True)


@pytest.mark.parametrize("draft", [None, PromptLookup()], ids=["plain", "drafted"])
def test_positions_of_the_state_are_counted(draft):
    """Those of each row: a state of one row goes before every prompt, one of several before a prompt each."""
    model = small_model({**MODELS["learned positions"], "max_length": 12})
    present = torch.tensor([[True, True, True, True], [True, False, False, False]])
    _, state = model.extend(torch.tensor([[4, 4, 2, 1], [3, 0, 0, 0]]), key_mask=present)
    prompts, call = [[1], [1, 2, 3, 4]], {"state": state, "draft": draft}
    assert [len(row) for row in generate(model, prompts, max_new_tokens=8, **call)] == [8, 8]
    for words, more in (("14", {"max_new_tokens": 10}), ("13", {"max_new_tokens": 8, "return_state": True})):
        with pytest.raises(ValueError, match=f"end at 12, but state, prompt and new tokens need {words}"):
            generate(model, prompts, **call, **more)
    with pytest.raises(ValueError, match="end at 12, but state, prompt and new tokens need 13"):
        stream(model, [1], max_new_tokens=9, state=model.extend(torch.tensor([[4, 4, 2, 1]]))[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: stream(m, [[1]], max_new_tokens=1, draft=3), "PromptLookup.*int"),
        (lambda m: stream(m, [1], max_new_tokens=1, draft=PromptLookup(), compile=True), "but a draft makes calls"),
        (lambda m: PromptLookup(longest=2, shortest=3), "shortest must be at most longest"),
        (lambda m: PromptLookup(max_tokens=0), "max_tokens"),
        (lambda m: ModelDraft(m, max_tokens=0), "max_tokens"),
        (lambda m: Sampling(min_p=0.5), "temperature 0"),
        (lambda m: Sampling(temperature=1.0, min_p=1.5), "min_p must be in"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(small_model({"attention": "elu"}))
