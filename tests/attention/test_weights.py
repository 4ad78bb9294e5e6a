"""The matrix of every attention: its product with any values is what the attention returns."""

import pytest
import torch
from torch.testing import assert_close

from linattn.attention import attention_weights
from tests.attention.cases import GATED, HEADS, GatesFromKeys, every_attention, heads, make


@every_attention
def test_the_matrix_gives_the_outputs(spec, causal):
    (q, k, v), inner, mask = heads(9), make(spec, causal), torch.rand(2, 1, 9) < 0.7
    gates = None
    if isinstance(inner, GatesFromKeys):
        inner, gates = inner.inner, inner.gates(k)
    if spec == "linformer_conv":
        with pytest.raises(ValueError, match="no single matrix"):
            attention_weights(inner, q, k)
        return
    for key_mask in (None, mask):
        weights = attention_weights(inner, q, k, key_mask=key_mask, gates=gates)
        assert_close(
            weights @ v.repeat_interleave(HEADS // k.shape[1], 1), inner(q, k, v, key_mask=key_mask, gates=gates)
        )
    assert weights.masked_select(~mask.unsqueeze(2)).count_nonzero() == 0


@pytest.mark.parametrize("spec", GATED)
def test_missing_gates_are_told(spec):
    inner, (q, k, _) = make(spec, True).inner, heads(5)
    with pytest.raises(ValueError, match="needs gates here, but none came"):
        attention_weights(inner, q, k)


@pytest.mark.usefixtures("unchecked")
def test_keys_are_checked_before_values_are_made_for_them():
    inner, (q, k, _) = make("elu", False), heads(9)
    for wrong in (None, k.numpy(), k[0], k[0, 0, 0], k.long(), 3.0):
        with pytest.raises(ValueError, match=r"\bk\b"):
            attention_weights(inner, q, wrong)
