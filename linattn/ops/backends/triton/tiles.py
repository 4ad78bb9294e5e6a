"""Parts of all kernels: where a row begins, tiles of tokens, what tensor cores multiply, decays of a chunk.

A program walks along the tokens of one row (a batch element and head), a chunk of C of them at a time."""

import triton
import triton.language as tl
from triton import knobs

# the interpreter multiplies bfloat16 wrongly, and cuts off where it should round
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)

# as `base.infinite_if_none`: what is smaller has lost its terms to rounding
_NONE = tl.constexpr(2.0**-126 / 2.0**-23)


@triton.jit
def offset(row, size1, size2, x0, x1, x2):
    """Return the place of a row, in a tensor whose three leading dimensions have the strides x0, x1 and x2."""
    outer, middle, inner = row // (size1 * size2), row // size2 % size1, row % size2
    return outer.to(tl.int64) * x0 + middle.to(tl.int64) * x1 + inner.to(tl.int64) * x2


@triton.jit
def owns(row, size1, size2, x0, x1, x2):
    """Return whether the row is the first of those that share a place in the tensor with these strides."""
    outer, middle, inner = row // (size1 * size2), row // size2 % size1, row % size2
    return ((x0 != 0) | (outer == 0)) & ((x1 != 0) | (middle == 0)) & ((x2 != 0) | (inner == 0))


@triton.jit
def _nearest_bfloat16(x):
    """Float32 numbers that bfloat16 holds, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def cast(x, TYPE: tl.constexpr):
    """Convert float32 to what a tensor holds."""
    if _INTERPRETED and tl.bfloat16 == TYPE:
        x = _nearest_bfloat16(x)
    return x.to(TYPE)


@triton.jit
def load(x, step, start, inside, columns, WIDTH: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """(C, B): these columns of the tokens from `start`; zeros for tokens that are not inside, and beyond WIDTH."""
    places = tl.arange(0, C)[:, None] * step + columns[None, :]
    mask = inside[:, None] if WIDTH % B == 0 else inside[:, None] & (columns < WIDTH)[None, :]
    return tl.load(x + tl.cast(start, tl.int64) * step + places, mask=mask, other=0)


@triton.jit
def store(x, step, start, inside, columns, tile, WIDTH: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    places = tl.arange(0, C)[:, None] * step + columns[None, :]
    mask = inside[:, None] if WIDTH % B == 0 else inside[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + tl.cast(start, tl.int64) * step + places, cast(tile, x.dtype.element_ty), mask=mask)


@triton.jit
def load_present(key_mask, step, start, inside, C: tl.constexpr):
    """(C,): which tokens are keys."""
    places = key_mask + tl.cast(start, tl.int64) * step + tl.arange(0, C) * step
    return tl.load(places, mask=inside, other=0) != 0


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """To what tensor cores multiply, to the nearest: cut off by them, sums would be a little small."""
    if PRECISION == "bf16":
        return _nearest_bfloat16(x.to(tl.float32)) if _INTERPRETED else x.to(tl.bfloat16)
    elif PRECISION == "tf32":
        return ((x.to(tl.float32).to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Multiply rounded tiles, summed in float32."""
    if PRECISION == "bf16":
        return tl.dot(a, b)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def product_with_state(a, b, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply a rounded tile by float32 sums, which are rounded; PRECISE: what rounding takes off them too."""
    high = rounded(b, PRECISION)
    result = product(a, high, PRECISION)
    if PRECISE and (PRECISION == "bf16" or PRECISION == "tf32"):
        result += product(a, rounded(b - high.to(tl.float32), PRECISION), PRECISION)
    return result


@triton.jit
def one_over(denominator):
    """Zero for a query that resembles no key."""
    none = tl.abs(denominator) < _NONE
    return tl.where(none, 0.0, 1 / tl.where(none, 1.0, denominator))


@triton.jit
def mean_value(S, z):
    """Return a mean m of the values in a state, weighted by z, so that S − z mᵀ holds only their differences."""
    weight = z * one_over(tl.max(tl.abs(z), 0))
    return tl.sum(weight[:, None] * S, 0) * one_over(tl.sum(weight * z, 0))


@triton.jit
def load_features(
    x, step, start, inside, columns, PHI: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """φ of a tile, rounded; zeros for tokens that are not inside, and beyond WIDTH."""
    tile = PHI(load(x, step, start, inside, columns, WIDTH, C, B).to(tl.float32))
    mask = inside[:, None] if WIDTH % B == 0 else inside[:, None] & (columns < WIDTH)[None, :]
    return rounded(tl.where(mask, tile, 0.0), PRECISION)


@triton.jit
def load_queries(
    x, step, start, inside, columns, present, PHI: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Load features as `load_features` does, and keep of a masked token what is finite: its query takes part in the
    gradients of other tokens."""
    tile = PHI(load(x, step, start, inside, columns, WIDTH, C, B).to(tl.float32))
    mask = inside[:, None] if WIDTH % B == 0 else inside[:, None] & (columns < WIDTH)[None, :]
    if MASKED:
        mask = mask & (present[:, None] | (tl.abs(tile) < float("inf")))
    return rounded(tl.where(mask, tile, 0.0), PRECISION)


@triton.jit
def load_decay(log_decay, step, start, inside, C: tl.constexpr):
    """Weights of a chunk: (C,) since it began and until it ends, and that of it all; and (C,) for `between`.

    Sums of logarithms in float64, so that differences of long sums stay exact; each −inf starts a sequence."""
    places = log_decay + tl.cast(start, tl.int64) * step + tl.arange(0, C) * step
    logs = tl.load(places, mask=inside, other=0).to(tl.float32)
    fresh = logs == float("-inf")
    exact = tl.where(fresh, 0.0, logs).to(tl.float64)
    total, count = tl.cumsum(exact, 0), tl.cumsum(fresh.to(tl.int32), 0)
    end, end_count = tl.sum(exact, 0), tl.sum(fresh.to(tl.int32), 0)
    since = tl.where(count == 0, tl.exp(total.to(tl.float32)), 0.0)
    until = tl.where(count == end_count, tl.exp((end - total).to(tl.float32)), 0.0)
    whole = tl.where(end_count == 0, tl.exp(end.to(tl.float32)), 0.0)
    high = total.to(tl.float32)
    return since, until, whole, high, (total - high.to(tl.float64)).to(tl.float32), count


@triton.jit
def between(high, low, count):
    """(C, C): what key j has decayed to at query i; anything for j > i."""
    same = count[:, None] == count[None, :]
    return tl.where(same, tl.exp((high[:, None] - high[None, :]) + (low[:, None] - low[None, :])), 0.0)
