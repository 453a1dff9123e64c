"""What stands between the two products of an expert: f(gate) * up, or f of the only matrix that there is.

    SILU         x sigmoid(x)                                                   gated
    GELU_TANH    x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))              gated
    swigluoai    x sigmoid(alpha x), gate and up clamped, (up + beta)           gated, as gpt-oss has it
    RELU2        max(x, 0)^2                                                    one matrix, no up projection

Each activation also says what an error bound needs: how steep f is, and what evaluating f in fp32 costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Curve:
    """The function f of an activation, of x and alpha, with what bounds its error within a reach of x.

    slope      of x and the reach: largest |f'|
    roundings  of x, the reach, alpha and the largest |f|: error of f in fp32, in units of 2^-24; `ep_a2a.testing.moe`
               derives it
    """

    value: Callable[[Tensor, float], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor | float]
    roundings: Callable[[Tensor, Tensor, float, Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """f(min(gate, limit)) * (clamp(up, -limit, limit) + beta), or f(gate) where w13 holds one matrix. NaN stays NaN.

    Compared by value; made once, below, or by `swigluoai`.
    """

    name: str
    num_matrices: int  # 2: w13 holds gate and up; 1: it holds one matrix
    curve: Curve
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf

    def __call__(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """The intermediate, in the dtype of `gate` and rounded to it at every step. Local; `up` for two matrices."""
        f = self.curve.value(gate.clamp(max=self.limit), self.alpha)
        return f if up is None else f * self.factor(up)

    def factor(self, up: Tensor) -> Tensor:
        """What f(gate) is multiplied by. Local."""
        return up.clamp(-self.limit, self.limit) + self.beta

    def __repr__(self) -> str:
        return self.name


_SIGMOID = Curve(
    lambda x, alpha: x * torch.sigmoid(alpha * x),
    lambda x, reach: 1.1,
    lambda x, reach, alpha, f: (9 + 2 * alpha * (reach - x).clamp(min=0)) * f,
)
_GELU = Curve(
    lambda x, alpha: torch.nn.functional.gelu(x, approximate="tanh"),
    lambda x, reach: 1.13,
    lambda x, reach, alpha, f: 4 * (x.abs() + reach + f),
)
_SQUARE = Curve(
    lambda x, alpha: x.clamp(min=0).square(),
    lambda x, reach: 2 * (x.clamp(min=0) + reach),
    lambda x, reach, alpha, f: 2 * f,
)

SILU = Activation("silu", 2, _SIGMOID)
GELU_TANH = Activation("gelu_tanh", 2, _GELU)
RELU2 = Activation("relu2", 1, _SQUARE)


def swigluoai(*, alpha: float = 1.702, beta: float = 1.0, limit: float = 7.0) -> Activation:
    """gate sigmoid(alpha gate) (up + beta), with gate at most `limit` and up within `limit` of 0.

    alpha and limit above 0, beta finite; limit may be infinite. Raises ValueError.
    """
    if not (0 < alpha < math.inf and limit > 0 and math.isfinite(beta)):
        raise ValueError(f"alpha={alpha}, beta={beta}, limit={limit}: alpha and limit must be above 0, beta finite")
    return Activation(f"swigluoai(alpha={alpha}, beta={beta}, limit={limit})", 2, _SIGMOID, alpha, beta, limit)
