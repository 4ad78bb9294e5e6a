"""A decoder that trains in parallel and generates as a recurrent network: the same weights, the same numbers."""

import math
from os import PathLike
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.checks import check_instances, check_types
from linattn.models.config import LanguageModelConfig
from linattn.models.storage import TOKENIZER, read_config, read_tensors, write_model
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.nn import FeedForward, GatedConvolution, GatedFeedForward, LearnedPositions, MultiheadAttention
from linattn.nn.gates import HeadDecay, PerChannelGate, WriteStrength
from linattn.nn.positions import INIT_STD
from linattn.nn.residual import Stack, Step
from linattn.ops.elementwise import squared_relu
from linattn.types import TokenIds, TokenMask, Tokens


@final
class LanguageModel(TokenModel):
    """Embeddings, blocks, a last norm and the logits of the next token, as the `config` describes them.

    A masked token (`key_mask` False, anywhere) counts as if it were not there; its own logits mean nothing."""

    def __init__(self, config: LanguageModelConfig):
        super().__init__()
        check_instances(LanguageModelConfig, config=config)
        self.config, self.causal = config, config.causal
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = None if config.max_length is None else LearnedPositions(config.max_length, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = BlockSequence(*(Block(config, layer) for layer in range(config.depth)))
        self.norm = _norm(config)
        self.tied = config.tie_embeddings
        self.head = None if self.tied else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    def get_stack(self) -> "BlockSequence":
        return self.blocks

    def forward(self, tokens: TokenIds, *, key_mask: TokenMask = None) -> Float[Tensor, "b n v"]:
        """Return the logits of the token after each one; of the token itself, if the model is an encoder."""
        return self.logits(self.hidden(tokens, key_mask=key_mask))

    def extend(
        self, tokens: TokenIds, state: TokenModelState | None = None, *, key_mask: TokenMask = None
    ) -> tuple[Float[Tensor, "b n v"], TokenModelState]:
        """Return what `forward` returns, for the next tokens of sequences whose past is in `state`, and the new state.
        Where no logits are needed, `extend_hidden` is cheaper."""
        x, state = self.extend_hidden(tokens, state, key_mask=key_mask)
        return self.logits(x), state

    def reset_parameters(self) -> None:
        """Draw GPT-2's initial weights, N(0, 0.02²), smaller by √(2·depth) where a block adds to the residual stream.

        Fills every parameter and buffer, so a model made on the meta device is complete after `to_empty` and this."""
        # random features first: they must agree on all ranks, and drawing sharded weights takes ranks' generators apart
        for module in sorted(self.modules(), key=lambda module: next(module.buffers(recurse=False), None) is None):
            if module is not self and callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        # learned feature maps keep their own initialisation: only these modules' own projections get GPT-2's
        for module in self.modules():
            if isinstance(module, _HAVE_PROJECTIONS):
                for name, child in module.named_children():
                    if isinstance(child, (nn.Linear, nn.Embedding)):
                        shrinks = math.sqrt(2 * self.config.depth) if name in ("o_proj", "down_proj") else 1
                        nn.init.normal_(child.weight, std=INIT_STD / shrinks)
                    if isinstance(child, nn.Linear) and child.bias is not None:
                        nn.init.zeros_(child.bias)
            if isinstance(module, MultiheadAttention):
                # its keys may begin as copies of its queries
                module.reset_parameters()

    @check_types
    def save(self, folder: str | PathLike[str]) -> None:
        """Write config.json, model.safetensors and a loader for transformers into the folder, no file half-written."""
        write_model(folder, self.config, self.state_dict())

    @staticmethod
    @check_types
    def load(folder: str | PathLike[str]) -> "LanguageModel":
        """Load what `save`, or our transformers class, wrote: on the CPU, in evaluation mode, in its own dtypes. With a
        tokenizer.json in the folder, `generate` takes text."""
        # the initial weights are thrown away: drawing them must not show in the caller's randomness
        with torch.random.fork_rng(devices=[]):
            model = LanguageModel(read_config(folder))
        model.load_state_dict(read_tensors(folder, model.state_dict()), assign=True)
        tokenizer = Path(folder) / TOKENIZER
        model.tokenizer_file = tokenizer if tokenizer.is_file() else None
        return model.eval()


# the modules whose projections get the initial weights of GPT-2
_HAVE_PROJECTIONS = (LanguageModel, MultiheadAttention, FeedForward, GatedFeedForward, GatedConvolution)
_HAVE_PROJECTIONS += (HeadDecay, PerChannelGate, WriteStrength)


@final
class Block(nn.Module):
    """x + mix(norm(x)), then x + feed_forward(norm(x)), with the attention or convolution of `layer` 0, 1, … as mix."""

    def __init__(self, config: LanguageModelConfig, layer: int):
        super().__init__()
        self.mixer_norm = _norm(config)
        self.mixer = config.mixer(layer)
        self.feed_forward_norm = None if config.feed_forward == "none" else _norm(config)
        self.feed_forward = _feed_forward(config)

    def forward(self, x: Tokens, *, key_mask: TokenMask = None) -> Tokens:
        return self._feed(x + self.mixer(self.mixer_norm(x), key_mask=key_mask))

    def extend(self, x: Tokens, state: Any = None, *, key_mask: TokenMask = None) -> tuple[Tokens, Any]:
        y, state = self.mixer.extend(self.mixer_norm(x), state, key_mask=key_mask)
        return self._feed(x + y), state

    def _feed(self, x: Tokens) -> Tokens:
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x
        return x + self.feed_forward(self.feed_forward_norm(x))


class BlockSequence(Stack, nn.Sequential):  # pyright: ignore[reportIncompatibleMethodOverride]
    """x ← block(x) for each block in turn. Its items are the blocks."""

    @property
    def depth(self) -> int:
        return len(self)

    def run(self, x: Tokens, step: Step) -> Tokens:
        for block in self:
            x = step(block, x)
        return x


def _norm(config: LanguageModelConfig) -> nn.Module:
    # 1e-6 and 1e-5 are relative to activations of about 1, which the norm itself makes: the customary values
    return nn.RMSNorm(config.dim, eps=1e-6) if config.norm == "rms" else nn.LayerNorm(config.dim)


def _feed_forward(config: LanguageModelConfig) -> FeedForward | GatedFeedForward | None:
    if config.feed_forward == "none":
        return None
    kind = GatedFeedForward if config.feed_forward == "gated" else FeedForward
    options: dict[str, Any] = {"dropout": config.dropout}
    if config.feed_forward == "squared_relu":
        options |= {"activation": squared_relu, "bias": False}
    return kind(config.dim, config.hidden_dim, **options)
