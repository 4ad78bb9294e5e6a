"""Weights of linformer itself, over its options: the same outputs. And what the constructors here promise."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from linattn.compat import weights
from linattn.compat.linformer import Linformer, LinformerLM, LinformerSelfAttention
from tests.compat.weights.old import trained

package = pytest.importorskip("linformer")

SIZE = {"dim": 16, "seq_len": 30, "depth": 2, "k": 7, "heads": 4}
KINDS: list[dict[str, Any]] = [
    {},
    {"dim_head": 5},
    {"one_kv_head": True},
    {"share_kv": True},
    {"share_kv": True, "one_kv_head": True, "reversible": True},
    {"reversible": True, "dropout": 0.1},
]
every_kind = pytest.mark.parametrize("options", KINDS, ids=str)


@every_kind
@pytest.mark.parametrize("n", [1, 29, 30])
def test_language_models_give_their_outputs(options, n):
    config = SIZE | {"num_tokens": 19} | options
    old = trained(package.LinformerLM(**config))
    new, x = weights.load(LinformerLM, config, old.state_dict()), torch.randint(19, (2, n))
    assert_close(new(x), old(x), rtol=1e-10, atol=1e-10)


@every_kind
def test_stacks_give_their_outputs(options):
    config = SIZE | options
    old = trained(package.Linformer(**config))
    # its own names begin as those of a wrapper
    checkpoint = {f"net.{name}": tensor for name, tensor in old.state_dict().items()}
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    for saved in (old.state_dict(), checkpoint):
        assert_close(weights.load(Linformer, config, saved)(x), old(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"one_kv_head": True}, {"share_kv": True}], ids=str)
@pytest.mark.parametrize("m", [None, 11])
def test_layers_give_their_outputs(options, m):
    config = {"dim": 16, "seq_len": 30, "k": 7} | options
    old = trained(package.LinformerSelfAttention(**config))
    new = weights.load(LinformerSelfAttention, config, old.state_dict())
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    context = None if m is None else torch.randn(2, m, 16, dtype=torch.float64)
    assert_close(new(x, context), old(x, context), rtol=1e-10, atol=1e-10)


@every_kind
def test_a_masked_token_is_a_missing_token(options):
    """Theirs knows no masks."""
    model = LinformerLM(num_tokens=19, **SIZE | options).double().eval()
    x, mask = torch.randint(19, (1, 20)), torch.rand(1, 20) < 0.7
    assert_close(model(x, key_mask=mask)[mask], model(x[mask].unsqueeze(0))[0])


def test_shared_keys_and_values_train_as_one():
    layer = LinformerSelfAttention(16, 30, 7, share_kv=True)
    assert len([*layer.parameters()]) == 5 and len([*LinformerSelfAttention(16, 30, 7).parameters()]) == 7
