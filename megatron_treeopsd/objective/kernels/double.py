"""Device functions in float64 from exp and log alone, which the compiler and the interpreter both have.

Exact to a few units in the last place where the obvious forms cancel: near zero. Accuracy without expm1 and log1p by
Kahan's quotients: the rounding error of u = exp(x) appears in u - 1 and in log(u) alike.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expm1(x: tl.tensor) -> tl.tensor:
    u = tl.exp(x)
    near = tl.abs(x) < 1.0
    # The quotient is used near zero only; elsewhere its parts are kept away from overflow and log(0).
    safe = tl.where(near & (u != 1.0), u, 2.0)
    return tl.where(near, tl.where(u == 1.0, x, (safe - 1.0) * x / tl.log(safe)), u - 1.0)


@triton.jit
def log1p(x: tl.tensor) -> tl.tensor:
    v = 1.0 + x
    safe = tl.where(v == 1.0, 2.0, v)
    return tl.where(v == 1.0, x, tl.log(safe) * x / (safe - 1.0))


@triton.jit
def tanh_half(x: tl.tensor) -> tl.tensor:
    """tanh(x / 2) = 2 sigmoid(x) - 1, finite for any x."""
    e = expm1(-tl.abs(x))
    t = -e / (2.0 + e)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    return tl.where(x > 0.0, x, 0.0) + log1p(tl.exp(-tl.abs(x)))
