"""torch's own attention, `nn.MultiheadAttention`: modules with its signature, and its replacement in a model."""

from linattn.integrations.torch.linformer import LinearMultiheadAttention
from linattn.integrations.torch.multihead import TorchMultiheadAttention, with_inner
from linattn.integrations.torch.replacing import replace_attention

__all__ = ["LinearMultiheadAttention", "TorchMultiheadAttention", "replace_attention", "with_inner"]
