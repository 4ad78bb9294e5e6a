"""linear-attention-transformer's stack of layers."""

from typing import Any, final

from jaxtyping import Bool, Float
from torch import Tensor, nn

from linattn.compat.linear_attention_transformer.layers import Layers, LinformerContextSettings, LinformerSettings
from linattn.compat.linear_attention_transformer.options import STACK_RULES
from linattn.compat.options import check_options, select
from linattn.models.token_model import run_stack


@final
class LinearAttentionTransformer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), `depth` times: some heads look near, the others far, with
    linear attention. Without positions and without a last norm. Causal ones have `extend`.

    `max_seq_len` limits only what Linformer projects: any other stack takes any length."""

    def __init__(
        self,
        dim: int,
        depth: int,
        max_seq_len: int,
        heads: int = 8,
        dim_head: int | None = None,
        *,
        causal: bool = False,
        ff_chunks: int = 1,
        ff_glu: bool = False,
        ff_dropout: float = 0.0,
        attn_layer_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        reversible: bool = False,
        blindspot_size: int = 1,
        n_local_attn_heads: int | tuple[int, ...] = 0,
        local_attn_window_size: int = 128,
        receives_context: bool = False,
        attend_axially: bool = False,
        linformer_settings: LinformerSettings | None = None,
        context_linformer_settings: LinformerContextSettings | None = None,
        shift_tokens: bool = False,
        rotary: bool = False,
    ):
        check_options(LinearAttentionTransformer, STACK_RULES, locals())
        layers = Layers(**select(Layers, locals()))
        super().__init__()
        self.stack, self.causal, self.receives_context = layers.stack(), causal, receives_context
        self.pad_to_multiple = layers.pad_to_multiple

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        input_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Apply the layers. The masks are True where a token is present."""
        check_context(self.receives_context, context, context_mask)
        return run_stack(self.stack, self.causal, x, input_mask, context, context_mask)

    def extend(
        self,
        x: Float[Tensor, "b n d"],
        state: Any = None,
        input_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n d"], Any]:
        """Return what `forward` does, for the next tokens of sequences whose past and context are in `state`."""
        check_context(self.receives_context, context, context_mask)
        return self.stack.extend(x, state, key_mask=input_mask, context=context, context_mask=context_mask)


def check_context(receives_context: bool, context: Tensor | None, context_mask: Tensor | None) -> None:
    if context is not None and not receives_context:
        raise ValueError("a context was given, but nothing attends to it: receives_context is False")
    if context is None and context_mask is not None:
        raise ValueError("context_mask is of a context, but none was given")
