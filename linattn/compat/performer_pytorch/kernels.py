"""The functions of performer-pytorch: random features as tensors, and attention on features. `data` is multiplied by
d^-¼ first unless `normalize_data` is False, and results are on `device` (None: where data is, or the CPU)."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.checks import check_numbers, check_tensors, check_types
from linattn.feature_maps import RandomProjection
from linattn.feature_maps.favor import half_squared_norm
from linattn.nn.checks import check_floats
from linattn.ops import linear
from linattn.ops.numerics import accumulator
from linattn.ops.state import LinearState

Device = torch.device | str | None
Features = Float[Tensor, "*b n f"]
KeyFeatures = Float[Tensor, "*b m f"]
Values = Float[Tensor, "*b n dv"]
KeyValues = Float[Tensor, "*b m dv"]


@check_types
def softmax_kernel(
    data: Float[Tensor, "*b n d"],
    *,
    projection_matrix: Float[Tensor, "f d"],
    is_query: bool,
    normalize_data: bool = True,
    eps: float = 1e-4,
    device: Device = None,
) -> Features:
    """Return (exp(Ωu − ‖u‖²/2 − max) + eps) / √f with u = data/d^¼ (or data itself) and Ω = `projection_matrix`.

    max is the largest of Ωu: per token if `is_query`, else over all keys, also those that are padding or that a causal
    query must not see. `FastAttention` subtracts no such maximum."""
    check_tensors(projection_matrix=projection_matrix)
    data = _checked(data, projection_matrix).to(device=device)
    projected = _projected(data, projection_matrix, normalize_data)
    half = half_squared_norm(data) * (1 if normalize_data else data.shape[-1] ** 0.5)
    largest = projected.amax(-1, keepdim=True)
    if not is_query and data.shape[-2]:
        largest = largest.amax(-2, keepdim=True)
    features = (projected - half.unsqueeze(-1) - largest).exp() + eps
    return (features * projection_matrix.shape[0] ** -0.5).to(data.dtype)


@check_types
def generalized_kernel(
    data: Float[Tensor, "*b n d"],
    *,
    projection_matrix: Float[Tensor, "f d"] | None,
    kernel_fn: Callable[[Tensor], Tensor] = torch.relu,
    kernel_epsilon: float = 0.001,
    normalize_data: bool = True,
    device: Device = None,
) -> Features:
    """Return kernel_fn(Ωu) + kernel_epsilon with u = data/d^¼ (or data itself) and Ω = `projection_matrix`, or
    kernel_fn(u) + kernel_epsilon if that is None."""
    data = _checked(data, projection_matrix).to(device=device)
    return (kernel_fn(_projected(data, projection_matrix, normalize_data)) + kernel_epsilon).to(data.dtype)


@check_types
def orthogonal_matrix_chunk(cols: int, device: Device = None) -> Float[Tensor, "d d"]:
    """Return the matrix of a rotation or reflection of `cols` dimensions, drawn uniformly."""
    return gaussian_orthogonal_random_matrix(cols, cols, scaling=1, device=device) / cols**0.5


@check_types
def gaussian_orthogonal_random_matrix(
    nb_rows: int, nb_columns: int, scaling: int = 0, device: Device = None
) -> Float[Tensor, "f d"]:
    """Return `nb_rows` random rows of `nb_columns` numbers; each `nb_columns` consecutive rows are orthogonal. Rows are
    as long as Gaussian vectors if `scaling` is 0, or √nb_columns long if it is 1."""
    return RandomProjection(nb_columns, nb_rows, scaling=scaling).rows.to(device=device)


def linear_attention(q: Features, k: KeyFeatures, v: KeyValues) -> Values:
    """Each query attends to all keys; q and k are features."""
    return linear.linear_attention(q, k, v)


@check_types
def causal_linear_attention(q: Features, k: Features, v: Values, eps: float = 0.0) -> Values:
    """Each query attends to the keys up to its own, in linear memory on any device.

    `eps` adds a key before the first one, with all features equal to `eps` and the value zero. This draws every output
    towards zero, the more the smaller the features are."""
    return linear.causal_linear_attention(q, k, v, _first_key(q, k, v, eps))[0]


@check_types
def causal_linear_attention_noncuda(
    q: Features, k: Features, v: Values, chunk_size: int = 128, eps: float = 0.0
) -> Values:
    """Compute `causal_linear_attention` in pieces of `chunk_size` tokens, each from the state after the piece before,
    as a recurrent network does. Memory beside the output is that of one piece."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be a number of tokens, at least 1, but is {chunk_size}")
    state, ys = _first_key(q, k, v, eps), []
    for q1, k1, v1 in zip(*(x.split(chunk_size, dim=-2) for x in (q, k, v)), strict=True):
        y, state = linear.causal_linear_attention(q1, k1, v1, state)
        ys.append(y)
    return torch.cat(ys, -2)


def _checked(data: Tensor, projection_matrix: Tensor | None) -> Tensor:
    check_floats(data, name="data")
    if data.ndim < 2:
        raise ValueError(f"data must be (…, n, d), but is {tuple(data.shape)}")
    if projection_matrix is not None:
        check_floats(projection_matrix, name="projection_matrix")
        shape, d = tuple(projection_matrix.shape), data.shape[-1]
        if len(shape) != 2 or shape[1] != d:
            raise ValueError(f"projection_matrix must be (f, {d}), as data has {d} channels, but is {shape}")
    return data


def _projected(data: Tensor, projection_matrix: Tensor | None, normalize_data: bool) -> Tensor:
    data = data.to(accumulator(data.dtype))
    u = data * data.shape[-1] ** -0.25 if normalize_data else data
    return u if projection_matrix is None else u @ projection_matrix.to(u).mT


def _first_key(q: Tensor, k: Tensor, v: Tensor, eps: float) -> LinearState | None:
    check_numbers(eps=eps)
    # whole sequences, before they are cut into pieces
    linear.causal_call(q, k, v, None, None, None, "output", "identity")
    if eps == 0:
        return None
    z = torch.full((*k.shape[:-2], k.shape[-1]), eps, dtype=accumulator(k.dtype), device=k.device)
    return LinearState(z.new_zeros(*z.shape, v.shape[-1]), z)
