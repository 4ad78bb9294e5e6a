"""Linear attention: y_i = φ(q_i) S_i / (φ(q_i)·z_i) with S_i = Σ_j φ(k_j) v_jᵀ and z_i = Σ_j φ(k_j), over all keys j
or, causally, over j ≤ i. Katharopoulos et al., Transformers are RNNs, https://arxiv.org/abs/2006.16236, eq. 6–9.

(S, z) is a state, to which later tokens are added. Outputs do not depend on how a sequence is divided between calls."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.checks import check_boolean, check_tensors, on_one_device
from linattn.names import unknown_name
from linattn.ops.calls import CausalCall, ReadCall, SumCall
from linattn.ops.elementwise import ELEMENTWISE, SYNONYMS
from linattn.ops.nested import checked_kind
from linattn.ops.numerics import accumulator, align, divide, expand, is_readable, summable
from linattn.ops.operator import Operator
from linattn.ops.operators import CAUSAL, GATED, READ, SHARED, SUM_KEYS
from linattn.ops.state import LinearState

NORMALIZATIONS = ("output", "keys", None)

# the log decay at which the state is forgotten: its exponential is zero in every dtype; in cumulative sums a larger
# number would erase the digits of the others
FORGETS = -1e4


def causal_linear_attention(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b n d"],
    v: Float[Tensor, "*#b n dv"],
    /,
    state: LinearState | None = None,
    *,
    # (…, n), or (…, n, d): one annotation for both would take either for the other
    log_decay: Float[Tensor, "..."] | None = None,
    key_mask: Bool[Tensor, "*#b #n"] | None = None,
    normalize: str | None = "output",
    feature_map: str = "identity",
    backend: str | None = None,
) -> tuple[Float[Tensor, "*b n dv"], LinearState]:
    """Attend from each query in `q` to the keys in `k` up to its own, and to those summed in `state` (None: no past).

    S_i = diag(exp(log_decay_i)) S_{i-1} + φ(k_i) v_iᵀ, likewise z_i; then `normalize` chooses y_i = φ(q_i) S_i /
    φ(q_i)·z_i ("output"), or each feature normalised by itself, y_i = (φ(q_i) / z_i) S_i ("keys"), or y_i = φ(q_i) S_i
    (None).

    `feature_map` names φ in `ELEMENTWISE`. `v` holds a value per key, and `key_mask` is True for each present token
    (None: all). `log_decay` holds numbers ≤ 0 (None: zeros): one per channel if it has k's last two sizes and at least
    as many dimensions as k (gated linear attention, https://arxiv.org/abs/2312.06635, eq. 3), otherwise one per token.
    Leading dimensions broadcast. `backend` is a name that `explain_backend` lists, or None: the first that can run.

    A masked token is a missing one: it adds nothing and nothing decays. A log decay of −inf, or of −10⁴ and less,
    begins a new sequence. A positive one raises an error on a CPU, but is not checked on a GPU or in a compiled graph.
    A query that sees no key gets zeros. The state is float32, or float64 for float64 inputs.

    A decay per channel is rounded at each token: in float32, a constant log decay between −10⁻⁵ and −2·10⁻⁸ leaves an
    error of 1e-3 to 3e-3 in the state after 200,000 tokens; per head it is 2e-4.

    NaN in a present token reaches the tokens of its chunk and all later ones, also those of later sequences of a packed
    batch. Mask the tokens of documents that may hold NaN: whatever a masked token holds reaches no output.

    Raises ValueError for shapes and names that do not fit, NotImplementedError if no backend can run the call."""
    operator, call = causal_call(q, k, v, state, log_decay, key_mask, normalize, feature_map)
    y, S, z = operator.choose(call, backend)(call)
    return y, LinearState(S, z)


def linear_attention(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m dv"],
    /,
    *,
    key_mask: Bool[Tensor, "*#b #m"] | None = None,
    normalize: str | None = "output",
    feature_map: str = "identity",
    backend: str | None = None,
) -> Float[Tensor, "*b n dv"]:
    """Attend from each query in `q` to all keys in `k`, each with its value in `v`: `read` of the sums of `summarize`.
    Queries and keys may differ in number.

    The options `key_mask`, `normalize` and `feature_map`, and errors, are those of `causal_linear_attention`; `backend`
    is "triton", "chunked", "reference" or None, the first that can run."""
    q, k, v = checked(q, k, v, normalize, feature_map)
    keys = sum_call(k, v, key_mask, feature_map)
    broadcast(q=q.shape[:-2], keys=keys.lead)
    S, z = SUM_KEYS.choose(keys, backend)(keys)
    queries = read_call(q, S, z, normalize, feature_map, v.dtype)
    return READ.choose(queries, backend)(queries)[0]


def summarize(
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m dv"],
    /,
    *,
    key_mask: Bool[Tensor, "*#b #m"] | None = None,
    feature_map: str = "identity",
) -> LinearState:
    """S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j) over all keys in `k` and values in `v` where `key_mask` is True
    (None: all), computed once, for instance of an encoder's output. `feature_map` names φ in `ELEMENTWISE`.

    Raises ValueError for shapes and names that do not fit."""
    check_tensors(k=k, v=v)
    k, _, v = checked(k, k, v, None, feature_map)
    call = sum_call(k, v, key_mask, feature_map)
    return LinearState(*SUM_KEYS.choose(call)(call))


def read(
    q: Float[Tensor, "*#b n d"],
    state: LinearState,
    /,
    *,
    normalize: str | None = "output",
    feature_map: str = "identity",
) -> Float[Tensor, "*b n dv"]:
    """y_i = φ(q_i) S / (φ(q_i)·z), or (φ(q_i) / z) S, or φ(q_i) S, as `normalize` is "output", "keys" or None: each
    query in `q` sees the whole `state`. `feature_map` names φ in `ELEMENTWISE`, as it did for the keys.

    Raises ValueError for shapes and names that do not fit."""
    S, z = checked_kind(state, LinearState)
    check_tensors(q=q, S=S, z=z)
    checked(q, q, q, normalize, feature_map)
    check_sums(S, z, q.shape[-1], None, q.dtype)
    broadcast(q=q.shape[:-2], state=S.shape[:-2])
    call = read_call(q, S, z, normalize, feature_map, q.dtype)
    return READ.choose(call)(call)[0]


def sum_call(k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str) -> SumCall:
    """Return the call. Raise ValueError for a mask or leading dimensions that do not fit."""
    key_mask = checked_mask(k, key_mask)
    sides = {"k": k.shape[:-2], "v": v.shape[:-2]} | ({} if key_mask is None else {"key_mask": key_mask.shape[:-1]})
    ndim = len(broadcast(**sides)) + 2
    key_mask = None if key_mask is None else align(key_mask, ndim - 1)
    return SumCall(align(k, ndim), align(v, ndim), key_mask, feature_map)


def read_call(q: Tensor, S: Tensor, z: Tensor, normalize: str | None, feature_map: str, dtype: torch.dtype) -> ReadCall:
    """Return the call. With "keys", queries read the means S / z."""
    ndim, S = max(q.ndim, S.ndim), divide(S, z.unsqueeze(-1)) if normalize == "keys" else S
    return ReadCall(align(q, ndim), align(S, ndim), align(z, ndim - 1), normalize == "output", feature_map, dtype)


def shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def checked(q: Tensor, k: Tensor, v: Tensor, normalize: str | None, feature_map: str) -> tuple[Tensor, Tensor, Tensor]:
    """Check all arguments. Return q, k and v in the dtype that torch promotes to: autocast regions may mix dtypes."""
    are_tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not are_tensors or not q.device == k.device == v.device:
        check_tensors(q=q, k=k, v=v)
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ValueError(f"q, k and v must be (..., n, d), but are {shape(q)}, {shape(k)} and {shape(v)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same number of features, but q is {shape(q)} and k is {shape(k)}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"every key must have a value, but k is {shape(k)} and v is {shape(v)}")
    if normalize not in NORMALIZATIONS:
        raise unknown_name("normalize", normalize, NORMALIZATIONS)
    if not isinstance(feature_map, str) or feature_map not in ELEMENTWISE:
        raise unknown_name("feature_map", feature_map, ELEMENTWISE, SYNONYMS)
    if not q.dtype == k.dtype == v.dtype:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must be floating-point, but are {q.dtype}")
    return q, k, v


def checked_mask(k: Tensor, key_mask: Tensor | None) -> Tensor | None:
    if key_mask is None:
        return None
    check_boolean(key_mask)
    return expanded(k, key_mask, "key_mask")


def expanded(k: Tensor, x: Tensor, name: str) -> Tensor:
    """Return x, (…, 1) or (…, n), expanded to the n tokens of k; errors call it `name`."""
    n = k.shape[-2]
    if not on_one_device(k, x, x):
        check_tensors(**{"k": k, name: x})
    if x.ndim == 0 or x.shape[-1] not in (1, n):
        raise ValueError(f"{name} must be (..., {n}), as k is {shape(k)}, but is {shape(x)}")
    return x.expand(*x.shape[:-1], n)


def per_channel(k: Tensor, log_decay: Tensor) -> Tensor:
    """Return log decays per channel of k (…, n, f) as they are, and those per head and token as (…, n, 1)."""
    if not on_one_device(k, log_decay, log_decay):
        check_tensors(k=k, log_decay=log_decay)
    if log_decay.ndim >= k.ndim and log_decay.shape[-2:] == k.shape[-2:]:
        return log_decay if log_decay.shape == k.shape else summable(log_decay, "log_decay")
    n, f = k.shape[-2:]
    if log_decay.ndim == 0 or log_decay.shape[-1] not in (1, n):
        expected = f"log_decay must be (..., {n}) or (..., {n}, {f}), as k is {shape(k)}"
        raise ValueError(f"{expected}, but is {shape(log_decay)}")
    return summable(log_decay, "log_decay").expand(*log_decay.shape[:-1], n).unsqueeze(-1)


def checked_decay(log_decay: Tensor) -> Tensor:
    """Return log decays in which −10⁴ and less is −∞: a token with such a decay begins a new sequence.

    Raise ValueError for positive decays where the check need not wait for a device: on a CPU, outside of compiled
    graphs and transforms. It takes 1.5 µs for one token of 8 heads (5 % of the call) and 20 µs for 16,384 (0.03 %)."""
    if not log_decay.dtype.is_floating_point:
        raise ValueError(f"log_decay must be floating-point, but is {log_decay.dtype}")
    if is_readable(log_decay) and log_decay.numel():
        least, largest = (x.item() for x in torch.aminmax(log_decay.detach()))
        if largest > 0:
            raise ValueError(f"log_decay must not be positive, as the past only fades, but goes up to {largest:.6g}")
        if least > FORGETS:
            return log_decay
    # not masked_fill, for whose gradient torch's compiler expects other strides than there are
    return torch.where(log_decay <= FORGETS, -torch.inf, log_decay)


def broadcast(**shapes: tuple[int, ...]) -> tuple[int, ...]:
    first = next(iter(shapes.values()))
    # torch.broadcast_shapes takes as long as attention for one token
    if all(s == first for s in shapes.values()):
        return tuple(first)
    try:
        return tuple(torch.broadcast_shapes(*shapes.values()))
    except RuntimeError:
        described = ", ".join(f"{name} {tuple(s)}" for name, s in shapes.items())
        raise ValueError(f"leading dimensions must broadcast, but are {described}") from None


def share_queries(q: Tensor, k: Tensor, key_mask: Tensor | None, state_lead: tuple[int, ...]) -> bool:
    """Return whether several states share queries and keys: q, k and the mask have size 1 in each leading dimension in
    which q has another size than the states, whose leading dimensions are `state_lead`."""
    dims = [i for i, size in enumerate(state_lead) if q.shape[i] != size]
    inputs = (q, k) if key_mask is None else (q, k, key_mask)
    return bool(dims) and 0 not in (*q.shape[:-2], *state_lead) and all(x.shape[i] == 1 for x in inputs for i in dims)


def causal_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState | None,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    normalize: str | None,
    feature_map: str,
) -> tuple[Operator, CausalCall]:
    """Check the arguments. Return the operator that runs them, and its call. The state has the leading dimensions to
    which all but q broadcast; q is expanded to those of all tensors, unless heads share queries and keys."""
    q, k, v = checked(q, k, v, normalize, feature_map)
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"a causal call needs a query for every key, but q is {shape(q)} and k is {shape(k)}")
    operator, keys, f, dv = CAUSAL, k.shape[:-2], k.shape[-1], v.shape[-1]
    if state is not None and not on_one_device(k, *checked_kind(state, LinearState)):
        check_tensors(k=k, S=state.S, z=state.z)
    state_lead = keys if state is None else state.z.shape[:-1]
    # nothing to align in the loop of generation, where checking costs as much as computing
    if log_decay is not None or key_mask is not None or not q.shape[:-2] == keys == v.shape[:-2] == state_lead:
        key_mask = checked_mask(k, key_mask)
        log_decay = None if log_decay is None else per_channel(k, log_decay)
        sides = {} if log_decay is None else {"log_decay": log_decay.shape[:-2]}
        others = {"key_mask": key_mask, "state": None if state is None else state.z}
        sides |= {name: x.shape[:-1] for name, x in others.items() if x is not None}
        keys = broadcast(k=keys, v=v.shape[:-2], **sides)
        lead = broadcast(q=q.shape[:-2], keys=keys)
        keys = (1,) * (len(lead) - len(keys)) + keys
        q, k, v = (align(x, len(lead) + 2) for x in (q, k, v))
        if key_mask is not None:
            key_mask = align(key_mask, len(lead) + 1)
            log_decay = None if log_decay is None else torch.where(key_mask.unsqueeze(-1), log_decay, 0)
        if log_decay is not None:
            log_decay = align(checked_decay(log_decay), len(lead) + 2)
            if log_decay.shape[-1] > 1:
                operator = GATED
            else:
                log_decay = log_decay.squeeze(-1)
                operator = SHARED if normalize != "keys" and share_queries(q, k, key_mask, keys) else CAUSAL
        q = q if operator is SHARED else expand(q, (*lead, *q.shape[-2:]))
    if state is None:
        dtype = accumulator(k.dtype)
        S, z = k.new_zeros(*keys, f, dv, dtype=dtype), k.new_zeros(*keys, f, dtype=dtype)
    else:
        check_sums(state.S, state.z, f, dv, k.dtype)
        S, z = state if state_lead == keys else (state.S.expand(*keys, f, dv), state.z.expand(*keys, f))
    return operator, CausalCall(q, k, v, S, z, log_decay, key_mask, normalize, feature_map, state is None)


def check_sums(S: Tensor, z: Tensor, f: int, dv: int | None, dtype: torch.dtype) -> None:
    """Raise ValueError unless S is (..., f, dv) (dv None: any width) and z (..., f), both sums of inputs of `dtype`."""
    of_S, of_z = S.shape, z.shape
    if of_z[-1:] != (f,) or of_S[:-1] != of_z or dv not in (None, of_S[-1]):
        raise ValueError(
            f"the state must have S (..., {f}, {'dv' if dv is None else dv}) and z (..., {f}) for these inputs, "
            f"but has {shape(S)} and {shape(z)}"
        )
    if not S.dtype == z.dtype == accumulator(dtype):
        raise ValueError(f"the state must be {accumulator(dtype)} for these inputs, but is {S.dtype} and {z.dtype}")
