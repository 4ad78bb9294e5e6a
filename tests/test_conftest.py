"""The test run's own promises: shapes are checked, and uninitialised memory is NaN."""

import pytest
import torch
from jaxtyping import TypeCheckError

from linattn.feature_maps import ScaledFeatureMap


def test_annotated_shapes_are_checked():
    with pytest.raises(TypeCheckError, match="query"):
        ScaledFeatureMap().query("not a tensor")


def test_annotated_shapes_agree_with_each_other():
    from linattn.attention.base import group_queries

    with pytest.raises(TypeCheckError, match="group_queries"):
        group_queries(torch.zeros(2, 4, 8), 2)


def test_uninitialised_memory_is_nan():
    assert torch.empty(3).isnan().all()
    assert torch.zeros(3).new_empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
