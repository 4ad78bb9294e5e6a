"""Parts of all kernels. A program walks along the tokens of one row (a batch element and head), a chunk of C at a time.
In arguments, `chunk` is (the first token, which of the C are inside the row, the last token); columns, such as
`features` and `values`, are (channels, which of them are inside); a tensor in its row is (pointer, step per token).

Every kernel is given tuples of pointers: `tokens` to tensors of tokens and channels, `scalars` to the mask and the
decay, `states` to states (S, z), `numbers` to others; then the `Walk`, φ, and the `Constants` K of `layout.py`."""

# type checkers do not see that the constant K is a record
# pyright: reportAttributeAccessIssue=false

from typing import Any

import triton.language as tl

from linattn.ops.triton.arithmetic import cast, early, hidden, jit, rounded, transposed

# by default, tiles are not transposed
_NOT_TRANSPOSED = tl.constexpr(False)

# fields of each token that `decay_kernel.weigh` writes: its weight since the chunk began and until it ends; the base-2
# logarithm of the first, as a float32 and its rounding error; and where its sequence begins in the chunk, less C;
# zeros for tokens that are not inside, which so see no key
SINCE, UNTIL, HIGH, LOW, FIRST = (tl.constexpr(i) for i in range(5))
FIELDS: Any = tl.constexpr(5)


@jit
def plain(x):
    """Return the integer from which `layout.opaque` made x."""
    return x >> 4


@jit
def row_of(number, walk):
    """Return the indices of row `number` in the three leading dimensions."""
    size1, size2 = plain(walk.size1), plain(walk.size2)
    return number // (size1 * size2), number // size2 % size1, number % size2


@jit
def part(walk):
    """Return the number of the part of the channels that this program has, from 0 to `walk.parts` − 1."""
    return tl.program_id(0) % plain(walk.parts)


@jit
def place(walk):
    """Return the number of this program's split among the splits of all rows."""
    return tl.program_id(0) // plain(walk.parts)


@jit
def span(walk):
    """Return this program's row, as three indices, the number of its split, and the split's first token and end."""
    splits, length = plain(walk.splits), plain(walk.length)
    number, split = place(walk) // splits, place(walk) % splits
    begin = split * length
    return row_of(number, walk), split, begin, tl.minimum(begin + length, plain(walk.n))


@jit
def offset(strides, row, UNIT: tl.constexpr):
    """Return where a row begins in a tensor with these strides, `TokenStrides` or `StateStrides` in units of UNIT."""
    outer, middle, inner = row
    address = outer.to(tl.int64) * plain(strides.outer) + middle.to(tl.int64) * plain(strides.middle)
    # in units, so that the compiler sees what divides it
    return (address + inner.to(tl.int64) * plain(strides.inner)) * UNIT


@jit
def owns(strides, row):
    """Return whether the row is the first of those that share an entry of a tensor with these strides."""
    outer, middle, inner = row
    first = ((strides.outer != 0) | (outer == 0)) & ((strides.middle != 0) | (middle == 0))
    return first & ((strides.inner != 0) | (inner == 0))


@jit
def in_row(pointers, strides, row, UNIT: tl.constexpr):
    """Return (pointer, step) of each tensor in this row."""
    rows = ()
    for i in tl.static_range(len(pointers)):  # pyright: ignore
        rows += ((pointers[i] + offset(strides[i], row, UNIT), strides[i].step),)
    return rows


@jit
def per_token(x, walk, SHARES: tl.constexpr):
    """Return (pointer, step) of this row in x, which holds one number per token, (rows, n), or with SHARES, one per
    token and program of the row, (rows, programs, n)."""
    number = place(walk) // plain(walk.splits)
    if SHARES:
        number = number * plain(walk.parts) + part(walk)
    return x + number.to(tl.int64) * plain(walk.n), 1


@jit
def chunk(start, stop, C: tl.constexpr):
    start = hidden(start)
    return start, start + tl.arange(0, C) < stop, tl.minimum(start + C, stop) - 1


@jit
def channels(block, WIDTH: tl.constexpr, B: tl.constexpr):
    """Return B columns: the indices of tile number `block` of a tensor's WIDTH columns, and which are inside."""
    columns = tl.arange(0, B) + (block * B if WIDTH > B else 0)
    if WIDTH % B == 0:
        return columns, tl.full((B,), True, tl.int1)
    else:
        return columns, columns < WIDTH


@jit
def both(rows, columns):
    return rows[:, None] & columns[None, :]


@jit
def where(flag, inside):
    """Return the mask `inside` if flag, else False. In Triton's interpreter flag & inside would be an integer."""
    return tl.where(flag, inside, False)


@jit
def _numbers(x, chunk):
    """Return pointers to one number per token of a chunk, (C,)."""
    pointer, step = x
    start, inside, _ = chunk
    return pointer + tl.cast(start, tl.int64) * step + tl.arange(0, inside.shape[0]) * step


@jit
def load_numbers(x, chunk):
    """Load one number per token, (C,), with zeros for tokens that are not inside."""
    return tl.load(_numbers(x, chunk), mask=chunk[1], other=0)


@jit
def store_numbers(x, chunk, numbers):
    tl.store(_numbers(x, chunk), numbers, mask=chunk[1])


@jit
def load_present(key_mask, chunk, K: tl.constexpr):
    """Return which tokens of the chunk are present as keys, (C,), for a `key_mask` or, without one, inside of the
    sequence."""
    return load_numbers(key_mask, chunk) != 0 if K.MASKED else chunk[1]


@jit
def _tile(x, chunk, columns):
    """Return pointers to columns of a chunk's tokens, (C, B), and which of these numbers are inside."""
    pointer, step = x
    start, inside, last = chunk
    rows = tl.arange(0, inside.shape[0]) * step
    if step > 0:
        # compare offsets in memory, not tokens: the compiler sees that offsets differ by constants
        inside = rows < (last + 1 - start) * step
    return pointer + tl.cast(start, tl.int64) * step + (rows[:, None] + columns[0][None, :]), both(inside, columns[1])


@jit
def load(x, chunk, columns):
    """Load a tile (C, B), with zeros for tokens and columns that are not inside."""
    places, inside = _tile(x, chunk, columns)
    return early(tl.load(places, mask=inside, other=0))


@jit
def store(x, chunk, columns, tile, TRANSPOSED: tl.constexpr = _NOT_TRANSPOSED):
    places, inside = _tile(x, chunk, columns)
    tl.store(places, transposed(cast(tile, x[0].dtype.element_ty), TRANSPOSED), mask=inside)


@jit
def states_in(states, strides, row, split, K: tl.constexpr):
    """Return pointers to S (f, dv) and z (f,) of each state in this row and split."""
    views = ()
    for i in tl.static_range(len(states)):  # pyright: ignore
        place = offset(strides[i], row, 1) + split * plain(strides[i].split)
        views += ((states[i][0] + place * K.F * K.DV, states[i][1] + place * K.F),)
    return views


@jit
def _tile_of(state, features, values, K: tl.constexpr):
    """Return pointers to the tile of `features` and `values` in S, (BF, BV), and in z, (BF,), of a `state`: the pair of
    pointers to its S and its z."""
    S, z = state
    return S + (features[0][:, None] * K.DV + values[0][None, :]), z + features[0]


@jit
def load_state(state, features, values, enabled, K: tl.constexpr):
    """Return the columns of S, (BF, BV), and z, (BF,), or zeros unless the flag `enabled` is set."""
    S, z = _tile_of(state, features, values, K)
    mask = both(features[1], values[1])
    return tl.load(S, mask=where(enabled, mask), other=0), tl.load(z, mask=where(enabled, features[1]), other=0)


@jit
def store_state(state, features, values, S_i, z_i, enabled, with_z, K: tl.constexpr):
    S, z = _tile_of(state, features, values, K)
    tl.store(S, S_i, mask=where(enabled, both(features[1], values[1])))
    tl.store(z, z_i, mask=where(enabled & with_z, features[1]))


@jit
def mapped(x, inside, phi):
    """Return φ of a tile, with zeros where not `inside`: set, not multiplied by zero, as φ may be infinite there."""
    return tl.where(inside, phi.function(x.to(tl.float32)), 0.0)


@jit
def load_queries(q, chunk, features, present, phi, K: tl.constexpr):
    """Return φ(q) of a chunk, (C, BF). Where a token is not `present`, features that are not finite become zero; finite
    ones stay, as a masked token's query still attends. Outputs of tokens beyond the chunk are not stored."""
    return map_queries(load(q, chunk, features), features, present, _NOT_TRANSPOSED, phi, K)


@jit
def map_queries(x, features, present, TRANSPOSED: tl.constexpr, phi, K: tl.constexpr):
    inside = along_features(features[1], TRANSPOSED)
    if K.MASKED:
        inside = inside & (along_tokens(present, TRANSPOSED) | (tl.abs(phi.function(x.to(tl.float32))) < float("inf")))
    return mapped(x, inside, phi)


@jit
def along_tokens(x, TRANSPOSED: tl.constexpr):
    """Stretch one number per token over a tile (C, B), or if TRANSPOSED (B, C)."""
    return x[None, :] if TRANSPOSED else x[:, None]


@jit
def along_features(x, TRANSPOSED: tl.constexpr):
    return x[:, None] if TRANSPOSED else x[None, :]


@jit
def load_keys(k, chunk, features, present, phi, K: tl.constexpr):
    """φ(k) of a chunk, (C, BF), rounded; zeros for masked tokens, but not for those that are not inside."""
    inside = features[1][None, :]
    if K.MASKED:
        inside = both(present, features[1])
    return rounded(mapped(load(k, chunk, features), inside, phi), K.PRECISION, ONCE=True)


@jit
def load_values(v, chunk, values, present, K: tl.constexpr):
    """Return the values of a chunk, (C, BV), rounded to K's precision, with zeros for tokens masked or not inside."""
    v_j = load(v, chunk, values)
    if K.MASKED:
        v_j = tl.where(present[:, None], v_j, 0.0)
    return rounded(v_j, K.PRECISION)


@jit
def later(rows, columns):
    """Return whether row > column for all pairs of indices, by comparing the numbers of groups of eight columns: as a
    thread has the same places in every group, these numbers are constants and take no registers."""
    return (rows[:, None] - 1 - (columns[None, :] & 7)) >> 3 >= columns[None, :] >> 3


@jit
def _field(decay, chunk, FIELD: tl.constexpr):
    """Return pointers to one of the FIELDS of a chunk, (C,). Pointers to different fields differ by constants."""
    start, inside, _ = chunk
    return decay[0] + tl.cast(start, tl.int64) * FIELDS + (FIELD * inside.shape[0] + tl.arange(0, inside.shape[0]))


@jit
def load_decay(decay, chunk):
    """Return the decays from a chunk's start to each token and from each token to its end, (C,), and over all, (1,)."""
    # a tensor, as loads of tensors start early
    whole = decay[0] + tl.cast(chunk[0], tl.int64) * FIELDS + (chunk[2] - chunk[0] + tl.arange(0, 1))
    return tl.load(_field(decay, chunk, SINCE)), tl.load(_field(decay, chunk, UNTIL)), tl.load(whole)


@jit
def between(decay, chunk, KEYS_FIRST: tl.constexpr, K: tl.constexpr):
    """Return tiles (C, C): whether a query sees a key, and the decay between them. With KEYS_FIRST, rows are keys."""
    high, first = tl.load(_field(decay, chunk, HIGH)), tl.load(_field(decay, chunk, FIRST))
    exponent, places = high[:, None] - high[None, :], tl.arange(0, chunk[1].shape[0])
    if K.PRECISION == "tf32x3":
        low = tl.load(_field(decay, chunk, LOW))
        exponent += low[:, None] - low[None, :]
    first = first.to(tl.int32) + chunk[1].shape[0]
    if KEYS_FIRST:
        exponent = -exponent
        seen = ~later(places, places) & (places[:, None] >= first[None, :])
    else:
        seen = later(places + 1, places) & (places[None, :] >= first[:, None])
    return seen, tl.exp2(exponent)
