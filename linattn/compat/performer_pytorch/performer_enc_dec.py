"""performer-pytorch's encoder and decoder."""

from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.compat.autoregressive import Filter, top_k
from linattn.compat.performer_pytorch.autoregressive_wrapper import AutoregressiveWrapper
from linattn.compat.performer_pytorch.language_model import PerformerLM
from linattn.models.generation import evaluating

# what makes them an encoder and a decoder
FIXED = {"enc_cross_attend": False, "dec_causal": True, "dec_cross_attend": True}


@final
class PerformerEncDec(nn.Module):
    """decoder(target, context=encoder(source)): two `PerformerLM`s whose arguments are given as `enc_…` and `dec_…`.

    `tie_token_embeds` gives both the same embedding; `tie_token_embed`, the name in performer-pytorch's readme, too.
    `no_projection` is for both, `enc_no_projection` and `dec_no_projection` for one of them. The encoder gives logits
    only with `enc_tie_embed`: training would never reach an output layer of its own."""

    def __init__(
        self,
        dim: int,
        ignore_index: int = 0,
        pad_value: int = 0,
        tie_token_embeds: bool = False,
        no_projection: bool = False,
        *,
        tie_token_embed: bool = False,
        **enc_and_dec: Any,
    ):
        super().__init__()
        _check_fixed(enc_and_dec)
        both: dict[str, Any] = {"dim": dim, "no_projection": no_projection}
        of_encoder, of_decoder = (both | options for options in _split(enc_and_dec | FIXED))
        gives_logits = of_encoder.pop("tie_embed", False)
        self.enc = PerformerLM(**of_encoder, tie_embed=True)
        self.enc.tied = gives_logits
        decoder = PerformerLM(**of_decoder)
        if tie_token_embeds or tie_token_embed:
            self._tie(decoder)
        self.dec = AutoregressiveWrapper(decoder, ignore_index=ignore_index, pad_value=pad_value)

    def forward(
        self,
        seq_in: Int[Tensor, "b m"],
        seq_out: Int[Tensor, "b n"],
        enc_mask: Bool[Tensor, "b m"] | None = None,
        dec_mask: Bool[Tensor, "b k"] | None = None,
        return_loss: bool = True,
    ) -> Float[Tensor, "..."]:
        """Return the decoder's loss, or its logits. The masks are True where a token is present."""
        encodings = self.enc(seq_in, return_encodings=True, mask=enc_mask)
        return self.dec(seq_out, mask=dec_mask, context=encodings, context_mask=enc_mask, return_loss=return_loss)

    @torch.no_grad()
    def generate(
        self,
        seq_in: Int[Tensor, "b m"],
        seq_out_start: Int[Tensor, "b n"],
        seq_len: int,
        eos_token: int | None = None,
        temperature: float = 1.0,
        filter_logits_fn: Filter = top_k,
        filter_thres: float = 0.9,
        repetition_penalty: float = 1.0,
        repetition_penalty_ctx: int = 32,
        enc_mask: Bool[Tensor, "b m"] | None = None,
        dec_mask: Bool[Tensor, "b n"] | None = None,
    ) -> Int[Tensor, "b k"]:
        """Generate as `AutoregressiveWrapper.generate` does. The source is read only once."""
        with evaluating(self):
            encodings = self.enc(seq_in, return_encodings=True, mask=enc_mask)
        return self.dec.generate(
            seq_out_start,
            seq_len,
            eos_token,
            temperature,
            filter_logits_fn,
            filter_thres,
            repetition_penalty,
            repetition_penalty_ctx,
            mask=dec_mask,
            context=encodings,
            context_mask=enc_mask,
        )

    def check_redraw_projections(self) -> None:
        """Count a training step of both."""
        self.enc.check_redraw_projections()
        self.dec.net.check_redraw_projections()

    def fix_projection_matrices_(self) -> None:
        """Never resample the random features of both again."""
        self.enc.fix_projection_matrices_()
        self.dec.net.fix_projection_matrices_()

    def _tie(self, decoder: PerformerLM) -> None:
        sizes = self.enc.vocab_size, decoder.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(f"tied embeddings need as many tokens in encoder and decoder, but there are {sizes}")
        self.enc.embedding = decoder.embedding


def _check_fixed(options: dict[str, Any]) -> None:
    for name, value in FIXED.items():
        if options.get(name, value) != value:
            raise ValueError(f"{name} can only be {value} in an encoder and decoder, but is {options[name]}")
    for name in ("enc_dim", "dec_dim"):
        if name in options:
            raise ValueError(f"the encoder and the decoder are as wide as each other: give dim, not {name}")


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the encoder's options and the decoder's. PerformerLM itself refuses the ones that it does not know."""
    parts: dict[str, dict[str, Any]] = {"enc_": {}, "dec_": {}}
    for name, value in options.items():
        if name[:4] not in parts:
            raise TypeError(f"PerformerEncDec has no argument {name!r}: those of its two parts begin with enc_ or dec_")
        parts[name[:4]][name[4:]] = value
    return parts["enc_"], parts["dec_"]
