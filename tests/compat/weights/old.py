"""What a checkpoint of another package is: its `state_dict` after training, which random weights stand for."""

import torch
from torch import nn


@torch.no_grad()
def trained(model: nn.Module, seed: int = 0) -> nn.Module:
    """No weight is as it was made: no norm is 1, no bias 0, no ReZero nearly nothing. In float64 and evaluation."""
    torch.manual_seed(seed)
    model = model.double().eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tables(model: nn.Module) -> None:
    """Their tables of sinusoids and angles are float32, whose angles are a little off; here exact ones."""
    for name in ("pos_emb", "layer_pos_emb"):
        part = getattr(model, name, None)
        if getattr(part, "emb", None) is not None and isinstance(part.emb, torch.Tensor):
            n, d = part.emb.shape
            angles = torch.arange(n).double()[:, None] * 10000.0 ** (-torch.arange(0, d, 2).double() / d)
            table = torch.cat([angles.sin(), angles.cos()], -1)
            part.emb = table
    for part in model.modules():
        if hasattr(part, "inv_freq"):
            d = 2 * len(part.inv_freq)
            part.inv_freq = 10000.0 ** (-torch.arange(0, d, 2).double() / d)
