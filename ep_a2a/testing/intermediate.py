"""How far a re-quantised intermediate can be from the float64 reference's own: quantisation is not continuous.

The reference quantises its float64 m, an implementation some m' with |m' - m| <= reach. Where m is farther than that
from every rounding boundary both get the same code, else the next one; so what is bounded is the image of the interval
[m - reach, m + reach] under "quantise". In a block of NVFP4 (MXFP4 is the same with g = 1):

    g          is monotone in the row's magnitudes: it lies between g(|m| - reach) = g0 and g(|m| + reach) = g1
    scale      is monotone in the block's magnitudes and falls with g: between s(|m| - reach, g1) and s(|m| + reach, g0)
    same       where these two are equal, to s: the code is monotone in m' / (s g), which is extreme at one of the four
    scale      pairs of an end of m' and an end of g; widened by 6 u for the roundings of reciprocal and products. The
               least and the largest code, each times s and the worse end of g, enclose what is decoded. Far from a
               boundary they are one code, and what is left is the relative width of g
    scale may  any code of any scale is near m' itself: half the widest step of e2m1 is one scale, and a scale that was
    flip       rounded down (e4m3: by at most half its step) makes 6 saturate at most 3 of these steps too early, which
               is no more than one normal scale. With s g <= amax / 6 * 17/16 that is at most 17/96 amax + 3 * 2^-9 g

The two ends of m are taken to fp32, for which the reach is widened by 2 u.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_a2a.layout import NVFP4, Format
from ep_a2a.testing.nvfp4 import MIN_GLOBAL_SCALE, decode_nvfp4, encode_nvfp4

U = 2.0**-24
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantized(m: Tensor, intermediate: Format) -> Tensor:
    """The values of m [n, I] float64 after re-quantisation, rounded to fp32 first; in float64. Local."""
    assert intermediate == NVFP4
    return decode_nvfp4(*encode_nvfp4(m.float())).double()


def quantization_error(m: Tensor, reach: Tensor, intermediate: Format) -> Tensor:
    """How far from quantized(m) the quantised m' can be, when |m' - m| <= reach; all [n, I] float64. Local."""
    block = intermediate.columns[1].hidden_per_element
    value = quantized(m, intermediate)
    reach = reach + 2 * U * (m.abs() + reach) + 2.0**-148
    low, high = (m.abs() - reach).clamp(min=0).float(), (m.abs() + reach).float()
    g0, g1 = encode_nvfp4(low)[2], encode_nvfp4(high)[2]
    g0 = torch.where(low.amax(dim=-1) > 0, g0, MIN_GLOBAL_SCALE)  # a row of zeros has g = 1
    s0, s1 = encode_nvfp4(low, g1)[1].double(), encode_nvfp4(high, g0)[1].double()
    s = s1.repeat_interleave(block, dim=-1)
    steps = [s * g.double().unsqueeze(-1) for g in (g0, g1)]
    ratios = [x / step.clamp(min=2.0**-200) for x in (m - reach, m + reach) for step in steps]
    least = torch.stack([_nearest(x - 6 * U * x.abs(), False) for x in ratios]).amin(dim=0)
    most = torch.stack([_nearest(x + 6 * U * x.abs(), True) for x in ratios]).amax(dim=0)
    least = torch.minimum(*(least * step for step in steps))
    most = torch.maximum(*(most * step for step in steps))
    same = torch.maximum(most - value, value - least) + 2 * U * value.abs()
    amax = high.double().reshape(*s1.shape, block).amax(dim=-1).repeat_interleave(block, dim=-1)
    flip = (value - m).abs() + reach + 17 / 96 * (1 + 8 * U) * amax + 3 * 2.0**-9 * g1.double().unsqueeze(-1)
    return torch.where((s0 == s1).repeat_interleave(block, dim=-1), same, flip)


def _nearest(x: Tensor, up: bool) -> Tensor:
    """The e2m1 value nearest to x in float64; on a boundary the upper one or the lower one."""
    magnitude, outward = x.abs(), (x > 0) == up
    boundaries, values = torch.tensor(_BOUNDARIES).double(), torch.tensor(_MAGNITUDES).double()
    # `right` counts the boundaries <= x, the other side those < x
    code = torch.where(
        outward, torch.bucketize(magnitude, boundaries, right=True), torch.bucketize(magnitude, boundaries)
    )
    return values[code] * x.sign()
