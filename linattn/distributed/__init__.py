"""One sequence, and one model, over many processes, with `torch.distributed`."""

from linattn.distributed.sequence import SequenceSharding, last_state, sequence_loss, shard_sequence, split_sequence

__all__ = ["SequenceSharding", "last_state", "sequence_loss", "shard_sequence", "split_sequence"]
