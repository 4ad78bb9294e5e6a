"""performer-pytorch's encoder and decoder."""

from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from linattn.checks import check_types
from linattn.compat.autoregressive import Filter, LogitsOrLoss, LossMask, SamplingOptions, top_k
from linattn.compat.options import read
from linattn.compat.performer_pytorch.autoregressive_wrapper import AutoregressiveWrapper
from linattn.compat.performer_pytorch.options import PerformerOptions
from linattn.compat.performer_pytorch.performer import PerformerLM
from linattn.compat.performer_pytorch.projection_updater import Redrawing
from linattn.nn.branch import Call
from linattn.nn.modes import evaluating
from linattn.types import ContextMask, TokenIds, TokenMask

# what makes them an encoder and a decoder
FIXED = {"enc_cross_attend": False, "dec_causal": True, "dec_cross_attend": True}


@final
class PerformerEncDec(Redrawing):
    """decoder(target, context=encoder(source)): two `PerformerLM`s whose arguments are given as `enc_…` and `dec_…`.

    `tie_token_embeds` gives both the same embedding; `tie_token_embed`, the name in performer-pytorch's readme, too.
    `no_projection` is for both, `enc_no_projection` and `dec_no_projection` for one of them. The encoder gives logits
    only with `enc_tie_embed`: training would never reach an output layer of its own."""

    @check_types
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
        of_encoder, of_decoder = _split(enc_and_dec)
        both: dict[str, Any] = {"dim": dim, "no_projection": no_projection}
        self.enc = _model("enc_", both, of_encoder | {"tie_embed": True})
        self.enc.tied = of_encoder.get("tie_embed", False)
        decoder = _model("dec_", both, of_decoder)
        if tie_token_embeds or tie_token_embed:
            sizes = self.enc.vocab_size, decoder.vocab_size
            if sizes[0] != sizes[1]:
                raise ValueError(f"tied embeddings need as many tokens in encoder and decoder, but there are {sizes}")
            self.enc.embedding = decoder.embedding
        self.dec = AutoregressiveWrapper(decoder, ignore_index=ignore_index, pad_value=pad_value)

    def forward(
        self,
        seq_in: Int[Tensor, "b m"],
        seq_out: TokenIds,
        enc_mask: ContextMask = None,
        dec_mask: LossMask = None,
        return_loss: bool = True,
    ) -> LogitsOrLoss:
        """Return the decoder's loss, or its logits. The masks are True where a token is present."""
        encodings = self.enc(seq_in, return_encodings=True, mask=enc_mask)
        return self.dec(seq_out, mask=dec_mask, context=encodings, context_mask=enc_mask, return_loss=return_loss)

    @check_types
    @torch.no_grad()
    def generate(
        self,
        seq_in: Int[Tensor, "b m"],
        seq_out_start: TokenIds,
        seq_len: int,
        eos_token: int | None = None,
        temperature: float = 1.0,
        filter_logits_fn: Filter = top_k,
        filter_thres: float = 0.9,
        repetition_penalty: float = 1.0,
        repetition_penalty_ctx: int = 32,
        enc_mask: ContextMask = None,
        dec_mask: TokenMask = None,
    ) -> Int[Tensor, "b k"]:
        """Generate as `AutoregressiveWrapper.generate` does. The source is read only once."""
        with evaluating(self):
            encodings = self.enc(seq_in, return_encodings=True, mask=enc_mask)
        sampling = SamplingOptions(
            temperature, filter_logits_fn, filter_thres, repetition_penalty, repetition_penalty_ctx
        )
        given = Call(dec_mask, encodings, enc_mask)
        return self.dec.draw_tokens(seq_out_start, seq_len, eos_token, sampling, given)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the encoder's and the decoder's options, named without enc_ and dec_. PerformerLM refuses wrong names."""
    parts: dict[str, dict[str, Any]] = {"enc_": {}, "dec_": {}}
    for name, value in (FIXED | options).items():
        if name[:4] not in parts:
            raise TypeError(f"PerformerEncDec has no argument {name!r}: those of its two parts begin with enc_ or dec_")
        if name in ("enc_dim", "dec_dim"):
            raise ValueError(f"the encoder and the decoder are as wide as each other: give dim, not {name}")
        if value != FIXED.get(name, value):
            raise ValueError(f"{name} can only be {FIXED[name]} in an encoder and decoder, but is {value}")
        parts[name[:4]][name[4:]] = value
    return parts["enc_"], parts["dec_"]


def _model(prefix: str, both: dict[str, Any], options: dict[str, Any]) -> PerformerLM:
    """Make the encoder or the decoder from the options of `both` and its own `options`. Messages put the `prefix`,
    "enc_" or "dec_", before the names of its own options."""
    try:
        return PerformerLM(read(PerformerOptions, PerformerLM, (), both | options, prefix=prefix))
    except TypeError as error:
        raise TypeError(f"the arguments {prefix}… of {error}") from None
    except ValueError as error:
        name = str(error).partition(" ")[0]
        raise ValueError(f"{prefix if name in options else ''}{error}") from None
