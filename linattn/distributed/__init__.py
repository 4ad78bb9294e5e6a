"""One sequence, and one model, over many processes, with `torch.distributed`."""

from linattn.distributed.operators import sharded_delta_attention, sharded_linear_attention
from linattn.distributed.parts import SequencePart, last_state, sequence_loss, split_sequence
from linattn.distributed.sequence import SequenceSharding, shard_sequence
from linattn.distributed.tensor import TensorSharding, tensor_parallel

__all__ = [
    "SequencePart",
    "SequenceSharding",
    "TensorSharding",
    "last_state",
    "sequence_loss",
    "shard_sequence",
    "sharded_delta_attention",
    "sharded_linear_attention",
    "split_sequence",
    "tensor_parallel",
]
