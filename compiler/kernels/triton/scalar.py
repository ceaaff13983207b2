"""What kernels call on one number at a time, where Triton has nothing that also its interpreter
runs. f32 results are within 4 ulp, as in ``codegen/scalar.h``, whose formulas these are.
"""

import triton
import triton.language as tl


@triton.jit
def relu(x):
    """0 below 0; a NaN stays."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def tanh(x):
    """f32: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would lose its digits."""
    s = x * x
    p = 2.218369114e-03
    p = p * s - 8.276133186e-03
    p = p * s + 2.174755353e-02
    p = p * s - 5.395655710e-02
    p = p * s + 1.333329185e-01
    p = p * s - 3.333333309e-01
    large = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.65, x + x * s * p, tl.where(x < 0, -large, large))


@triton.jit
def gelu_tanh(x):
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def log1p(x):
    """f32: what 1 + x rounds away is put back."""
    u = 1.0 + x
    y = tl.log(u)
    corrected = y + (x - (u - 1.0)) / u
    corrected = tl.where((x > -1.0) & (x < 1e30), corrected, y)
    return tl.where(u == 1.0, x, corrected)


@triton.jit
def expm1(x):
    """f32: the series of e^x - 1 near 0."""
    p = 1.0 / 40320
    p = p * x + 1.0 / 5040
    p = p * x + 1.0 / 720
    p = p * x + 1.0 / 120
    p = p * x + 1.0 / 24
    p = p * x + 1.0 / 6
    p = p * x + 0.5
    return tl.where(tl.abs(x) < 0.4, p * x * x + x, tl.exp(x) - 1.0)


@triton.jit
def maximum(a, b):
    """The larger; a NaN wins, as in PyTorch."""
    return tl.where(a != a, a, tl.where(a > b, a, b))


@triton.jit
def minimum(a, b):
    return tl.where(a != a, a, tl.where(a < b, a, b))


@triton.jit
def fmax(a, b):
    """The larger; a NaN loses."""
    return tl.where(a != a, b, tl.where((b != b) | (a > b), a, b))


@triton.jit
def fmin(a, b):
    return tl.where(a != a, b, tl.where((b != b) | (a < b), a, b))


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def mod_floor(a, b):
    """The remainder of integers with the sign of the divisor, as Python has it."""
    r = a % b  # Triton's has the sign of the dividend
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def div_floor(a, b):
    """The quotient of integers rounded down."""
    q = a // b  # Triton's is rounded towards 0
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), q - 1, q)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """An activation of ``compiler.kernels.linear.ACTIVATIONS``."""
    if ACTIVATION == "relu":
        x = relu(x)
    elif ACTIVATION == "sigmoid":
        x = sigmoid(x)
    elif ACTIVATION == "gelu":
        x = gelu(x)
    return x


@triton.jit
def deactivate(g, y, ACTIVATION: tl.constexpr):
    """The gradient before an activation, from the one after it and the activation's output."""
    if ACTIVATION == "relu":
        g = tl.where(y <= 0, 0.0, g)  # a NaN lets the gradient through
    elif ACTIVATION == "sigmoid":
        g = g * (1.0 - y) * y
    return g


@triton.jit
def product(a, b):
    """For ``tl.reduce``."""
    return a * b
