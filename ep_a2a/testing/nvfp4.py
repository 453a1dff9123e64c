"""NVFP4 in plain torch: the definition that every kernel of this library is compared with, bit for bit.

value = code (e2m1) x block scale (e4m3, one for 16 values along hidden) x global scale (fp32, one for a row)

A code is s|eem: the sign in bit 3, then one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Two codes share a byte, the
one with the even index in the low nibble. Every operation below is rounded on its own, to nearest, ties to even.

    encode      amax    = largest |x| of the block, x taken to fp32 (exact for bf16 and fp16)
                scale   = e4m3(min((amax / 6) / g, 448))
                r       = (1 / g) / scale
                code    = e2m1(x * r), saturating at 6; the sign of x is kept, so -0 is code 8
    not finite  a block that holds NaN or Inf: scale = NaN (0x7f), its 16 codes = 0, so that it decodes to NaN
    scale 0     a block whose scale rounds to 0: its 16 codes = 0
    g           when not given: max(amax of the row's finite values / 2688, 2^-100), or 1 where that amax is 0
    decode      code * scale is exact in fp32, times g one fp32 rounding, then to the dtype asked for
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
MIN_GLOBAL_SCALE = 2.0**-100  # keeps 1 / g / scale finite for every scale

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN_SCALE = 0x7F


def encode_nvfp4(x: Tensor, global_scale: Tensor | float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Encode rows as NVFP4, as the head of this module defines it. Slow, local, on any device.

    x             [..., H] bfloat16, float16 or float32; H a multiple of 16
    global_scale  float32 [...], or a number for all rows, finite and at least 2^-100; None = from each row

    Returns (packed uint8 [..., H/2], scales float8_e4m3fn [..., H/16], global_scale float32 [...]).

    Raises TypeError for another dtype, ValueError for a shape that does not fit or a global scale out of range.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"x is {x.dtype}: must be bfloat16, float16 or float32")
    if x.dim() < 1 or x.shape[-1] % BLOCK:
        raise ValueError(f"x has shape {tuple(x.shape)}: the last dimension must be a multiple of {BLOCK}")
    values = x.float()
    g = _row_global_scale(values) if global_scale is None else _given_global_scale(values, global_scale)
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)
    finite = blocks.isfinite().all(dim=-1)
    amax = torch.where(finite.unsqueeze(-1), blocks.abs(), 0).amax(dim=-1)
    quotient = _divide(amax, E2M1_MAX) / g.unsqueeze(-1)
    scales = quotient.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    reciprocal = (torch.ones_like(g) / g).unsqueeze(-1) / scales.float()
    coded = scales.float() > 0  # so far the scale of a block that is not finite is 0
    codes = torch.where(coded.unsqueeze(-1), _e2m1(blocks * reciprocal.unsqueeze(-1)), 0)
    scale_bytes = torch.where(finite, scales.view(torch.uint8), _NAN_SCALE)
    pairs = codes.to(torch.uint8).reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scale_bytes.to(torch.uint8).view(torch.float8_e4m3fn), g


def decode_nvfp4(packed: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode NVFP4 rows: code * scale (exact), times the global scale (one fp32 rounding), then to `dtype`. Local.

    packed        uint8 [..., H/2]
    scales        float8_e4m3fn [..., H/16]
    global_scale  float32 [...], or [] for all rows
    dtype         of the result; the last rounding is to nearest, ties to even

    Returns [..., H] in `dtype`. A NaN scale gives 16 NaNs.

    Raises TypeError for another dtype, ValueError for shapes that do not fit.
    """
    if (packed.dtype, scales.dtype, global_scale.dtype) != (torch.uint8, torch.float8_e4m3fn, torch.float32):
        raise TypeError(
            f"packed is {packed.dtype}, scales {scales.dtype}, global_scale {global_scale.dtype}: "
            "must be uint8, float8_e4m3fn and float32"
        )
    if packed.shape[:-1] != scales.shape[:-1] or packed.shape[-1] * 2 != scales.shape[-1] * BLOCK:
        raise ValueError(
            f"packed is {tuple(packed.shape)}, scales {tuple(scales.shape)}: must be [..., H/2] and [..., H/{BLOCK}]"
        )
    if global_scale.dim() and global_scale.shape != packed.shape[:-1]:
        raise ValueError(f"global_scale has shape {tuple(global_scale.shape)}: rows have {tuple(packed.shape[:-1])}")
    signed = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES), dtype=torch.float32, device=packed.device)
    byte = torch.arange(256, device=packed.device)
    table = torch.stack((signed[byte & 15], signed[byte >> 4]), dim=1)
    values = table.index_select(0, packed.reshape(-1).int()).reshape(*scales.shape, BLOCK)
    values = values.mul_(scales.float().unsqueeze(-1)).reshape(*packed.shape[:-1], packed.shape[-1] * 2)
    return values.mul_(global_scale.unsqueeze(-1)).to(dtype)


def _divide(values: Tensor, divisor: float) -> Tensor:
    """Divide by a tensor: torch on a GPU multiplies by the inverse of a plain number, which rounds differently."""
    return values / torch.full_like(values, divisor)


def _row_global_scale(values: Tensor) -> Tensor:
    """The global scale of each row of fp32 values, when the caller gives none."""
    if values.shape[-1] == 0:
        return values.new_ones(values.shape[:-1])
    amax = torch.where(values.isfinite(), values.abs(), 0).amax(dim=-1)
    g = _divide(amax, E2M1_MAX * E4M3_MAX).clamp(min=MIN_GLOBAL_SCALE)
    return torch.where(amax > 0, g, 1.0)


def _given_global_scale(values: Tensor, global_scale: Tensor | float) -> Tensor:
    if isinstance(global_scale, Tensor) and global_scale.dtype != torch.float32:
        raise TypeError(f"global_scale is {global_scale.dtype}: must be float32")
    g = torch.as_tensor(global_scale, dtype=torch.float32, device=values.device)
    if g.dim() and g.shape != values.shape[:-1]:
        raise ValueError(f"global_scale has shape {tuple(g.shape)}: rows have {tuple(values.shape[:-1])}")
    wrong = ~(g.isfinite() & (g >= MIN_GLOBAL_SCALE))
    if wrong.any():
        raise ValueError(f"global_scale holds {g[wrong].flatten()[0].item()}: must be finite and at least 2^-100")
    return g.expand(values.shape[:-1]).contiguous()


def _e2m1(values: Tensor) -> Tensor:
    """The code of each fp32 value: nearest magnitude, a tie goes to the even code, saturating at 6."""
    m = values.abs()
    code = (m > 0.25).int() + (m >= 0.75).int() + (m > 1.25).int() + (m >= 1.75).int()
    code += (m > 2.5).int() + (m >= 3.5).int() + (m > 5.0).int()
    return code | values.signbit().int() << 3
