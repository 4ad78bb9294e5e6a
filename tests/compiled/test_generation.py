"""A compiled step of decoding: one graph for all tokens, and the same tokens."""

import pytest
import torch
from torch._dynamo.utils import counters

from linattn.cli.main import main
from linattn.compat.linear_attention_transformer import LinearAttentionTransformerLM
from linattn.generation import Sampling, decoding, generate
from tests.models.causal import MODELS, small_model
from tests.serving.conftest import write_run

SAMPLING = Sampling(temperature=1.5, top_k=5)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Traced by dynamo and run by torch, as generating code would take minutes."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **options: compile(step, **options, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# each takes seconds; every attention's extension is compiled in its own tests
@pytest.mark.parametrize("name", ["mixture", "learned positions", "favor", "delta with convolutions of its own"])
def test_one_graph_serves_all_tokens(name):
    """Of two calls, the second of which goes on from a state, with draws."""
    model, prompts = small_model(MODELS[name], depth=1), [[1, 2, 3], [4]]
    counters.clear()
    for more in ({}, {"state": model.extend(torch.tensor([[5, 6, 7]]))[1]}):
        call = {"max_new_tokens": 6, "sampling": SAMPLING, "seed": 1, "return_state": True} | more
        expected, compiled = (generate(model, prompts, compile=compile, **call) for compile in (False, True))
        assert compiled[0] == expected[0]
        again = [generate(model, prompts, max_new_tokens=4, state=state) for _, state in (expected, compiled)]
        assert again[0] == again[1]
    assert counters["stats"]["unique_graphs"] == 1


def test_a_state_that_grows_is_refused():
    for name in ("softmax", "grouped keys"):
        with pytest.raises(ValueError, match="constant size, but that of SoftmaxAttention grows"):
            generate(small_model(MODELS[name]), [1], max_new_tokens=3, compile=True)
    # between its blocks
    model = LinearAttentionTransformerLM(13, 16, 1, 9, heads=2, causal=True, blindspot_size=4, n_local_attn_heads=1)
    with pytest.raises(ValueError, match="constant size, but that of BlindspotAttention grows"):
        generate(model, [1], max_new_tokens=3, compile=True)


@torch._dynamo.config.patch(recompile_limit=1)
def test_many_numbers_of_rows():
    """torch compiles a function for a few shapes only."""
    model = small_model({"attention": "elu"}, depth=1)
    for rows in (1, 2, 3):
        prompts, call = [[1, 2]] * rows, {"max_new_tokens": 3}
        assert generate(model, prompts, compile=True, **call) == generate(model, prompts, **call)
    assert len(decoding._COMPILED[model]) == 3


def test_the_command_writes_the_same(tmp_path, capsys):
    run = write_run(tmp_path / "run", small_model({"attention": "elu", "vocab_size": 257}, depth=1).float())
    options = ("--prompt", "a", "--temperature", "0", "--max-new-tokens", "5", "--cpu")
    texts = []
    for more in ((), ("--compile",)):
        assert main(["generate", str(run), *options, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    (tmp_path / "prompts.jsonl").write_text("")
    assert main(["generate", str(run), "--prompts", str(tmp_path / "prompts.jsonl"), "--compile"]) == 2
    assert "--compile is for a single --prompt" in capsys.readouterr().err
