"""performer-pytorch's model in one graph, in training too: their counter breaks it in four places."""

import copy

import pytest
import torch
from torch.testing import assert_close

from linattn.compat.performer_pytorch import AutoregressiveWrapper, PerformerLM


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


def make(**options) -> PerformerLM:
    return PerformerLM(num_tokens=19, max_seq_len=64, dim=16, depth=1, heads=2, dim_head=8, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "local_attn_heads": 1, "local_window_size": 8, "shift_tokens": True, "ff_glu": True},
        {"generalized_attention": True, "reversible": True, "use_scalenorm": True},
    ],
    ids=["causal", "reversible"],
)
def test_training_is_one_graph_that_redraws(options):
    model = make(feature_redraw_interval=2, **options)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    drawn = set()
    for _ in range(5):
        x = torch.randint(19, (2, 40))
        expected, actual = model(x), compiled(x)
        assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        expected.square().mean().backward(), actual.square().mean().backward()
        drawn.add(int(other.performer.proj_updater.seed))
    assert len(drawn) == 3
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(theirs.grad, mine.grad, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_evaluation_is_exported():
    model, x = make(causal=True).eval(), torch.randint(19, (2, 40))
    program = torch.export.export(model, (x,))
    assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_wrapper_takes_a_compiled_model():
    model, x = make(causal=True).eval(), torch.randint(1, 19, (2, 9))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    plain, wrapped = AutoregressiveWrapper(model), AutoregressiveWrapper(compiled)
    assert_close(wrapped(x), plain(x))
    assert torch.equal(wrapped.generate(x, 3, temperature=0), plain.generate(x, 3, temperature=0))
