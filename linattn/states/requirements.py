"""Refusals of models whose state cannot serve a purpose."""

from linattn.attention.base import InnerAttention, KeysAndValues
from linattn.models.token_model import TokenModel


def require_causal(model: TokenModel, purpose: str) -> None:
    """Raise ValueError for what is no model of tokens, or has attention and is not causal; `purpose` names the caller
    in the message."""
    # a compiled model has the attributes of its own, and not its class
    if not hasattr(model, "extend_hidden"):
        what = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        raise ValueError(f"{purpose} needs a TokenModel, such as a LanguageModel, but this is {what}")
    if not model.causal and any(isinstance(part, InnerAttention) for part in model.modules()):
        raise ValueError(f"{purpose} needs a causal model, but this {type(model).__name__} is not")


def require_constant_state(model: TokenModel, purpose: str) -> None:
    """Raise ValueError if the state of an attention of the model grows with every token."""
    for part in model.modules():
        kind = part.state_kind if isinstance(part, InnerAttention) else None
        if KeysAndValues in (kind, *getattr(kind, "__annotations__", {}).values()):
            name = type(part).__name__
            raise ValueError(f"{purpose} needs a state of constant size, but that of {name} grows with every token")
