"""performer-pytorch's constructors with every kind of option, for the laws of tests/compat."""

from typing import Any

from torch import Tensor, nn

from linattn.compat.performer_pytorch import CrossAttention, Performer, PerformerLM, SelfAttention

ODD = {"shift_tokens": True, "ff_glu": True, "ff_chunks": 3}
NO_ROTARY = {"rotary_position_emb": False}
CAUSAL, DECODER = {"causal": True}, {"causal": True, "cross_attend": True}
# of each kind of model: a name, and what is not as `rows` has it
OPTIONS = {
    SelfAttention: {
        "local heads": {"local_heads": 1},
        "local heads, causal": CAUSAL | {"local_heads": 1, "rotary_position_emb": True},
        "all heads local": CAUSAL | {"local_heads": 4},
    },
    CrossAttention: {"plain": {}},
    Performer: {
        "plain": {"use_rezero": True},
        "causal": CAUSAL | ODD,
        "local heads": ODD | {"local_attn_heads": (1, 4)},
        "relu, causal": CAUSAL | {"generalized_attention": True, "local_attn_heads": 1},
        "no projection, causal": CAUSAL | {"no_projection": True, "use_scalenorm": True},
        "without a floor": CAUSAL | {"softmax_epsilon": 0.0},
        "reversible": ODD | {"reversible": True, "local_attn_heads": 1},
        "decoder": DECODER | {"local_attn_heads": 1},
        "reversible decoder": DECODER | ODD | {"reversible": True},
    },
    PerformerLM: {
        "plain": {},
        "encoder": ODD | {"local_attn_heads": (0, 2), "reversible": True},
        "the readme's": CAUSAL | ODD | {"local_attn_heads": 2, "reversible": True},
        "tied, learned positions": CAUSAL | NO_ROTARY | {"tie_embed": True, "qkv_bias": True},
        "axial positions, causal": CAUSAL | NO_ROTARY | {"axial_position_emb": True, "axial_position_shape": (8, 8)},
        "decoder": DECODER,
        "reversible decoder": DECODER | {"reversible": True, "local_attn_heads": 1, "attn_out_bias": True},
    },
}


def rows(vocabulary: int, dim: int, longest: int) -> list[dict[str, Any]]:
    """The fields of a `Constructor` for each."""
    sizes = {SelfAttention: {"dim": dim, "heads": 4, "dim_head": 6}}
    sizes[CrossAttention] = sizes[SelfAttention]
    sizes[Performer] = sizes[SelfAttention] | {"depth": 2}
    sizes[PerformerLM] = sizes[Performer] | {"num_tokens": vocabulary, "max_seq_len": longest}
    return [
        row(kind, name, sizes[kind] | options | _window(options))
        for kind, named in OPTIONS.items()
        for name, options in named.items()
    ]


def _window(options: dict[str, Any]) -> dict[str, Any]:
    """Small, where there are local heads: it is refused where there are none."""
    return {"local_window_size": 8} if {"local_heads", "local_attn_heads"} & set(options) else {}


def row(kind: type[nn.Module], name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": f"{kind.__name__}: {name}",
        "build": lambda: kind(**options),
        "call": cross if kind is CrossAttention else call,
        "extend": extend if options.get("causal") else None,
        "takes_tokens": kind is PerformerLM,
        "takes_context": kind is CrossAttention or options.get("cross_attend", False),
    }


def call(model: nn.Module, x: Tensor, mask: Tensor | None = None, **context: Tensor) -> Tensor:
    return model(x, mask=mask, **context)


def cross(model: nn.Module, x: Tensor, mask: Tensor | None = None, **context: Tensor) -> Tensor:
    """Queries do not see each other, so it has no use for their mask."""
    return model(x, **context)


def extend(model: Any, x: Tensor, state: Any, mask: Tensor | None = None, **context: Tensor) -> tuple[Tensor, Any]:
    return model.extend(x, state, mask=mask, **context)
