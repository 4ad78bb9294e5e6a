"""A decoder that trains in parallel and generates as a recurrent network: the same weights, the same numbers."""

import math
from os import PathLike
from typing import Any, NamedTuple, cast, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.attention.checks import for_batch
from linattn.models.block import Block, make_norm
from linattn.models.config import LanguageModelConfig
from linattn.models.storage import read_config, read_tensors, write_model
from linattn.nn import FeedForward, GatedConvolution, GatedFeedForward, MultiheadAttention
from linattn.nn.attention import count_positions
from linattn.nn.checks import check_indices
from linattn.ops.compaction import compact, pack, unpack
from linattn.ops.state import check_part, checked_kind, checked_parts

INIT_STD = 0.02


class LanguageModelState(NamedTuple):
    """The past of a batch of sequences: each block's, and the number of tokens where the positions are learned."""

    blocks: tuple[Any, ...]
    position: Int[Tensor, " b"] | None


@final
class LanguageModel(nn.Module):
    """Embeddings, blocks, a last norm and the logits of the next token.

    A masked token (`key_mask` False, anywhere) counts as if it were not there; its own logits mean nothing."""

    def __init__(self, config: LanguageModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.max_length, config.dim) if config.max_length is not None else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.depth))
        self.norm = make_norm(config)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        return self.config.max_length

    def forward(
        self, tokens: Int[Tensor, "b n"], *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n v"]:
        """The logits of the token after each one."""
        return self.logits(self.hidden(tokens, key_mask=key_mask))

    def extend(
        self,
        tokens: Int[Tensor, "b n"],
        state: LanguageModelState | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n v"], LanguageModelState]:
        """The same for the next tokens, any number of them, of sequences whose past is summed up in `state`."""
        x, state = self.extend_hidden(tokens, state, key_mask=key_mask)
        return self.logits(x), state

    def hidden(
        self, tokens: Int[Tensor, "b n"], *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """What `logits` takes."""
        check_indices(tokens, key_mask)
        if key_mask is not None:
            # padding on the right is future: with the present tokens on the left, no causal layer needs a mask
            where = compact(key_mask)
            return unpack(self.hidden(pack(tokens.unsqueeze(-1), where).squeeze(-1)), where, key_mask)
        x, _ = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def extend_hidden(
        self,
        tokens: Int[Tensor, "b n"],
        state: LanguageModelState | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n d"], LanguageModelState]:
        """What `logits` takes, for the next tokens; who needs few of the logits saves making the others."""
        check_indices(tokens, key_mask)
        if state is not None:
            state = for_batch(checked_kind(state, LanguageModelState), tokens.shape[0])
            check_part("position", state.position, None if self.positions is None else torch.int64)
        past = checked_parts(state and state.blocks, len(self.blocks))
        x, position = self.embed(tokens, state and state.position, key_mask=key_mask)
        states = []
        for block, block_state in zip(self.blocks, past, strict=True):
            x, block_state = cast(Block, block).extend(x, block_state, key_mask=key_mask)
            states.append(block_state)
        return self.norm(x), LanguageModelState(tuple(states), position)

    def embed(
        self,
        tokens: Int[Tensor, "b n"],
        position: Int[Tensor, " b"] | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n d"], Int[Tensor, " b"] | None]:
        """What the first block takes, and the position to go on from, None unless positions are learned."""
        if key_mask is not None:
            # a masked place may hold anything, so also what is no token
            tokens = tokens.masked_fill(~key_mask, 0)
        x = look_up(self.embedding, tokens, "tokens")
        if self.positions is not None:
            places, position = count_positions(x, position, key_mask)
            x = x + look_up(self.positions, places, "positions")
        return self.dropout(x), position

    def logits(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def reset_parameters(self) -> None:
        """GPT-2's initialisation, N(0, 0.02²), smaller by √(2·depth) where a block adds to the residual stream.

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
        """Writes config.json and model.safetensors into the folder, whole or not at all."""
        write_model(folder, self.config, self.state_dict())

    @staticmethod
    def load(folder: str | PathLike[str]) -> "LanguageModel":
        """What `save`, or our transformers class, wrote: on the CPU, in evaluation mode, in its own dtypes."""
        # the initial weights are thrown away: drawing them must not show in the caller's randomness
        with torch.random.fork_rng(devices=[]):
            model = LanguageModel(read_config(folder))
        model.load_state_dict(read_tensors(folder, model.state_dict()), assign=True)
        return model.eval()


def look_up(table: nn.Embedding, indices: Tensor, what: str) -> Tensor:
    try:
        return table(indices)
    except IndexError as error:
        low, high = int(indices.min()), int(indices.max())
        raise ValueError(f"{what} must be in [0, {table.num_embeddings}), but go from {low} to {high}") from error
