"""Options of the encoder and decoder that no model can be made of."""

import pytest

from linattn.compat.fast_transformers import TransformerDecoder, TransformerEncoder, elu
from linattn.feature_maps import TaylorFeatureMap


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("model", [TransformerEncoder, TransformerDecoder])
def test_a_feature_map_is_made_by_a_function(model):
    kind = "attention_type" if model is TransformerEncoder else "self_attention_type"
    options = {"n_layers": 1, "n_heads": 2, "query_dimensions": 4, "value_dimensions": 4, kind: "linear"}
    model(**options, feature_map=elu)
    for wrong, came in (("elu", "'elu'"), (TaylorFeatureMap(), r"TaylorFeatureMap\(\)"), (None, "None")):
        with pytest.raises(ValueError, match=f"feature_map must be a function .* such as `elu`, but is {came}"):
            model(**options, feature_map=wrong)
