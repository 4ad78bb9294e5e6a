"""The weights of a decay, computed once for the kernels of a call and all their programs, which read them by chunk.

Sums of logarithms start with each chunk and are in float64, so that differences of long sums stay exact. A logarithm
below that of the smallest float32 starts a sequence, as −∞ does: nothing before it is left."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn.ops.triton import device as dev
from linattn.ops.triton.layout import opaque
from linattn.ops.triton.support import on_device_of

_LOG2_E = tl.constexpr(1 / math.log(2))
# e to the power of it is zero
_NOTHING = tl.constexpr(-104.0)


@dev.jit
def _larger(a, b):
    return tl.maximum(a, b)


@dev.jit
def _weigh(log_decay, weights, n, C: tl.constexpr):
    """Write the weights (rows, chunks, FIELDS, C) of decays (rows, n), one chunk per program."""
    length, places = dev.plain(n), tl.arange(0, C)
    chunks = tl.cdiv(length, C)
    row, start = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks * C
    tokens = start + places
    logs = tl.load(log_decay + row * length + tokens, mask=tokens < length, other=0).to(tl.float32)
    fresh = logs < _NOTHING
    # of base 2, for which processors have an instruction
    exact = tl.where(fresh, 0.0, logs).to(tl.float64) * _LOG2_E
    total, count = tl.cumsum(exact, 0), tl.cumsum(fresh.to(tl.int32), 0)
    first = tl.associative_scan(tl.where(fresh, places, 0), 0, _larger)
    end, last = tl.sum(exact, 0), tl.sum(fresh.to(tl.int32), 0)
    high = total.to(tl.float32)
    fields = (
        tl.where(count == 0, tl.exp2(high), 0.0),
        tl.where(count == last, tl.exp2((end - total).to(tl.float32)), 0.0),
        high,
        (total - high.to(tl.float64)).to(tl.float32),
        (first - C).to(tl.float32),
    )
    for field in tl.static_range(dev.FIELDS):
        numbers = tl.where(tokens < length, fields[field], 0.0)
        tl.store(weights + (tl.program_id(0).to(tl.int64) * dev.FIELDS + field) * C + places, numbers)


def weigh(log_decay: Tensor, C: int) -> Tensor:
    """Return weights (…, chunks · FIELDS · C) of a decay (…, n), for chunks of C tokens; see FIELDS in `device.py`."""
    *lead, n = log_decay.shape
    fields = C * dev.FIELDS.value
    weights = log_decay.new_empty(*lead, triton.cdiv(n, C) * fields, dtype=torch.float32)
    if weights.numel():
        (length,) = opaque(n)
        with on_device_of(log_decay):
            _weigh[(weights.numel() // fields,)](log_decay.contiguous(), weights, length, C=C)
    return weights
