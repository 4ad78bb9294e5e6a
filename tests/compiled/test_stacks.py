"""Models by composition are one graph, reversible ones too, in training and in evaluation."""

import copy

import pytest
import torch
from torch.testing import assert_close

from linattn.compat.linear_attention_transformer import LinearAttentionTransformerLM

OPTIONS = {"ff_glu": True, "emb_dim": 8, "local_attn_window_size": 8, "shift_tokens": True}
KINDS = {
    "the readme's": {"causal": True, "blindspot_size": 4, "n_local_attn_heads": 2, "reversible": True} | OPTIONS,
    "axial": {"attend_axially": True, "causal": True},
}


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("options", "masked"), [(KINDS["the readme's"], True), (KINDS["axial"], False)], ids=KINDS.keys()
)
def test_one_graph_forward_and_backward(options, masked):
    model = LinearAttentionTransformerLM(num_tokens=11, dim=16, depth=1, heads=4, max_seq_len=64, **options).double()
    twin, x = copy.deepcopy(model), torch.randint(11, (2, 24))
    mask = torch.arange(24) < torch.tensor([[24], [9]]) if masked else None
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    expected, y = model(x, input_mask=mask), compiled(x, input_mask=mask)
    assert_close(y, expected)
    expected.square().sum().backward()
    y.square().sum().backward()
    for (name, parameter), ours in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_close(ours.grad, parameter.grad, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        assert_close(compiled.eval()(x, input_mask=mask), expected)
