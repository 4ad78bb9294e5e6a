"""The encoder and decoder of fast-transformers, by the arguments of its builders."""

from linattn.compat.fast_transformers import weights
from linattn.compat.fast_transformers.models import ATTENTIONS, TransformerDecoder, TransformerEncoder, elu
from linattn.compat.weights.loading import CONVERSIONS

CONVERSIONS.update(weights.CONVERSIONS)

__all__ = ["ATTENTIONS", "TransformerDecoder", "TransformerEncoder", "elu"]
