"""The state of a causal layer or model as a value: what it has read, in a size that does not depend on the length. It
can be forked, joined with others, made small, and kept in a file."""

from linattn.states.compression import Compressed, compress, restore
from linattn.states.file import StateFile, describe_state, fingerprint, load_state, save_state
from linattn.states.prefixes import Prefix, PrefixCache
from linattn.states.rows import concatenate, count_rows, detach, num_bytes, repeat, select, to
from linattn.states.segments import segmented_loss

__all__ = [
    "Compressed",
    "Prefix",
    "PrefixCache",
    "StateFile",
    "compress",
    "concatenate",
    "count_rows",
    "describe_state",
    "detach",
    "fingerprint",
    "load_state",
    "num_bytes",
    "repeat",
    "restore",
    "save_state",
    "segmented_loss",
    "select",
    "to",
]
