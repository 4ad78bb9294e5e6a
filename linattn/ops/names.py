"""Errors for unknown names: they list the known ones and suggest the one that was probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches

# names that papers and other packages use
_SYNONYMS = {
    "favor": "performer favor+",
    "elu": "linear linear_transformer linear_attention elu_plus_one",
    "elu_plus_one": "elu elu+1",
    "efficient": "shen efficient_attention",
    "taylor2": "based",
    "retention": "lightning retnet",
    "gla": "gated_linear_attention",
    "ssd": "mamba2 mamba_2",
    "delta": "deltanet delta_net",
    "gated_delta": "gated_deltanet gated_delta_net",
    "kda": "kimi_delta_attention kimi_linear",
    "local": "sliding_window swa window",
    "local_bucketed": "bucketed",
    "softmax": "full sdpa vanilla",
    "rms": "rms_norm rmsnorm",
    "layer": "layer_norm layernorm",
    "gated": "swiglu glu",
    "max_length": "context_length block_size",
    "dim": "d_model n_embd hidden_size",
    "depth": "n_layer num_layers num_hidden_layers",
    "num_heads": "n_head nhead heads num_attention_heads",
    "num_key_heads": "num_key_value_heads",
}
_OTHER_NAMES = {other: name for name, others in _SYNONYMS.items() for other in others.split()}


def unknown_name(what: str, name: object, known: Iterable[object]) -> ValueError:
    """Return the error for an unknown name: `what` must be one of `known`. It suggests a similar name or a synonym."""
    names = [str(x) for x in known]
    return ValueError(f"{what} must be one of {', '.join(names)}, but is {name!r}{did_you_mean(name, names)}")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the question that ends an error, or an empty string."""
    names, word = {_word(each): each for each in known}, _word(name)
    other = _OTHER_NAMES.get(word)
    nearest = [other] if other in names else get_close_matches(word, names, 1)
    return f" (did you mean {names[nearest[0]]!r}?)" if nearest else ""


def _word(name: object) -> str:
    """Write a name, or an option of the command line, as the names of the table are written."""
    return str(name).strip().lower().replace("-", "_").replace(" ", "_").strip("_")
