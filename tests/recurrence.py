"""The oracle of precision: the recurrence in float64, token by token, on the same rounded inputs. Inputs are rounded to
bfloat16, which float16 holds too, so that one oracle serves both dtypes."""

import torch
from torch import Tensor


def rounded(*shape: int, mean: float = 0.0) -> Tensor:
    return (torch.randn(*shape) + mean).bfloat16().double()


def log_decays(n: int) -> Tensor:
    """A head per kind: at random, strong, and those of retention, 1 − 2⁻⁵ to 1 − 2⁻⁸."""
    retention = [torch.tensor(1 - 2.0**-i).log() for i in range(5, 9)]
    constant = torch.tensor([-10.0, *retention]).unsqueeze(-1).expand(-1, n)
    return torch.cat([-torch.nn.functional.softplus(torch.randn(1, n)), constant]).bfloat16().double()


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor, log_decay: Tensor | None, normalize: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """S_i = exp(log_decay_i) S_{i−1} + φ(k_i) v_iᵀ, likewise z_i; y_i from S_i and z_i."""
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    kv = k.unsqueeze(-1) * v.unsqueeze(-2)
    if log_decay is None:
        S_all, z_all = S.unsqueeze(-3) + kv.cumsum(-3), z.unsqueeze(-2) + k.cumsum(-2)
    else:
        Ss, zs = [], []
        for a, key, outer in zip(log_decay.exp().unbind(-1), k.unbind(-2), kv.unbind(-3), strict=True):
            S, z = a[..., None, None] * S + outer, a[..., None] * z + key
            Ss.append(S)
            zs.append(z)
        S_all, z_all = torch.stack(Ss, -3), torch.stack(zs, -2)
    if normalize == "keys":
        q = q / z_all
    y = (q.unsqueeze(-1) * S_all).sum(-2)
    if normalize == "output":
        y = y / (q * z_all).sum(-1, keepdim=True)
    return y, S_all[..., -1, :, :], z_all[..., -1, :]


def relative(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()
