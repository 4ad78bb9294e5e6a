"""Tokenizers that transformers can load, for the vocabularies of `linattn train`."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from linattn.models.storage import SEPARATOR, write_loader


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer whose tokens 0 … 255 are the bytes of UTF-8, and whose token 256 begins a document.

    Decoding the tokens of a text gives the text. The names of the tokens are GPT-2's names of bytes. Bytes that are not
    UTF-8 have tokens too, which `decode` shows as U+FFFD."""
    tokenizer = Tokenizer(models.BPE({name: byte for byte, name in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_separator(tokenizer, special_tokens_are_text=True)


def file_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer in `path`, a JSON file of the `tokenizers` package, with one more token, which begins a
    document."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _with_separator(tokenizer, special_tokens_are_text=False)


def save_for_transformers(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the files into `folder` that transformers reads beside a model's weights: the `tokenizer`, the tokens that
    begin and end a text, and the loader of our classes."""
    separator = tokenizer.bos_token_id
    tokenizer.save_pretrained(folder)
    GenerationConfig(bos_token_id=separator, eos_token_id=separator, pad_token_id=separator).save_pretrained(folder)
    write_loader(folder)


def _with_separator(tokenizer: Tokenizer, *, special_tokens_are_text: bool) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(SEPARATOR, special=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SEPARATOR} $A",
        pair=f"{SEPARATOR} $A $B",
        special_tokens=[(SEPARATOR, tokenizer.token_to_id(SEPARATOR))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        pad_token=SEPARATOR,
        padding_side="left",
        split_special_tokens=special_tokens_are_text,
        clean_up_tokenization_spaces=False,
    )
