"""Errors for unknown names: they list the known ones and suggest the one that was probably meant."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

Synonyms = Mapping[str, str]
"""Names that papers and other packages use, each with ours: lower case, with underscores."""


def synonyms(**others: str) -> Synonyms:
    """Return the synonyms. An option is one of our names, its value the others for it, with spaces between them."""
    return {other: ours for ours, names in others.items() for other in names.split()}


def unknown_name(what: str, name: object, known: Iterable[object], synonyms: Synonyms | None = None) -> ValueError:
    """Return the error "`what` must be one of `known`, but is `name`". It suggests a similar name or a synonym."""
    names = [str(x) for x in known]
    return ValueError(f"{what} must be one of {', '.join(names)}, but is {name!r}{did_you_mean(name, names, synonyms)}")


def did_you_mean(name: object, known: Iterable[str], synonyms: Synonyms | None = None) -> str:
    """Return " (did you mean …?)" for the end of an error, or "". Names may be options of the command line."""
    names, word = {_word(each): each for each in known}, _word(name)
    ours = (synonyms or {}).get(word)
    nearest = [ours] if ours in names else get_close_matches(word, names, 1)
    return f" (did you mean {names[nearest[0]]!r}?)" if nearest else ""


def _word(name: object) -> str:
    """Write a name, or an option, in lower case with underscores."""
    return str(name).strip().lower().replace("-", "_").replace(" ", "_").strip("_")
