"""Options of the wrong size or type are refused by name."""

import math

import pytest
import torch

from linattn.checks import check_boolean, check_numbers, check_sizes, given


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "1", None, (2, 0)])
def test_a_size_is_a_whole_number_of_at_least_one(size):
    check_sizes(width=3, lengths=(1, 2))
    with pytest.raises(ValueError, match="width must be a whole number of at least 1, but is"):
        check_sizes(depth=1, width=size)


def test_a_size_may_have_another_least_value():
    check_sizes(width=0, least=0)
    with pytest.raises(ValueError, match="width must be a whole number of at least 2, but is 1"):
        check_sizes(width=1, least=2)


@pytest.mark.parametrize("number", [-0.1, math.inf, math.nan, True, "1", None])
def test_a_number_is_finite(number):
    check_numbers(rate=0, base=2.5)
    with pytest.raises(ValueError, match="rate must be a finite number of at least 0, but is"):
        check_numbers(rate=number)


def test_a_mask_is_boolean():
    check_boolean(torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"starts must be boolean, True where a sequence begins, but is torch.int64"):
        check_boolean(torch.ones(3, dtype=torch.long), name="starts", meaning="a sequence begins")


def test_what_is_none_was_not_given():
    assert given(a=None, b=0, c=False) == {"b": 0, "c": False}
