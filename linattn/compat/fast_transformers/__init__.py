"""The encoder and decoder of fast-transformers, by the arguments of its builders."""

from linattn.compat.fast_transformers.models import ATTENTIONS, TransformerDecoder, TransformerEncoder, elu

__all__ = ["ATTENTIONS", "TransformerDecoder", "TransformerEncoder", "elu"]
