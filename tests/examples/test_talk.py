"""What the talk's pages claim, on small tensors, and each page from beginning to end."""

import math
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from examples.learning.task import IGNORED, Training
from examples.talk import captured, combined, gradient_memory, lookup, masked, recurrence, sharing, spectrum, theorem
from linattn import (
    LanguageModel,
    LanguageModelConfig,
    LinearAttention,
    LinearMultiheadAttention,
    MeanPooling,
    SoftmaxAttention,
    attention_weights,
)

PAGE = Path(__file__).parents[2] / "docs/talk.md"


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def stochastic(n):
    return (3 * tokens(n, n)).softmax(-1)


@pytest.fixture
def small(monkeypatch):
    """A masked model of a few weights, and a text."""
    for name, value in {"LENGTH": 16, "BATCH": 2, "TEST": 4, "DIM": 16, "DEPTH": 2, "HEADS": 2}.items():
        monkeypatch.setattr(masked, name, value)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return path


@pytest.fixture
def folder(small, text, tmp_path):
    masked.main(["--data", str(text), "--steps", "2", "--out", str(tmp_path / "masked")])
    return tmp_path / "masked"


def is_picture(path):
    return "</svg>" in path.read_text("utf-8")


# the spectrum


def test_the_spectrum_of_one_key_each_is_a_line_and_of_equal_rows_a_point():
    n = 65
    assert_close(spectrum.cumulative(torch.eye(n).double()), torch.arange(1, n + 1).double() / n)
    assert_close(spectrum.cumulative(torch.full((n, n), 1 / n).double()), torch.ones(n).double())


def test_the_cumulative_spectrum_rises_to_one_and_says_how_many_are_needed():
    curve = spectrum.cumulative(stochastic(63))
    assert (curve.diff() >= 0).all() and (curve.diff(n=2) <= 1e-12).all() and curve[-1].item() == pytest.approx(1)
    rank = spectrum.needed(curve, 0.9)
    assert curve[rank - 1] >= 0.9 > curve[rank - 2]


@pytest.mark.parametrize("causal", [False, True])
def test_captured_queries_keys_and_values_are_the_models_own(small, causal):
    config = LanguageModelConfig(vocab_size=70, dim=16, depth=2, num_heads=2, attention="softmax")
    model = LanguageModel(config) if causal else masked.make_model()
    text = torch.randint(66, (3, 16))
    layers = captured.capture(model, text)
    assert len(layers) == 2 and all(layer.causal == causal for layer in layers)
    P, v = layers[0].weights, layers[0].v.double()
    assert_close(P.sum(-1), torch.ones_like(P[..., 0]))
    assert_close((P @ v).float(), SoftmaxAttention(causal=causal)(*layers[0][:3]))
    assert bool(P.triu(1).any()) != causal
    # nobody listens any more
    model(text)
    assert len(layers) == 2


def test_a_model_without_softmax_is_refused():
    model = LanguageModel(LanguageModelConfig(vocab_size=70, dim=16, depth=1, num_heads=2, attention="elu"))
    with pytest.raises(ValueError, match="no layer with softmax attention"):
        captured.capture(model, torch.randint(66, (3, 16)))


def test_the_page_on_the_spectrum(folder, text, tmp_path, capsys):
    spectrum.main([str(folder), "--data", str(text), "--texts", "2", "--out", str(tmp_path / "masked.svg")])
    model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=16, depth=2, num_heads=2, attention="softmax"))
    model.save(tmp_path / "causal")
    spectrum.main(
        [str(tmp_path / "causal"), "--data", str(text), "--texts", "2", "--out", str(tmp_path / "causal.svg")]
    )
    assert capsys.readouterr().out.count("before training largest 4 of 16") == 2
    assert is_picture(tmp_path / "masked.svg") and is_picture(tmp_path / "causal.svg")


# Theorem 1


def test_the_mean_square_error_of_a_gaussian_projection_is_what_we_say():
    P, v = stochastic(63), tokens(63, 5)
    generator = torch.Generator().manual_seed(0)
    draws = [theorem.relative_error(theorem.projected(P, v, 16, generator), P @ v) for _ in range(2_000)]
    assert_close(torch.stack(draws).square().mean(0), theorem.spread(P, v) / 16, rtol=0.1, atol=0)


def test_the_promise_is_kept_for_equal_values_and_broken_for_values_of_mean_zero():
    n, k = 200, 200
    P, generator = torch.full((n, n), 1 / n).double(), torch.Generator().manual_seed(0)
    promised = theorem.promised_error(n, k)
    assert promised is not None
    equal, alternating = torch.ones(n, 1).double(), (-1.0) ** torch.arange(n).double()[:, None]
    # 1/n of a sum that is nearly nothing: ‖Pv‖ is small beside ‖P‖‖v‖, which is what the lemma forgets
    alternating[0] += 1
    for v, kept in ((equal, True), (alternating, False)):
        errors = [theorem.relative_error(theorem.projected(P, v, k, generator), P @ v).item() for _ in range(50)]
        assert (sorted(errors)[25] < promised) == kept


def test_a_promised_rank_gives_back_its_error():
    for epsilon in (0.1, 0.4, 0.6):
        k = math.ceil(theorem.promised_rank(512, epsilon))
        assert theorem.promised_error(512, k) == pytest.approx(epsilon, rel=1e-2)
    assert theorem.promised_error(512, math.floor(theorem.promised_rank(512, theorem.WIDEST))) is None
    assert theorem.promised_probability(512, math.ceil(theorem.promised_rank(512))) == pytest.approx(
        1 - 2 * 512 ** (1 - 5 / 4), abs=0.01
    )


def test_no_rank_k_matrix_is_nearer_than_the_truncated_one():
    P, one_hot, k = stochastic(40), torch.eye(40).double(), 10
    best = (theorem.truncated(P, one_hot, k) - P).norm()
    assert best < (theorem.projected(P, one_hot, k) - P).norm()
    assert_close(best, torch.linalg.svdvals(P)[k:].norm())
    assert_close(theorem.truncated(P, one_hot, 40), P)


def test_the_page_on_the_theorem(folder, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(theorem, "RANKS", (4, 16))
    monkeypatch.setattr(theorem, "LENGTHS", (8, 16))
    theorem.main([str(folder), "--data", str(text), "--texts", "2", "--out", str(tmp_path / "theorem.svg")])
    assert capsys.readouterr().out.count("\n| ") == 4 + 1 and is_picture(tmp_path / "theorem.svg")


# the recurrent form


def test_the_slide_is_the_layer_and_has_two_states_a_head():
    layer, f = recurrence.make_layer("elu", dim=24, num_heads=3).double(), torch.nn.Tanh()
    x = tokens(65, 24)
    parallel = f(layer(x[None])[0] + x)
    states, outputs = recurrence.first_states(layer, 3), []
    for token in x:
        y, states = recurrence.step(layer, f, token, states)
        outputs.append(y)
    assert_close(torch.stack(outputs), parallel, rtol=0, atol=1e-12)
    assert len(states.s) + len(states.z) == 2 * 3
    # the library's state is these 2h tensors
    _, state = layer.extend(x[None])
    assert_close(state.inner.sums.S.flatten(0, 2), torch.stack(states.s))
    assert_close(state.inner.sums.z.flatten(0, 2), torch.stack(states.z))


def test_the_state_stays_as_large_as_it_was_and_that_of_softmax_grows():
    sizes = {name: [size for _, size in recurrence.costs(name, (1, 64, 200), repeats=1)] for name in ("elu", "softmax")}
    d = recurrence.DIM // recurrence.HEADS
    assert sizes["elu"] == 3 * [4 * recurrence.HEADS * (d * d + d)]
    assert sizes["softmax"] == [4 * 2 * recurrence.DIM * n for n in (1, 64, 200)]


def test_the_page_on_the_recurrence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recurrence, "POSITIONS", (1, 8))
    recurrence.main(["--out", str(tmp_path / "recurrence.svg")])
    assert capsys.readouterr().out.count("\n| ") == 3 and is_picture(tmp_path / "recurrence.svg")
    assert max(recurrence.difference(63).values()) < 1e-12


# the memory of gradients


def test_all_ways_have_the_same_outputs_and_gradients():
    q, k, v = (tokens(65, 8).requires_grad_() for _ in range(3))
    upstream, found = tokens(65, 8), []
    for attention in gradient_memory.ATTENTIONS.values():
        y = attention(q, k, v)
        found.append((y, *torch.autograd.grad(y, (q, k, v), upstream)))
    for other in found[1:]:
        assert_close(other, found[0])


def test_naive_autograd_keeps_a_state_for_every_token_and_we_do_not():
    n, d, size = 512, 32, 4
    saved = {name: gradient_memory.saved_bytes(way, n, d) for name, way in gradient_memory.ATTENTIONS.items()}
    assert saved["sums"] >= n * d * d * size and saved["matrix"] >= n * n * size
    assert saved["ours"] <= 6 * n * d * size
    # twice the tokens: twice what is linear, four times what is not
    twice = {name: gradient_memory.saved_bytes(way, 2 * n, d) for name, way in gradient_memory.ATTENTIONS.items()}
    assert twice["ours"] < 2.2 * saved["ours"] and twice["matrix"] > 3 * saved["matrix"]


@pytest.mark.skipif(sys.platform == "win32", reason="has no resource module")
def test_the_page_on_memory(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gradient_memory, "LENGTHS", (64,))
    monkeypatch.setattr(gradient_memory, "peak_of_new_process", lambda name, n: 2**20)
    gradient_memory.main(["--out", str(tmp_path / "memory.svg")])
    assert capsys.readouterr().out.count("\n| ") == 1 and is_picture(tmp_path / "memory.svg")
    gradient_memory.main(["--peak", "ours", "64"])
    assert int(capsys.readouterr().out) >= 0


# the combinations


def test_the_talks_formula_is_what_the_slide_says():
    q, k, v = tokens(1, 2, 40, 8), tokens(1, 2, 40, 8), tokens(1, 2, 40, 8)
    inner = combined.gaussian(40, 10)["projected_features"].double()
    E = inner.key_projection.weight
    phi_q, phi_k = recurrence.phi(q), recurrence.phi(k)
    expected = phi_q @ ((E @ phi_k).mT @ (E @ v)) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))
    assert_close(inner(q, k, v), expected)


def test_a_gaussian_projection_of_features_is_linear_attention_plus_the_theorems_error():
    q, k, v = tokens(1, 1, 40, 8), tokens(1, 1, 40, 8), tokens(1, 1, 40, 3)
    linear, errors = LinearAttention(combined.elu()), []
    A = attention_weights(linear, q, k)
    for _ in range(1_000):
        y = combined.gaussian(40, 10)["projected_features"].double()(q, k, v)
        errors.append(theorem.relative_error(y, A @ v))
    assert_close(torch.stack(errors).square().mean(0), theorem.spread(A, v) / 10, rtol=0.15, atol=0)


def test_which_weights_may_be_negative_and_which_rows_sum_to_one():
    calls = [(tokens(2, 2, 64, 8), tokens(2, 2, 64, 8), tokens(2, 2, 64, 8))]
    random = combined.weights(calls, {name: x.double() for name, x in combined.gaussian(64, 16).items()})
    assert random["linear"][0] == 0 and random["linear"][1:] == pytest.approx((1, 1))
    assert random["projected_features"][0] > 0.05 and random["projected_features"][2] != pytest.approx(1, abs=1e-3)
    means = combined.weights(calls, {name: x.double() for name, x in combined.pooled(64, 16).items()})
    for name, (negative, least, largest) in means.items():
        assert negative == 0 and (least, largest) == pytest.approx((1, 1), abs=1e-6), name


def test_masked_keys_are_missing_keys_in_both_orders():
    q, k, v = tokens(2, 2, 9, 8), tokens(2, 2, 40, 8), tokens(2, 2, 40, 8)
    present = torch.arange(40) < 33
    for name in ("projected_features", "features_of_projected"):
        for make in (combined.gaussian, combined.pooled):
            inner = make(40, 10)[name].double()
            y = inner(q, k, v, key_mask=present.expand(2, 1, 40))
            changed = inner(
                q,
                k + 5 * ~present[:, None],
                torch.where(present[:, None], v, torch.nan),
                key_mask=present.expand(2, 1, 40),
            )
            assert_close(changed, y)
            assert_close(inner(q, k[..., :33, :], v[..., :33, :]), y)


def test_combining_costs_more_than_the_kernel_alone_at_every_length():
    for n in (512, 4096):
        cost = {name: combined.operations(inner, n) for name, inner in combined.cost_contenders(n).items()}
        assert cost["linear"] < cost["features_of_projected"] <= cost["projected_features"] < cost["linformer"]
        assert cost["favor_of_pooled"] < cost["favor"]
        assert cost["softmax"] == 4 * n * combined.CHANNELS


def test_exact_methods_have_no_error_and_the_mean_of_all_values_has():
    calls = [tuple(torch.randn(3, 1, 2, 64, 8))]
    found = combined.errors(calls, combined.pooled(64, 64))
    # windows of one token: nothing is projected
    assert found["linformer"]["softmax"] < 1e-5 and found["projected_features"]["linear"] < 1e-5
    assert found["features_of_projected"]["linear"] < 1e-5 and found["uniform"]["softmax"] > 0.1
    assert MeanPooling(64, 64).window == 1


def test_moved_facts_are_the_same_facts():
    recall = lookup.Moved(0)
    inputs, targets = recall.test
    pairs = 2 * lookup.PAIRS
    assert (inputs[:, :pairs] == 0).any()
    for row, wanted in zip(inputs[:50], targets[:50], strict=True):
        asked = (wanted != IGNORED).nonzero().flatten()
        for place in asked.tolist():
            beside = (row[:-1] == row[place]) & (row[1:] == wanted[place])
            assert beside.sum() == 1


def test_the_page_on_combining(folder, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lookup, "train", partial(lookup.train, settings=Training(steps=1, lr=1e-3, every=1)))
    monkeypatch.setattr("examples.learning.recall.TRAIN", 70)
    monkeypatch.setattr("examples.learning.recall.TEST", 5)
    runs = tmp_path / "lookup.jsonl"
    lookup.main(["--out", str(runs)])
    lines = runs.read_text().count("\n")
    lookup.main(["--out", str(runs)])
    assert runs.read_text().count("\n") == lines == len(lookup.TASKS) * len(lookup.ATTENTIONS)
    capsys.readouterr()
    for name, value in {"RANKS": (4, 8), "PROJECTED": 8, "LENGTHS": (16, 32), "TIMED": 32}.items():
        monkeypatch.setattr(combined, name, value)
    arguments = ["--data", str(text), "--texts", "2", "--lookup", str(runs), "--out", str(tmp_path / "combined.svg")]
    combined.main([str(folder), *arguments])
    assert "| φ(E K) | " in capsys.readouterr().out and is_picture(tmp_path / "combined.svg")


# the three ways of sharing


def test_what_each_way_of_sharing_shares():
    """The numbers of the paper's section 4, of LinearMultiheadAttention too, and the objects that are shared."""
    depth, heads, n, k = 3, 4, 40, 10
    made = {name: sharing.make(name, depth, heads, n, k) for name in sharing.SHARINGS}
    expected = {"none": 2 * depth * heads, "headwise": 2 * depth, "key-value": depth, "layerwise": 1}
    assert {name: sharing.numbers(inners) for name, inners in made.items()} == {
        name: count * n * k for name, count in expected.items()
    }
    for name in ("none", "headwise", "key-value"):
        torchs = LinearMultiheadAttention(8, heads, seq_len=n, proj_k=k, param_sharing=name).inner
        assert depth * sharing.numbers([torchs]) == sharing.numbers(made[name])
    assert len({inner.key_projection for inner in made["layerwise"]}) == 1
    for inner in made["key-value"]:
        assert inner.key_projection is inner.value_projection
    assert len({part for inner in made["headwise"] for part in (inner.key_projection, inner.value_projection)}) == 6


def test_all_ways_begin_as_one_and_learn():
    layers = [captured.Captured(*torch.randn(3, 8, 2, 24, 6), False) for _ in range(2)]
    for name in sharing.SHARINGS:
        inners = sharing.make(name, 2, 2, 24, 6)
        before = sharing.error(inners, layers)
        assert_close(before, sharing.error(sharing.make("none", 2, 2, 24, 6), layers))
        sharing.learn(inners, layers, steps=20)
        assert sharing.error(inners, layers) < before
    # nothing is projected, and so nothing is lost
    assert sharing.error(sharing.make("none", 2, 2, 24, 24), layers) < 1e-10


def test_the_page_on_sharing(folder, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sharing, "RANKS", (4, 8))
    monkeypatch.setattr(sharing, "STEPS", 2)
    sharing.main([str(folder), "--data", str(text), "--texts", "2", "--out", str(tmp_path / "sharing.svg")])
    assert capsys.readouterr().out.count("\n| ") == 2 * 4 and is_picture(tmp_path / "sharing.svg")


def test_a_masked_character_is_asked_for_and_hidden(small, text):
    source = masked.MaskedCharacters(text, 0)
    for inputs, targets in (source.batch(), source.test):
        hidden = inputs == masked.MASK
        assert torch.equal(hidden, targets != IGNORED) and (targets[hidden] < masked.VOCABULARY).all()


def test_a_model_is_loaded_as_it_was_saved(folder):
    model, again = masked.load(folder), captured.load(folder)
    inputs = torch.randint(66, (2, 16))
    assert_close(model(inputs), again(inputs), rtol=0, atol=0)
    assert not torch.equal(captured.untrained(model)(inputs), model(inputs))


# the figures of the page


def table(first: str) -> dict[str, list[str]]:
    """Return the rows of the page's table that begins with this head, by their first cells."""
    _, _, rest = PAGE.read_text("utf-8").partition(f"\n| {first}")
    _, _, *lines = rest.partition("\n\n")[0].splitlines()
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: cells for name, *cells in rows}


def test_the_pages_promises_are_the_theorems():
    for k, (promised, *_) in table("k, at n = 512 |").items():
        promise = theorem.promised_error(512, int(k))
        assert promised == ("nothing" if promise is None else f"{promise:.2f}")
    for n, (promised, _) in table("n | k promised").items():
        assert promised == f"{theorem.promised_rank(int(n)):.0f}"


@pytest.mark.parametrize("name", ["masked", "causal"])
def test_the_pages_spectrum_is_that_of_its_picture(name):
    """The heat map of the same run has the share of each head, in two digits."""
    picture = (PAGE.parent / f"talk-spectrum-{name}.svg").read_text("utf-8")
    shares = [float(x) for x in re.findall(r">([01]\.\d\d)</text>", picture)]
    mean, span, *_ = table("| share of the largest 128")[f"{name} model"]
    assert float(mean) == pytest.approx(sum(shares) / len(shares), abs=0.0101)
    assert span == f"{min(shares):.2f} … {max(shares):.2f}"


# the rows of the table by the names that the program has
OPERATIONS = {
    "softmax": "softmax",
    "Linformer": "linformer",
    "kernel, φ = elu + 1": "linear",
    "E φ(K)": "projected_features",
    "φ(E K)": "features_of_projected",
    "FAVOR+ of 256 features": "favor",
    "FAVOR+ of pooled keys": "favor_of_pooled",
    "Linformer, pooled": "linformer_pooled",
}


def test_the_pages_operations_are_those_of_the_methods():
    rows = table("| per token, n = 512")
    for place, n in enumerate((512, 16_384)):
        counted = {name: f"{combined.operations(inner, n):,.0f}" for name, inner in combined.cost_contenders(n).items()}
        assert {OPERATIONS[name]: figures[place] for name, figures in rows.items()} == counted


def test_the_pages_memory_is_what_autograd_saves():
    for place, name in ((0, "sums"), (2, "matrix"), (4, "ours")):
        saved = gradient_memory.saved_bytes(gradient_memory.ATTENTIONS[name], 1_024) / 2**20
        assert table("n | through all S")["1,024"][place] == f"{saved:.1f}"
