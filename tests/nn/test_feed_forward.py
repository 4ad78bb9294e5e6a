import torch
import torch.nn.functional as F
from torch.testing import assert_close

from linattn.nn import FeedForward, GatedFeedForward


def test_is_gpt2s():
    module, x = FeedForward(6, 10), torch.randn(2, 5, 6)
    up, down = module.up_proj, module.down_proj
    assert_close(module(x), F.gelu(x @ up.weight.mT + up.bias) @ down.weight.mT + down.bias)


def test_the_gated_one_is_swiglu():
    module, x = GatedFeedForward(6, 10), torch.randn(2, 5, 6)
    hidden = F.silu(x @ module.gate_proj.weight.mT) * (x @ module.up_proj.weight.mT)
    assert_close(module(x), hidden @ module.down_proj.weight.mT)


def test_dropout_is_on_the_output_in_training():
    for kind in (FeedForward, GatedFeedForward):
        module, x = kind(6, 10, dropout=0.5), torch.randn(2, 50, 6)
        y = module(x)
        kept = y != 0
        assert 0.3 < kept.float().mean() < 0.7
        assert_close(y[kept], (2 * module.eval()(x))[kept])
