"""The drop-ins in one graph, at several lengths, with padding and in order."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn import LinearMultiheadAttention, TorchMultiheadAttention

DIM, HEADS = 16, 2


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


def compiled(module):
    return torch.compile(module, fullgraph=True, backend="aot_eager")


MASKS = {
    "none": lambda hidden: {},
    "bool": lambda hidden: {"key_padding_mask": hidden},
    "float": lambda hidden: {"key_padding_mask": torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)},
    "causal": lambda hidden: {"is_causal": True},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["elu"])
def test_one_graph(name, mask):
    attention = TorchMultiheadAttention(DIM, HEADS, batch_first=True, inner=name)
    module = compiled(attention)
    for n in (5, 70):
        x = torch.randn(3, n, DIM)
        hidden = torch.arange(n).expand(3, -1) >= torch.tensor([[n], [4], [1]])
        options = {"need_weights": False, **MASKS[mask](hidden)}
        y, _ = module(x, x, x, **options)
        assert_close(y, attention(x, x, x, **options)[0], rtol=1e-4, atol=1e-5)
        y.sum().backward()


def test_a_mask_that_adds_to_scores_is_an_error_in_a_graph_too():
    module = compiled(TorchMultiheadAttention(DIM, HEADS, inner="elu"))
    x = torch.randn(4, 2, DIM)
    with pytest.raises(RuntimeError, match="adds to the scores"):
        module(x, x, x, key_padding_mask=torch.randn(2, 4), need_weights=False)


def test_linformer_and_its_weights():
    attention = LinearMultiheadAttention(DIM, HEADS, seq_len=20, proj_k=4)
    x = torch.randn(7, 2, DIM)
    assert_close(compiled(attention)(x, x, x), attention(x, x, x))


def test_a_layer_of_torchs():
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, dropout=0.0, batch_first=True)
    layer.self_attn = TorchMultiheadAttention(DIM, HEADS, batch_first=True, inner="elu")
    x, hidden = torch.randn(3, 9, DIM), torch.arange(9).expand(3, -1) >= torch.tensor([[9], [4], [1]])
    for module in (layer.train(), layer.eval()):
        with torch.no_grad():
            assert_close(compiled(module)(x, src_key_padding_mask=hidden), module(x, src_key_padding_mask=hidden))
