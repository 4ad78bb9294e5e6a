"""One sequence, and one model, over many processes, with `torch.distributed`."""

from linattn.distributed.operators import causal_delta_attention, causal_linear_attention
from linattn.distributed.parts import SequencePart, last_state, sequence_loss, split_sequence
from linattn.distributed.sequence import SequenceSharding, shard_sequence

__all__ = [
    "SequencePart",
    "SequenceSharding",
    "causal_delta_attention",
    "causal_linear_attention",
    "last_state",
    "sequence_loss",
    "shard_sequence",
    "split_sequence",
]
