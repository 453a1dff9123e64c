"""How far a re-quantised intermediate can be from the float64 reference's own: quantisation is not continuous.

The reference quantises its float64 m, an implementation some m' with |m' - m| <= reach. Where m is farther than that
from every rounding boundary both get the same code, else the next one; so what is bounded is the image of the interval
[m - reach, m + reach] under "quantise". In a block of NVFP4, or of
MXFP4, where g = 1:

    g          is monotone in the row's magnitudes: it lies between g(|m| - reach) = g0 and g(|m| + reach) = g1
    scale      is monotone in the block's magnitudes and falls with g: between s(|m| - reach, g1) and s(|m| + reach, g0)
    same       where these two are equal, to s: the code is monotone in m' / (s g), which is extreme at one of the four
    scale      pairs of an end of m' and an end of g; widened by 6 u for the roundings of reciprocal and products. The
               least and the largest code, each times s and the worse end of g, enclose what is decoded. Far from a
               boundary they are one code, and what is left is the relative width of g
    scale may  the decoded m' is within `formats.coding_error` of m', whatever the scale, and that grows with the
    flip       magnitudes: |q(m') - q(m)| <= coding_error(|m| + reach) + reach + |q(m) - m|

The two ends of m are taken to fp32, for which the reach is widened by 2 u.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_a2a.layout import NVFP4, Format
from ep_a2a.testing.formats import coding_error, decode_format, encode_format
from ep_a2a.testing.nvfp4 import MIN_GLOBAL_SCALE, encode_nvfp4

U = 2.0**-24
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantized(m: Tensor, intermediate: Format) -> Tensor:
    """The values of m [n, I] float64 after re-quantisation, rounded to fp32 first; in float64. Local."""
    return decode_format(encode_format(m.float(), intermediate), intermediate).double()


def quantization_error(m: Tensor, reach: Tensor, intermediate: Format) -> Tensor:
    """How far from quantized(m) the quantised m' can be, when |m' - m| <= reach; all [n, I] float64. Local."""
    block = intermediate.columns[1].hidden_per_element
    value = quantized(m, intermediate)
    reach = reach + 2 * U * (m.abs() + reach) + 2.0**-148
    low, high = (m.abs() - reach).clamp(min=0).float(), (m.abs() + reach).float()
    if intermediate == NVFP4:
        g0, g1 = encode_nvfp4(low)[2], encode_nvfp4(high)[2]
        g0 = torch.where(low.amax(dim=-1) > 0, g0, MIN_GLOBAL_SCALE)  # a row of zeros has g = 1
        s0, s1 = encode_nvfp4(low, g1)[1].double(), encode_nvfp4(high, g0)[1].double()
    else:
        g0 = g1 = m.new_ones(m.shape[:-1])
        s0, s1 = encode_format(low, intermediate)[1].double(), encode_format(high, intermediate)[1].double()
    s = s1.repeat_interleave(block, dim=-1)
    steps = [s * g.double().unsqueeze(-1) for g in (g0, g1)]
    ratios = [x / step.clamp(min=2.0**-200) for x in (m - reach, m + reach) for step in steps]
    least = torch.stack([_nearest(x - 6 * U * x.abs()) for x in ratios]).amin(dim=0)
    most = torch.stack([_nearest(x + 6 * U * x.abs()) for x in ratios]).amax(dim=0)
    least = torch.minimum(*(least * step for step in steps))
    most = torch.maximum(*(most * step for step in steps))
    same = torch.maximum(most - value, value - least) + 2 * U * value.abs()
    flip = (value - m).abs() + reach + coding_error(intermediate, high.double())
    return torch.where((s0 == s1).repeat_interleave(block, dim=-1), same, flip)


def _nearest(x: Tensor) -> Tensor:
    """The e2m1 value nearest to x in float64; the ends were widened past a boundary that they met."""
    boundaries, values = (torch.tensor(v, dtype=torch.float64) for v in (_BOUNDARIES, _MAGNITUDES))
    return values[torch.bucketize(x.abs(), boundaries)] * x.sign()
