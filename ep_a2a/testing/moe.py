"""A one-process MoE layer in float64, and how far from it a correct result can be.

The layer, on rows and weights decoded to fp32 (a_i, w_ji, v_hj), for each legal id of a token:

    z = w13 a + b13    (gate over up)    m = f(gate) h(up)    y = w2 q(m) + b2    out += routing weight * y

f, h and their clamps are the activation's (`ep_a2a.experts.activations`; h = 1 where there is one matrix), q is
bf16 or a 4-bit format. What an implementation may do, and what each step adds to the error (u = 2^-24, gamma_n =
n u / (1 - n u)):

    z          H products and a bias added in fp32, in any order; operands with or without their global scale, which
               then is a factor afterwards: |dz| <= gamma_(H+5) (sum_i |w_ji| |a_i| + |b13_j|). A tensor core that
               truncates adds at least 8 products at once, so its H/8 coarser steps stay inside
    f          clamps do not widen an error. |df| <= S |dgate|, S the largest |f'| within |dgate| of gate:
                   silu, swigluoai   1.1, whatever alpha and limit: x sigmoid(alpha x) = silu(alpha x) / alpha
                   gelu_tanh         1.13
                   relu2             2 (max(gate, 0) + |dgate|)
               and for exp, tanh, sums and products in fp32, at the x that was computed, S |dgate| around gate:
                   x sigmoid(alpha x)   (9 + 2 alpha max(-x, 0)) u |f|: exp's relative error is its argument's absolute
                                        one, and reaches f by a factor sigmoid(-alpha x), small where x is not negative
                   gelu_tanh            4 u (|x| + |f|): 1 + tanh cancels where x is negative
                   relu2                2 u |f|
               and 2^-119 / alpha, where exp overflows or its inverse is flushed to 0
    m          |dm| <= |df| (|h| + |dh|) + |f| |dh|, |dh| <= |dup| + u (|h| + |dup|); 2 u (|m| + |dm|) for the product
    q(m)       bf16: one more rounding, 2^-8 (|m| + |dm|), against m. 4 bits: against q(m), since a reference that
               does not quantise would be a whole step off everywhere; `testing/intermediate.py` derives |dq|
    y          |dy| <= sum_j |v_hj| |dq_j| + gamma_(I+5) (sum_j |v_hj| (|q_j| + |dq_j|) + |b2_h|)
    partial    of a rank: contributions times their weights, added in fp32: gamma_(K+2) sum_k |weight_k| (|y| + |dy|)
    outbox     one rounding of each rank's partial to the combine format, c = 2^-8, 2^-11 or 2^-24; where that is
               encoded, to bf16 and then `formats.coding_error` of the block
    out        the partials added in fp32, gamma_R, and one last rounding c (2^-8 where rows are encoded)

`bound` adds all of these up: no correct implementation exceeds it, whatever the data. Because it lets thousands of
roundings conspire it is wide for long rows. `likely_bound` takes the roundings as independent with mean 0, so that they
add up in squares, and allows 8 times the result (Hoeffding: exceeded with a chance below 2e-13 an element); that holds
for data that looks random and not for, say, rows of equal values. A code of a 4-bit intermediate that lies within 8
times the result of a rounding boundary may flip; flips have no mean 0, so they add up as they are (`shift`). It is
never above `bound`, and narrow enough that one lost contribution of many shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_a2a.experts.activations import SILU, Activation
from ep_a2a.layout import BF16, Format, Shape, local_experts
from ep_a2a.testing.formats import coding_error
from ep_a2a.testing.intermediate import quantization_error, quantized

Experts = Callable[[int], tuple[Tensor, ...]]

U = 2.0**-24
BF16_U = 2.0**-8
EXTRA_ROUNDINGS = 5  # the bias, and the global scales of both operands, folded in before or after the sum
CONFIDENCE = 8.0
_ROUNDING = {torch.bfloat16: (2.0**-8, 2.0**-134), torch.float16: (2.0**-11, 2.0**-25), torch.float32: (U, 2.0**-150)}


@dataclass(frozen=True)
class MoEReference:
    """The float64 result of a layer and per element how far from it an implementation may be; all [T, H]."""

    out: Tensor
    bound: Tensor  # worst case
    likely_bound: Tensor  # independent roundings


@dataclass(frozen=True)
class MoEPart:
    """What the experts of one rank contribute; all [T, H] float64."""

    total: Tensor
    error: Tensor  # worst case, after the rounding into the outbox
    variance: Tensor  # the same with independent roundings, without
    shift: Tensor  # what codes near a boundary may add to them


@dataclass(frozen=True)
class _Product:
    """One expert applied to some rows: [rows, H] each."""

    y: Tensor
    error: Tensor  # worst case of |dy|
    spread: Tensor  # of dy, roundings being independent
    shift: Tensor  # of y, for codes that flip


def gamma(num_roundings: int) -> float:
    """The relative error that this many fp32 roundings can add up to."""
    return num_roundings * U / (1 - num_roundings * U)


def rounding(combine: Format) -> tuple[float, float]:
    """Largest relative error of one rounding to what combine returns, and the largest absolute one near zero."""
    return _ROUNDING[combine.result_dtype]


def outbox_error(combine: Format, magnitude: Tensor) -> Tensor:
    """Largest error of results with these magnitudes [T, H] float64, from a rank's experts to the end of its outbox."""
    relative, absolute = rounding(combine)
    error = (relative * magnitude + absolute) * (magnitude > 0)
    return error + coding_error(combine, magnitude + error) if combine.is_encoded else error


def reference_moe(
    config: Shape,
    rows: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts,
    num_ranks: int,
    activation: Activation = SILU,
    intermediate: Format = BF16,
) -> MoEReference:
    """A MoE layer in float64, and the error bounds that the head of this module derives. Local; slow.

    config        num_experts and combine are used
    rows          [T, H], the values that travel, decoded (`decode_planes`)
    topk_ids      int32 [T, K]; ids outside [0, num_experts) contribute nothing, equal ids one contribution each
    topk_weights  fp32 [T, K]
    experts       global expert -> (w13 [2I or I, H], gate rows first, w2 [H, I]) or these and (b13 [2I or I], b2 [H]),
                  decoded (`ExpertWeights.decoded`)
    num_ranks     over how many ranks the experts are spread: each rounds its partial sum
    activation    between the products
    intermediate  how its result enters the second one: BF16, MXFP4, or NVFP4 (with a global scale for each row)

    Returns `MoEReference`. A row with NaN gives NaN in `out` and in the bounds.

    Raises ValueError for shapes that do not fit together.
    """
    parts = [
        reference_part(config, rows, topk_ids, topk_weights, experts, num_ranks, rank, activation, intermediate)
        for rank in range(num_ranks)
    ]
    return reference_sum(config, parts)


def reference_part(
    config: Shape,
    rows: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Experts,
    num_ranks: int,
    rank: int,
    activation: Activation = SILU,
    intermediate: Format = BF16,
) -> MoEPart:
    """What the experts of one rank add to `reference_moe`, for a reference that several processes share. Local; slow.

    Arguments as `reference_moe`; `experts` is only asked for the experts that `rank` owns.

    Returns `MoEPart`, to be given to `reference_sum` with those of all other ranks.

    Raises ValueError for shapes that do not fit together.
    """
    if rows.dim() != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[:1] != rows.shape[:1]:
        raise ValueError(
            f"rows {tuple(rows.shape)}, topk_ids {tuple(topk_ids.shape)}, topk_weights {tuple(topk_weights.shape)}: "
            "must be [T, H], [T, K] and [T, K]"
        )
    values, weights = rows.double(), topk_weights.double()
    total, magnitude, error, variance, shift = (torch.zeros_like(values) for _ in range(5))
    asked = set(topk_ids.flatten().tolist())
    for expert in local_experts(rank, config.num_experts, num_ranks):
        if expert not in asked:
            continue
        chosen = topk_ids == expert
        tokens = chosen.any(dim=1).nonzero().flatten()
        weight = torch.where(chosen, weights, 0.0)[tokens]
        product = _apply(activation, intermediate, values[tokens], *experts(expert))
        times = weight.abs().sum(dim=1, keepdim=True)
        total.index_add_(0, tokens, weight.sum(dim=1, keepdim=True) * product.y)
        magnitude.index_add_(0, tokens, times * (product.y.abs() + product.error))
        error.index_add_(0, tokens, times * product.error)
        variance.index_add_(0, tokens, (times * product.spread).square())
        shift.index_add_(0, tokens, times * product.shift)
    roundings = topk_ids.shape[1] + 2
    error += gamma(roundings) * magnitude
    variance += roundings * (U * magnitude).square()
    outbox_rounding = outbox_error(config.combine, total.abs() + error)
    return MoEPart(total, error + outbox_rounding, variance + outbox_rounding.square(), shift)


def reference_sum(config: Shape, parts: Sequence[MoEPart]) -> MoEReference:
    """Add the parts of all ranks, as combine does, and bound the last rounding too. Local."""
    out = torch.stack([part.total for part in parts]).sum(dim=0)
    error = torch.stack([part.error for part in parts]).sum(dim=0)
    magnitude = torch.stack([part.total.abs() + part.error for part in parts]).sum(dim=0)
    variance = torch.stack([part.variance for part in parts]).sum(dim=0)
    error = error + gamma(len(parts)) * magnitude
    likely = CONFIDENCE * (variance + len(parts) * (U * magnitude).square()).sqrt()
    likely = likely + torch.stack([part.shift for part in parts]).sum(dim=0)
    relative, absolute = rounding(config.combine)
    error, likely = (e + relative * (out.abs() + e) + absolute for e in (error, likely))
    return MoEReference(out, error, torch.minimum(error, likely))


def _apply(
    activation: Activation,
    intermediate: Format,
    a: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
) -> _Product:
    """An expert on rows a [n, H] float64, with the error of each element of the result."""
    w13, w2 = w13.double(), w2.double()
    b13, b2 = (w.new_zeros(w.shape[0]) if b is None else b.double() for w, b in ((w13, b13), (w2, b2)))
    hidden, inner = w13.shape[1], w2.shape[1]
    gate_up = (a @ w13.T + b13).chunk(activation.num_matrices, dim=1)
    sums = a.abs() @ w13.abs().T + b13.abs()
    m = activation(*gate_up)
    error = _activation_error(activation, gate_up, m, gamma(hidden + EXTRA_ROUNDINGS) * sums)
    spread = _activation_error(activation, gate_up, m, (math.sqrt(hidden) + EXTRA_ROUNDINGS) * U * sums)
    if intermediate == BF16:
        q = m
        error, spread = (e + BF16_U * (m.abs() + e) + 2.0**-134 for e in (error, spread))
        shift = torch.zeros_like(a)
    else:
        q = quantized(m, intermediate)
        shift = quantization_error(m, torch.minimum(error, CONFIDENCE * spread), intermediate) @ w2.abs().T
        error, spread = quantization_error(m, error, intermediate), torch.zeros_like(m)
    magnitude = q.abs() @ w2.abs().T + b2.abs()
    y_error = error @ w2.abs().T
    y_error += gamma(inner + EXTRA_ROUNDINGS) * (magnitude + y_error)
    variance = spread.square() @ w2.square().T
    variance += ((math.sqrt(inner) + EXTRA_ROUNDINGS) * U * (magnitude + y_error)).square()
    return _Product(q @ w2.T + b2, y_error, variance.sqrt(), shift)


def _activation_error(activation: Activation, gate_up: Sequence[Tensor], m: Tensor, product_error: Tensor) -> Tensor:
    """The error of m in fp32, from the error of gate over up."""
    gate, *ups = gate_up
    gate_error, *up_errors = product_error.chunk(activation.num_matrices, dim=1)
    curve, alpha, x = activation.curve, activation.alpha, gate.clamp(max=activation.limit)
    f = curve.value(x, alpha)
    error = curve.slope(x, gate_error) * gate_error
    error = error + U * curve.roundings(x, gate_error, alpha, f.abs() + error) + 2.0**-119 / alpha
    for up, up_error in zip(ups, up_errors):
        h = activation.factor(up)
        h_error = up_error + U * (h.abs() + up_error)
        error = error * (h.abs() + h_error) + f.abs() * h_error
    return error + 2 * U * (m.abs() + error)
