"""Linear attention: y_i = φ(q_i) S_i / (φ(q_i)·z_i) with S_i = Σ_j φ(k_j) v_jᵀ and z_i = Σ_j φ(k_j), over all keys j
or, causally, over j ≤ i. Katharopoulos et al., Transformers are RNNs, https://arxiv.org/abs/2006.16236, eq. 6–9.

(S, z) is a state: it can be asked, tokens can be added to it, and the same numbers come out whatever the cut."""

from jaxtyping import Bool, Float
from torch import Tensor

from linattn.ops.arguments import broadcast, causal_call, check_sums, checked, checked_mask, shape
from linattn.ops.backends import CAUSAL, READ, SUM_KEYS, ReadCall, SumCall
from linattn.ops.state import LinearState, checked_kind


def causal_linear_attention(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b n d"],
    v: Float[Tensor, "*#b n dv"],
    /,
    state: LinearState | None = None,
    *,
    log_decay: Float[Tensor, "*#b #n"] | None = None,
    key_mask: Bool[Tensor, "*#b #n"] | None = None,
    normalize: str | None = "output",
    feature_map: str = "identity",
    backend: str | None = None,
) -> tuple[Float[Tensor, "*b n dv"], LinearState]:
    """Attend from each query to the keys up to its own, and to those summed in `state`.

    S_i = exp(log_decay_i) S_{i-1} + φ(k_i) v_iᵀ, likewise z_i; then y_i = φ(q_i) S_i / φ(q_i)·z_i ("output"), or each
    feature is normalised by itself, y_i = (φ(q_i) / z_i) S_i ("keys"), or y_i = φ(q_i) S_i (None).

    A masked token is a missing one: it adds nothing and nothing decays. A decay of −inf, or of −10⁴ and less, begins a
    new sequence; a positive one is refused on a CPU, but not looked for on a GPU or in a compiled graph, where reading
    it would wait. A query that sees no key gets zeros. The state is float32, or float64 for float64 inputs.

    NaN in a present token reaches the tokens of its chunk and all later ones, also those of later sequences of a packed
    batch. Mask a document that may hold any: what a masked token holds reaches nothing.

    Raises ValueError for shapes and names that do not fit, NotImplementedError if no backend can run the call."""
    q, k, v = checked(q, k, v, normalize, feature_map)
    call = causal_call(q, k, v, state, log_decay, key_mask, normalize, feature_map)
    if call.q.ndim > 2:
        y, S, z = CAUSAL(call, backend)
    else:
        one_row = {name: x.unsqueeze(0) for name, x in call._asdict().items() if isinstance(x, Tensor)}
        y, S, z = (x.squeeze(0) for x in CAUSAL(call._replace(**one_row), backend))
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
    """Attend from each query to all keys: `read` of the sums of `summarize`. Queries and keys may differ in number.

    Options and errors are those of `causal_linear_attention`; backends are "triton", "chunked" and "reference"."""
    q, k, v = checked(q, k, v, normalize, feature_map)
    key_mask = checked_mask(k, key_mask)
    broadcast(q=q.shape[:-2], k=k.shape[:-2], v=v.shape[:-2])
    S, z = SUM_KEYS(SumCall(k, v, key_mask, feature_map), backend)
    return READ(ReadCall(q, S, z, normalize, feature_map, v.dtype), backend)[0]


def summarize(
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m dv"],
    /,
    *,
    key_mask: Bool[Tensor, "*#b #m"] | None = None,
    feature_map: str = "identity",
) -> LinearState:
    """S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j) over all keys, computed once, for instance of an encoder's output."""
    k, _, v = checked(k, k, v, None, feature_map)
    S, z = SUM_KEYS(SumCall(k, v, checked_mask(k, key_mask), feature_map))
    return LinearState(S, z)


def read(
    q: Float[Tensor, "*#b n d"],
    state: LinearState,
    /,
    *,
    normalize: str | None = "output",
    feature_map: str = "identity",
) -> Float[Tensor, "*b n dv"]:
    """y_i = φ(q_i) S / (φ(q_i)·z), or (φ(q_i) / z) S, or φ(q_i) S: each query sees the whole state, which stays."""
    S, z = checked_kind(state, LinearState)
    checked(q, q, q, normalize, feature_map)
    if z.ndim > 0 and q.shape[-1] != z.shape[-1]:
        raise ValueError(f"q and the state must have the same number of features, but q is {shape(q)} and z {shape(z)}")
    check_sums(S, z, q.shape[-1], None, q.dtype)
    broadcast(q=q.shape[:-2], state=S.shape[:-2])
    return READ(ReadCall(q, S, z, normalize, feature_map, q.dtype))[0]
