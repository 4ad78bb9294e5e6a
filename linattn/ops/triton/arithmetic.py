"""Numbers as tensor cores multiply them: rounding, products, and sums and quotients of features."""

from typing import Any

import triton
import triton.language as tl
import triton.language.target_info
from triton import knobs

# type checkers believe that a compiled function cannot be called
jit: Any = triton.jit

# the interpreter multiplies bfloat16 wrongly, and cuts off where it should round
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)

# as `numerics.infinite_if_none`: what is smaller has lost its terms to rounding
_NONE = tl.constexpr(2.0**-126 / 2.0**-23)

# by default, the compiler may repeat a rounding
_REPEATABLE = tl.constexpr(False)


@jit
def _nearest_bfloat16(x):
    """Return the float32 numbers nearest to x that bfloat16 holds, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@jit
def _bfloat16(x, ONCE: tl.constexpr):
    """Convert to bfloat16, on NVIDIA GPUs two numbers per instruction: the compiler would convert most of them one by
    one. If ONCE, the compiler may not repeat the conversion wherever its result is used."""
    if _INTERPRETED:
        return _nearest_bfloat16(x.to(tl.float32)).to(tl.bfloat16)
    elif x.dtype == tl.float32 and tl.target_info.is_cuda():
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, not ONCE, 2)
    else:
        return x.to(tl.bfloat16)


@jit
def hidden(x):
    """Return the integer x, but so that the compiler cannot know how it changes in a loop. Otherwise it would keep an
    address for each part of every tile in registers from iteration to iteration."""
    if not _INTERPRETED and tl.target_info.is_cuda():
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, True, 1)
    else:
        return x


@jit
def early(x):
    """Return loaded numbers (C, B), but so that their load starts early. It would start late, because products need the
    numbers in several register layouts. So this puts an instruction that the compiler may not repeat between the load
    and the products. With 64 rows or more and capability 9, products read shared memory, and x is returned as it is."""
    from_shared = (
        x.shape[0] >= 64 and tl.target_info.cuda_capability_geq(9) and not tl.target_info.cuda_capability_geq(10)
    )
    if _INTERPRETED or from_shared or x.dtype.primitive_bitwidth != 16 or not tl.target_info.is_cuda():
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)


@jit
def wide(x):
    """Return x in float32, by two instructions for two bfloat16 numbers."""
    if not _INTERPRETED and x.dtype == tl.bfloat16 and tl.target_info.is_cuda():
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], tl.float32, True, 2
        )
    else:
        return x.to(tl.float32)


@jit
def beside(x, y):
    """Return x in float32, in the register layout of y, so that combining both needs no shared memory. It uses other
    instructions than `wide`, so that the compiler does not keep one result for both."""
    if not _INTERPRETED and x.dtype == tl.bfloat16 and tl.target_info.is_cuda():
        # both halves of a register; y is not read
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;", "=r,=r,r,r,r", [x, y], tl.float32, True, 2
        )
    elif not _INTERPRETED and x.dtype == tl.float16 and tl.target_info.is_cuda():
        return tl.inline_asm_elementwise(
            "{.reg .f16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}",
            "=r,=r,r,r,r", [x, y], tl.float32, True, 2,
        )  # fmt: skip
    else:
        return x.to(tl.float32)


@jit
def cast(x, TYPE: tl.constexpr):
    """Convert float32 numbers x to TYPE, the dtype of a tensor."""
    return _bfloat16(x, False) if tl.bfloat16 == TYPE else x.to(TYPE)


@jit
def rounded(x, PRECISION: tl.constexpr, ONCE: tl.constexpr = _REPEATABLE):
    """Round x to what tensor cores multiply at PRECISION: they would cut the last bits off, which biases sums."""
    if PRECISION == "bf16":
        return _nearest_bfloat16(x.to(tl.float32)) if _INTERPRETED else _bfloat16(x, ONCE)
    elif PRECISION == "tf32":
        return ((x.to(tl.float32).to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def product(a, b, PRECISION: tl.constexpr):
    """Multiply rounded tiles, summed in float32; on capability 9, by the assembler of `assembler.py`."""
    if PRECISION == "bf16":
        return tl.dot(a, b)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@jit
def transposed(x, TRANSPOSED: tl.constexpr):
    return tl.trans(x) if TRANSPOSED else x


@jit
def product_or_transpose(a, b, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """Return a b, or if TRANSPOSED (a b)ᵀ, computed as bᵀ aᵀ."""
    if TRANSPOSED:
        return product(tl.trans(b), tl.trans(a), PRECISION)
    else:
        return product(a, b, PRECISION)


@jit
def _rest(x, high, middle):
    """Return x − high − middle in bfloat16, where high is the leading bits of x in float32, and middle is bfloat16."""
    if not _INTERPRETED and tl.target_info.is_cuda():
        return tl.inline_asm_elementwise(
            """{.reg .f32 a, b, c, d;
            shl.b32 c, $3, 16; and.b32 d, $3, 0xffff0000;
            sub.f32 a, $1, c; sub.f32 b, $2, d;
            and.b32 c, $1, 0xffff0000; and.b32 d, $2, 0xffff0000;
            sub.f32 a, a, c; sub.f32 b, b, d;
            cvt.rn.bf16x2.f32 $0, b, a;}""",
            "=r,r,r,r", [x, middle], tl.bfloat16, True, 2,
        )  # fmt: skip
    else:
        return rounded(x - high - middle.to(tl.float32), "bf16")


@jit
def product_with_state(a, S, PRECISE: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply a rounded tile by float32 sums S, which are rounded too; if PRECISE, add the product with the rounding
    errors of S. If TRANSPOSED, S is given transposed and the result is transposed."""
    b = transposed(S, TRANSPOSED)
    if PRECISE and PRECISION != "tf32x3":
        # the leading bits without rounding, which costs less, and then what they leave
        bits = b.to(tl.int32, bitcast=True)
        high = (bits & (-0x10000 if PRECISION == "bf16" else -0x2000)).to(tl.float32, bitcast=True)
        part = rounded(b - high, PRECISION)
        rest = product_or_transpose(a, part, TRANSPOSED, PRECISION)
        if PRECISION == "bf16":
            # two parts have 16 bits, too few for 65,536 values with a mean of ten times their deviation
            rest += product_or_transpose(a, _rest(b, high, part), TRANSPOSED, PRECISION)
        if PRECISION == "bf16" and not _INTERPRETED:
            high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return rest + product_or_transpose(a, high, TRANSPOSED, PRECISION)
    else:
        return product_or_transpose(a, rounded(b, PRECISION), TRANSPOSED, PRECISION)


# columns of the smallest tile that tensor cores multiply
COLUMNS: tl.constexpr = tl.constexpr(16)


@jit
def in_columns(z, PRECISION: tl.constexpr):
    """Split z (B, COLUMNS), equal in all columns, into three rounded parts whose sum is z, in columns 0 to 2."""
    high = rounded(z, PRECISION)
    rest = z - high.to(tl.float32)
    middle = rounded(rest, PRECISION)
    low = rounded(rest - middle.to(tl.float32), PRECISION)
    column = tl.arange(0, COLUMNS)[None, :]
    return tl.where(column == 0, high, tl.where(column == 1, middle, tl.where(column == 2, low, 0.0)))


@jit
def count(present, PRECISION: tl.constexpr):
    """(C, COLUMNS): ones for the tokens that are keys, so that φ(k)ᵀ times them is Σ φ(k) in every column."""
    ones = rounded(tl.where(present, 1.0, 0.0), PRECISION)
    return tl.broadcast_to(ones[:, None], (present.shape[0], COLUMNS))


@jit
def one_over(denominator):
    """Return 1 / denominator, or zero where a query resembles no key."""
    none = tl.abs(denominator) < _NONE
    return tl.where(none, 0.0, 1 / tl.where(none, 1.0, denominator))


@jit
def mean_value(S, z):
    """Return a mean m of the values in a state, weighted by z, so that S − z mᵀ holds only differences from m."""
    weight = z * one_over(tl.max(tl.abs(z), 0))
    return tl.sum(weight[:, None] * S, 0) * one_over(tl.sum(weight * z, 0))
