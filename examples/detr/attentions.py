"""The attentions to choose from, each made for a number of keys; all have the signature of `nn.MultiheadAttention`."""

from collections.abc import Callable

from torch import nn

from linattn import LinearMultiheadAttention, TorchMultiheadAttention

Make = Callable[[int, int, int], nn.MultiheadAttention]


def _linear(name: str) -> Make:
    return lambda dim, heads, keys: TorchMultiheadAttention(dim, heads, batch_first=True, inner=name)


ATTENTIONS: dict[str, Make] = {
    "softmax": lambda dim, heads, keys: nn.MultiheadAttention(dim, heads, batch_first=True),
    "linformer": lambda dim, heads, keys: LinearMultiheadAttention(
        dim, heads, seq_len=keys, proj_k=64, param_sharing="headwise", batch_first=True
    ),
    **{name: _linear(name) for name in ("elu", "efficient", "taylor", "favor")},
}
