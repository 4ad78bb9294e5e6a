"""Errors for unknown names: they list the known ones and suggest the one that was probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches

# names that papers and other packages use
_OTHER_NAMES = {
    "performer": "favor",
    "favor+": "favor",
    "linear": "elu",
    "linear_transformer": "elu",
    "linear_attention": "elu",
    "elu": "elu_plus_one",
    "elu+1": "elu_plus_one",
    "elu_plus_one": "elu",
    "shen": "efficient",
    "efficient_attention": "efficient",
    "based": "taylor2",
    "lightning": "retention",
    "retnet": "retention",
    "sliding_window": "local",
    "swa": "local",
    "window": "local",
    "bucketed": "local_bucketed",
    "full": "softmax",
    "sdpa": "softmax",
    "vanilla": "softmax",
    "rms_norm": "rms",
    "rmsnorm": "rms",
    "layer_norm": "layer",
    "layernorm": "layer",
    "swiglu": "gated",
    "glu": "gated",
    "none": "None",
    "context_length": "max_length",
    "block_size": "max_length",
    "d_model": "dim",
    "n_embd": "dim",
    "hidden_size": "dim",
    "n_layer": "depth",
    "num_layers": "depth",
    "num_hidden_layers": "depth",
    "n_head": "num_heads",
    "nhead": "num_heads",
    "heads": "num_heads",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_key_heads",
}


def unknown_name(what: str, name: object, known: Iterable[object]) -> ValueError:
    """Return the error for an unknown name: `what` must be one of `known`. It suggests a similar name or a synonym."""
    names = [str(x) for x in known]
    return ValueError(f"{what} must be one of {', '.join(names)}, but is {name!r}{did_you_mean(name, names)}")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the question that ends an error, or an empty string."""
    known, word = list(known), str(name).strip().lower().replace("-", "_").replace(" ", "_")
    other = _OTHER_NAMES.get(word)
    nearest = [other] if other in known else get_close_matches(word, known, 1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
