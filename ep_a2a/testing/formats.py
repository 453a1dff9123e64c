"""All payload formats in plain torch: the definition that the kernels are compared with, bit for bit. NVFP4: `nvfp4`.

value = code x scale of its block along hidden. Two e2m1 codes share a byte, the even index low; an e4m3 code is a byte.

    MXFP4, MXFP8   scale = 2^max(floor(log2 amax) - E, -127), E = 2 (e2m1) or 8 (e4m3), as ue8m0: the byte is the
                   exponent + 127. code = RNE(x / scale), exact but for its rounding. A block of zeros: scale byte 0
    FP8            scale = max(amax / 448, 2^-100) in fp32, 1 where amax is 0; code = RNE_e4m3(x * (1 / scale))
    both           amax = largest |x| of the block; codes saturate at 6 and 448 and keep the sign of x; every step is
                   one fp32 rounding, to nearest, ties to even. A block of zeros has codes 0. A block that holds NaN
                   or Inf: scale = NaN (ue8m0 0xff), codes 0
    decode         code * scale: one fp32 rounding (exact for MX, but where it overflows), then to the dtype asked for

How far a decoded value can be from x (t = |x| / scale; half of a code's step is at most t / 4 for e2m1 and t / 16 for
e4m3, or, below the smallest normal code, 1/4 and 2^-10):

    FP8            max(|x| / 16, 2^-10 scale), scale <= max(amax / 448, 2^-100): t is at most 448, but for roundings
    MXFP8          max(|x| / 8, 2^-10 scale), scale <= max(amax / 256, 2^-127): t < 512 saturates to 448, off by t / 8
    MXFP4          max(|x| / 4, scale / 4), scale <= max(amax / 4, 2^-127): t < 8 saturates to 6, off by t / 4
    NVFP4          a = amax / 6 / g is rounded to e4m3 by at most max(a / 17, 2^-10): max(|x| / 4, scale / 4), with
                   scale <= (17/16 a + 2^-10) g; where it was rounded down, 6 a saturates to 6 scale, off by t / 17,
                   or by 6 * 2^-10 g near the scale's zero. g = max(largest |x| of the row / 2688, 2^-100)

The roundings of FP8's and NVFP4's scales, of their inverses and products are at most 8 fp32 ones: 2^-20 |x| on top.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ep_a2a.layout import FP8, MXFP4, NVFP4, Format
from ep_a2a.testing.nvfp4 import (
    _MAGNITUDES,
    E2M1_MAX,
    E4M3_MAX,
    MIN_GLOBAL_SCALE,
    _divide,
    _e2m1,
    decode_nvfp4,
    encode_nvfp4,
)

_UE8M0_NAN = 0xFF


def encode_format(x: Tensor, fmt: Format) -> tuple[Tensor, ...]:
    """Encode rows, as the head of this module defines it. Slow, local, on any device.

    x  [..., H] bfloat16, float16 or float32; H a multiple of `fmt.hidden_multiple`

    Returns (rows, scales), for NVFP4 (rows, scales, global_scale), for formats that do not encode (rows,).

    Raises TypeError for another dtype, ValueError for a shape that does not fit.
    """
    if not fmt.is_encoded:
        return (x.to(fmt.columns[0].dtype),)
    if fmt == NVFP4:
        return encode_nvfp4(x)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"x is {x.dtype}: must be bfloat16, float16 or float32")
    rows, scales = fmt.columns
    block = scales.hidden_per_element
    if x.dim() < 1 or x.shape[-1] % block:
        raise ValueError(f"x has shape {tuple(x.shape)}: the last dimension must be a multiple of {block}")
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // block, block)
    finite = blocks.isfinite().all(dim=-1)
    amax = torch.where(finite.unsqueeze(-1), blocks.abs(), 0).amax(dim=-1)
    if fmt == FP8:
        found = torch.where(amax > 0, _divide(amax, E4M3_MAX).clamp(min=MIN_GLOBAL_SCALE), 1.0)
        factor, plane = torch.ones_like(found) / found, torch.where(finite, found, torch.nan)
    else:
        exponent = amax.view(torch.int32) >> 23  # biased, of a value >= 0
        byte = (exponent - (2 if fmt == MXFP4 else 8)).clamp(min=0)
        factor = torch.ldexp(torch.ones_like(amax), 127 - byte)
        plane = torch.where(finite, byte, _UE8M0_NAN).to(torch.uint8).view(scales.dtype)
    scaled = blocks * factor.unsqueeze(-1)
    if rows.dtype == torch.uint8:
        codes = _e2m1(scaled)
    else:
        codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(rows.dtype).view(torch.uint8).int()
    codes = torch.where((finite & (amax > 0)).unsqueeze(-1), codes, 0).to(torch.uint8).reshape(x.shape)
    if rows.dtype == torch.uint8:
        return codes[..., ::2] | codes[..., 1::2] << 4, plane
    return codes.view(rows.dtype), plane


def decode_format(planes: Sequence[Tensor], fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., H] that planes stand for, as the head of this module defines it. Slow, local, on any device."""
    if not fmt.is_encoded:
        return planes[0].to(dtype)
    if fmt == NVFP4:
        return decode_nvfp4(planes[0], planes[1], planes[2], dtype)
    rows, scales = planes
    if rows.dtype == torch.uint8:
        signed = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES), dtype=torch.float32, device=rows.device)
        values = signed[torch.stack((rows & 15, rows >> 4), dim=-1).int()].flatten(-2)
    else:
        values = rows.float()
    blocks = values.reshape(*scales.shape, fmt.columns[1].hidden_per_element)
    return (blocks * scales.float().unsqueeze(-1)).reshape(values.shape).to(dtype)


def coding_error(fmt: Format, magnitude: Tensor) -> Tensor:
    """How far decode(encode(x)) can be from x where |x| <= magnitude: the bound of the module's head. Local.

    magnitude  [..., H] float64, finite

    Returns [..., H] float64; 0 where the magnitude is 0. Grows with every magnitude of a row.
    """
    block = fmt.columns[1].hidden_per_element
    shape = *magnitude.shape[:-1], magnitude.shape[-1] // block, block
    amax = magnitude.reshape(shape).amax(dim=-1).repeat_interleave(block, dim=-1)
    if fmt == NVFP4:
        g = (magnitude.amax(dim=-1, keepdim=True) / (E2M1_MAX * E4M3_MAX)).clamp(min=MIN_GLOBAL_SCALE)
        step = torch.maximum((17 / 16 * amax / E2M1_MAX + 2.0**-10 * g) / 4, 6 * 2.0**-10 * g)
        relative = 1 / 4
    elif fmt == FP8:
        relative, step = 1 / 16, 2.0**-10 * (amax / E4M3_MAX).clamp(min=MIN_GLOBAL_SCALE)
    elif fmt == MXFP4:
        relative, step = 1 / 4, (amax / 4).clamp(min=2.0**-127) / 4
    else:
        relative, step = 1 / 8, 2.0**-10 * (amax / 256).clamp(min=2.0**-127)
    found = torch.maximum(relative * magnitude, step) * (1 + 2.0**-20) + 2.0**-20 * magnitude
    return found * (magnitude > 0)
