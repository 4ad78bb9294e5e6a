"""A decoder that trains in parallel and generates as a recurrent network: the same weights, the same numbers."""

import math
from os import PathLike
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.models.block import Block, BlockSequence, make_norm
from linattn.models.config import LanguageModelConfig
from linattn.models.storage import read_config, read_tensors, write_model
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.nn import FeedForward, GatedConvolution, GatedFeedForward, LearnedPositions, MultiheadAttention

INIT_STD = 0.02


@final
class LanguageModel(TokenModel):
    """Embeddings, blocks, a last norm and the logits of the next token.

    A masked token (`key_mask` False, anywhere) counts as if it were not there; its own logits mean nothing."""

    def __init__(self, config: LanguageModelConfig):
        super().__init__()
        self.config, self.causal = config, config.causal
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = None if config.max_length is None else LearnedPositions(config.max_length, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.depth))
        self.norm = make_norm(config)
        self.tied = config.tie_embeddings
        self.head = None if self.tied else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    def get_stack(self) -> BlockSequence:
        return BlockSequence(self.blocks)

    def forward(
        self, tokens: Int[Tensor, "b n"], *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n v"]:
        """Return the logits of the token after each one; of the token itself, if the model is an encoder."""
        return self.logits(self.hidden(tokens, key_mask=key_mask))

    def extend(
        self,
        tokens: Int[Tensor, "b n"],
        state: TokenModelState | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n v"], TokenModelState]:
        """Return what `forward` does, for the next tokens of sequences whose past is in `state`, and the new state.

        `extend_hidden` saves making logits that are not needed."""
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
            if isinstance(module, (LanguageModel, MultiheadAttention, FeedForward, GatedFeedForward, GatedConvolution)):
                for name, child in module.named_children():
                    if isinstance(child, (nn.Linear, nn.Embedding)):
                        self._initialise(name, child)

    def _initialise(self, name: str, module: nn.Linear | nn.Embedding) -> None:
        joins_residual = name in ("o_proj", "down_proj")
        nn.init.normal_(module.weight, std=INIT_STD / math.sqrt(2 * self.config.depth) if joins_residual else INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write config.json and model.safetensors into the folder. Neither is ever there in part."""
        write_model(folder, self.config, self.state_dict())

    @staticmethod
    def load(folder: str | PathLike[str]) -> "LanguageModel":
        """Load what `save`, or our transformers class, wrote: on the CPU, in evaluation mode, in its own dtypes."""
        # the initial weights are thrown away: drawing them must not show in the caller's randomness
        with torch.random.fork_rng(devices=[]):
            model = LanguageModel(read_config(folder))
        model.load_state_dict(read_tensors(folder, model.state_dict()), assign=True)
        return model.eval()
