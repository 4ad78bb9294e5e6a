import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from linattn.feature_maps import ElementwiseFeatureMap
from linattn.ops.elementwise import ELEMENTWISE

FORMULAS = {
    "identity": lambda x: x,
    "elu_plus_one": lambda x: F.elu(x) + 1,
    "relu": lambda x: x * (x > 0),
    "squared_relu": lambda x: x**2 * (x > 0),
    "exp": lambda x: torch.e**x,
    "softplus": lambda x: (1 + x.exp()).log(),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_formula(name):
    x = torch.randn(2, 65, 7, dtype=torch.float64) * 3
    feature_map = ElementwiseFeatureMap(name)
    for features in (feature_map.query(x), feature_map.key(x)):
        assert features.function == name
        assert_close(features.value(), FORMULAS[name](x))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"one of identity, .*, but is 'gelu'"):
        ElementwiseFeatureMap("gelu")
