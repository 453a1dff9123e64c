"""NVFP4 encode and decode by the kernels of `quant.cu`.

value = e2m1 code * e4m3 scale of its 16-value block * fp32 global scale. `ep_a2a.testing` has the same steps in plain
torch; both give the same bits.
"""

from __future__ import annotations

import torch

from ep_a2a import native
from ep_a2a.layout import NVFP4

__all__ = ["decode_nvfp4", "encode_nvfp4"]


def encode_nvfp4(
    values: torch.Tensor, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode rows to NVFP4.

    Local; runs on the current stream; may be captured in a graph (the results come from torch's allocator).

    values        [..., H] bf16, fp16 or fp32, contiguous, H a multiple of 16
    global_scale  fp32, one for all rows ([] or [1]) or one for each ([...]); None = from each row's largest value
    Returns       packed uint8 [..., H/2], low nibble first; scales float8_e4m3fn [..., H/16]; global scale fp32 [...]
                  (as given, if it was given). A block with a NaN or an infinity has a NaN scale and zero codes
    Raises        TypeError, ValueError
    """
    _check_values(values)
    *outer, hidden = values.shape
    rows = values.numel() // hidden
    packed = values.new_empty((*outer, hidden // 2), dtype=torch.uint8)
    scales = values.new_empty((*outer, hidden // 16), dtype=torch.float8_e4m3fn)
    given = global_scale is not None
    if global_scale is None:
        global_scale = values.new_empty(outer, dtype=torch.float32)
    params = _params(values, rows, packed, scales, global_scale)
    params.given_scale = int(given)
    native.load(_kind(values)).nvfp4_encode(params, stream_of(values))
    return packed, scales, global_scale


def decode_nvfp4(
    packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Decode NVFP4 rows: the exact product of code and block scale, times the global scale, rounded to `dtype`.

    Local; runs on the current stream; may be captured in a graph.

    packed        uint8 [..., H/2]; scales float8_e4m3fn [..., H/16], both contiguous
    global_scale  fp32, one for all rows ([] or [1]) or one for each ([...])
    Returns       [..., H] in bf16, fp16 or fp32
    Raises        TypeError, ValueError
    """
    if dtype not in native.NUMBER:
        raise TypeError(f"dtype is {dtype}: bfloat16, float16 or float32 can be decoded to")
    for name, tensor in (("packed", packed), ("scales", scales)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if packed.dtype != torch.uint8 or scales.dtype != torch.float8_e4m3fn:
        raise TypeError(f"packed is {packed.dtype} and scales {scales.dtype}: wanted uint8 and float8_e4m3fn")
    *outer, half = packed.shape
    hidden = 2 * half
    if hidden % 16 or tuple(scales.shape) != (*outer, hidden // 16):
        raise ValueError(f"packed {list(packed.shape)} needs scales {[*outer, hidden // 16]}, not {list(scales.shape)}")
    if not (packed.is_contiguous() and scales.is_contiguous()):
        raise ValueError("packed and scales must be contiguous")
    values = packed.new_empty((*outer, hidden), dtype=dtype)
    rows = packed.numel() // half if half else 0
    params = _params(values, rows, packed, scales, global_scale)
    native.load(_kind(packed)).nvfp4_decode(params, stream_of(packed))
    return values


def stream_of(tensor: torch.Tensor) -> int:
    """The current stream of a tensor's device, as the launchers take it; 0 on a CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def _kind(tensor: torch.Tensor) -> str:
    return "cuda" if tensor.is_cuda else "host"


def _check_values(values: torch.Tensor) -> None:
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"values must be a torch.Tensor, not {type(values).__name__}")
    if values.dtype not in native.NUMBER:
        raise TypeError(f"values are {values.dtype}: bfloat16, float16 or float32 can be encoded")
    multiple = NVFP4.hidden_multiple
    if values.dim() == 0 or values.shape[-1] == 0 or values.shape[-1] % multiple:
        raise ValueError(f"values are {list(values.shape)}: the last size must be a multiple of {multiple}")
    if not values.is_contiguous():
        raise ValueError(f"values are strided {list(values.stride())}: they must be contiguous")


def _params(
    values: torch.Tensor, rows: int, packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor
) -> native.Nvfp4Params:
    if not isinstance(global_scale, torch.Tensor):
        raise TypeError(f"global_scale must be a torch.Tensor, not {type(global_scale).__name__}")
    if global_scale.dtype != torch.float32 or global_scale.device != values.device:
        raise TypeError(f"global_scale is {global_scale.dtype} on {global_scale.device}: float32 on {values.device}")
    per_row = tuple(global_scale.shape) == tuple(values.shape[:-1])
    if not per_row and global_scale.numel() != 1:
        raise ValueError(
            f"global_scale is {list(global_scale.shape)}: one value, or one for each row {list(values.shape[:-1])}"
        )
    if per_row and not global_scale.is_contiguous():
        raise ValueError(f"global_scale is strided {list(global_scale.stride())}: it must be contiguous")
    params: native.Nvfp4Params = native.with_size(native.Nvfp4Params())
    params.number = native.NUMBER[values.dtype]
    params.num_rows = rows
    params.hidden = values.shape[-1]
    params.scale_stride = int(per_row and global_scale.numel() > 1)
    params.values = values.data_ptr()
    params.packed = packed.data_ptr()
    params.scales = scales.data_ptr()
    params.global_scale = global_scale.data_ptr()
    return params
