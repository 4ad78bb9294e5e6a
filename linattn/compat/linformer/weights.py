"""Weights of linformer 0.2.3."""

from torch import nn

from linattn.compat.linformer.linformer import Linformer, LinformerLM, LinformerSelfAttention
from linattn.compat.weights import layers
from linattn.compat.weights.conversion import Conversion, Moves, renamed, within


def _language_model(model: LinformerLM, aligned: bool) -> Moves:
    yield from renamed(model, {"embedding": "token_emb", "positions": "pos_emb", "head": "to_logits"})
    yield from within("linformer", "linformer", _linformer(model.linformer, aligned))


def _linformer(model: Linformer, _: bool) -> Moves:
    stack = layers.stack(model.net, layers.linformer, layers.feed_forward, wrappers=0)
    yield from within("net", "net", stack)


CONVERSIONS: dict[type[nn.Module], Conversion] = {
    LinformerLM: Conversion(_language_model, roots=("token_emb.",)),
    Linformer: Conversion(_linformer, roots=("net.layers.", "net.blocks.")),
    LinformerSelfAttention: Conversion(
        lambda model, _: within("attention", "", layers.linformer(model.attention)), roots=("to_q.",)
    ),
}
