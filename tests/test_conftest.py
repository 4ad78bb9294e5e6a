"""The test run's own promises: shapes are checked, and uninitialised memory is NaN."""

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

from linattn.feature_maps import ScaledFeatureMap
from tests import checked


def test_annotated_shapes_are_checked():
    with pytest.raises(TypeCheckError, match="query"):
        ScaledFeatureMap().query("not a tensor")


def test_annotated_shapes_agree_with_each_other():
    from linattn.attention.base import group_queries

    with pytest.raises(TypeCheckError, match="group_queries"):
        group_queries(torch.zeros(2, 4, 8), 2)


def test_a_result_agrees_with_the_shapes_of_the_parameters():
    """A function that its annotations describe wrongly is found by its first call."""

    @jaxtyped(typechecker=checked)
    def doubled(x: Float[Tensor, " n"], times: int) -> Float[Tensor, " n"]:
        return x.repeat(times)

    assert len(doubled(torch.ones(3), 1)) == 3
    with pytest.raises(TypeCheckError, match="return value"):
        doubled(torch.ones(3), 2)
    with pytest.raises(TypeCheckError, match="parameter 'times'"):
        doubled(torch.ones(3), "2")


def test_uninitialised_memory_is_nan():
    assert torch.empty(3).isnan().all()
    assert torch.zeros(3).new_empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
