"""The products of the operator are counted as its chunks need them, and all measurements have their line."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.linear_operator import ATTENTIONS, PRODUCTS, batched_products, measure, operator_flop, shares


def test_the_products_are_counted():
    """In chunks of 64, and 13/4 as many with gradients."""
    queries, keys, values = torch.randn(3, 1, 2, 2, 64, 8)
    with FlopCounterMode(display=False) as counter:
        _ = (queries @ keys.mT) @ values + queries @ (keys.mT @ values)
    count = operator_flop(2 * 128, 8, 8, training=False)
    assert counter.get_total_flops() == count
    assert operator_flop(2 * 128, 8, 8, training=True) == 13 / 4 * count


def test_the_rate_counts_all_blocks():
    call, flop = batched_products()
    with FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() == flop


def test_every_attention_has_a_line(monkeypatch):
    monkeypatch.setattr("benchmarks.linear_operator.WARM", 0.0)
    measurements = measure(64, repeats=1)
    assert PRODUCTS in {each.method for each in measurements}
    assert len(list(shares(measurements))) == 2 * len(ATTENTIONS)
