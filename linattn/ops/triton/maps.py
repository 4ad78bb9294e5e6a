"""The elementwise functions φ and their derivatives inside a kernel: those of `linattn.ops.elementwise`, by name.

A derivative is given x and y = φ(x), and takes what is cheaper."""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1 / math.log(2))


@triton.jit
def identity(x):
    return x


@triton.jit
def one(x, y):
    return tl.full(x.shape, 1, tl.float32)


@triton.jit
def elu_plus_one(x):
    return tl.maximum(x, 0) + tl.exp2(tl.minimum(x, 0, propagate_nan=tl.PropagateNan.ALL) * _LOG2_E)


@triton.jit
def elu_plus_one_derivative(x, y):
    return tl.minimum(y, 1)


@triton.jit
def relu(x):
    return tl.maximum(x, 0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def relu_derivative(x, y):
    return tl.where(x > 0, 1.0, 0.0)


@triton.jit
def squared_relu(x):
    x = tl.maximum(x, 0, propagate_nan=tl.PropagateNan.ALL)
    return x * x


@triton.jit
def squared_relu_derivative(x, y):
    return 2 * tl.maximum(x, 0)


@triton.jit
def exponential(x):
    return tl.exp(x)


@triton.jit
def softplus(x):
    # log(1 + eˣ) = max(x, 0) + log(1 + e^−|x|), and log(1 + u) = u·log(1 + u) / ((1 + u) − 1) loses no small u
    u = tl.exp(-tl.abs(x))
    rounded = 1 + u
    return tl.maximum(x, 0) + tl.where(rounded == 1, u, tl.log(rounded) * (u / tl.where(rounded == 1, 1, rounded - 1)))


@triton.jit
def sigmoid(x):
    return tl.sigmoid(x)


@triton.jit
def sigmoid_derivative(x, y):
    y = tl.sigmoid(x)
    return y * (1 - y)


@triton.jit
def exponential_derivative(x, y):
    return y


@triton.jit
def softplus_derivative(x, y):
    return tl.sigmoid(x)


class Map(NamedTuple):
    function: Any
    derivative: Any


MAPS = {
    "identity": Map(identity, one),
    "elu_plus_one": Map(elu_plus_one, elu_plus_one_derivative),
    "relu": Map(relu, relu_derivative),
    "squared_relu": Map(squared_relu, squared_relu_derivative),
    "exp": Map(exponential, exponential_derivative),
    "softplus": Map(softplus, softplus_derivative),
    "sigmoid": Map(sigmoid, sigmoid_derivative),
}
