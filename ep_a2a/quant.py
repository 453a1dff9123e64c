"""Encode and decode rows by the kernels of `quant.cu`; `cuda/codec.cuh` and docs/design.md say what the numbers are.

`ep_a2a.testing` has the same steps in plain torch; both give the same bits. The last functions reorder scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_a2a import abi, native
from ep_a2a.device import check_current, current_stream
from ep_a2a.layout import VECTOR_BYTES, Format

__all__ = ["decode", "encode", "swizzle_scales", "unswizzle_scales"]

TILE_ROWS, TILE_COLUMNS = 128, 4


def encode(values: torch.Tensor, fmt: Format, global_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Encode rows to the planes of a format.

    Local; runs on the current stream; may be captured in a graph (the results come from torch's allocator).

    values        [..., H] bf16, fp16 or fp32, contiguous, H a multiple of `fmt.hidden_multiple`
    global_scale  NVFP4: fp32, one for all rows ([] or [1]) or each ([...]); None = from each row's largest value
    Returns       (rows, scales) or, NVFP4, (rows, scales, global_scale [...], as given if it was given): [..., columns]
                  in the dtypes of `fmt.columns`. A block with a NaN or an infinity has a NaN scale and zero codes.
                  (rows,) rounded to the dtype, for a format that does not encode
    Raises        TypeError, ValueError
    """
    _check_values(values, fmt)
    if not fmt.is_encoded:
        return (values.to(fmt.columns[0].dtype),)
    values = on_vectors(values)
    *outer, hidden = values.shape
    planes = [values.new_empty((*outer, hidden // c.hidden_per_element), dtype=c.dtype) for c in fmt.columns]
    given = global_scale is not None
    if fmt.row_scale:
        planes.append(values.new_empty(outer, dtype=torch.float32) if global_scale is None else global_scale)
    elif given:
        raise ValueError(f"global_scale: {fmt} rows have none")
    params = _params(values, planes, fmt)
    params.given_scale = int(given)
    native.load(native.library_kind(values.device)).quant_encode(params, current_stream(values.device))
    return tuple(planes)


def on_vectors(values: torch.Tensor) -> torch.Tensor:
    """`values`, or a copy where they do not start on a multiple of 16 bytes, as encoding reads whole vectors."""
    return values.clone() if values.data_ptr() % VECTOR_BYTES else values


class RowEncoder:
    """`encode` of rows [T, H], each with a global scale, to planes at fixed addresses: little before the launch."""

    def __init__(self, fmt: Format, hidden: int, planes: Sequence[int], library: native.Library) -> None:
        self._launch = library.quant_encode
        self._params = abi.with_size(abi.QuantParams(coding=abi.CODING[fmt], hidden=hidden, scale_stride=1))
        self._params.codes, self._params.scales = planes[:2]
        self._params.global_scale = planes[2] if fmt.row_scale else None

    def __call__(self, values: int, number: int, num_rows: int, stream: int) -> None:
        """Encode rows at an address, of a number as `abi.NUMBER` has it. Local; on `stream`."""
        params = self._params
        params.values, params.number, params.num_rows = values, number, num_rows
        self._launch(params, stream)


def decode(planes: Sequence[torch.Tensor], fmt: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode rows: the product of code and block scale, times the global scale if there is one, rounded to `dtype`.

    Local; runs on the current stream; may be captured in a graph.

    planes   as `encode` returns them, strided or not; a global scale is fp32, one for all rows ([] or [1]) or for each
    Returns  [..., H] in bf16, fp16 or fp32
    Raises   TypeError, ValueError
    """
    if dtype not in abi.NUMBER:
        raise TypeError(f"dtype is {dtype}: bfloat16, float16 or float32 can be decoded to")
    if len(planes) != len(fmt.plane_names):
        raise ValueError(f"{len(planes)} planes: {fmt} has {', '.join(fmt.plane_names)}")
    for name, plane in zip(fmt.plane_names, planes):
        _check_is_tensor(name, plane)
    hidden = planes[0].shape[-1] * fmt.columns[0].hidden_per_element
    outer = planes[0].shape[:-1]
    for plane, column in zip(planes, fmt.columns):
        wanted = (*outer, hidden // column.hidden_per_element)
        if plane.dtype != column.dtype:
            raise TypeError(f"{column.name} is {plane.dtype}: {fmt} wants {column.dtype}")
        if hidden % fmt.hidden_multiple or tuple(plane.shape) != wanted or plane.device != planes[0].device:
            raise ValueError(
                f"{column.name} is {list(plane.shape)} on {plane.device}: {fmt} rows {list(planes[0].shape)} on "
                f"{planes[0].device} want {list(wanted)}, of a multiple of {fmt.hidden_multiple} values"
            )
    if not fmt.is_encoded:
        return planes[0].to(dtype)
    check_current(planes[0].device, "planes are")
    planes = [plane.contiguous() for plane in planes]
    values = planes[0].new_empty((*outer, hidden), dtype=dtype)
    native.load(native.library_kind(values.device)).quant_decode(
        _params(values, planes, fmt), current_stream(values.device)
    )
    return values


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales in the order that Blackwell's block-scaled tensor cores take: tiles of 128 rows x 4 scales, 512 bytes.

    Local; current stream; may be captured in a graph. Scale (row, column) lies in tile [row / 128, column / 4] at
    row % 32 * 16 + row / 32 % 4 * 4 + column % 4. Rows are padded to 128 and columns to 4, with zero bytes.

    scales   [rows, columns] of one byte: the scales of NVFP4, MXFP4 or MXFP8, strided or not
    Returns  [ceil(rows / 128), ceil(columns / 4), 512] of the same dtype
    Raises   TypeError, ValueError
    """
    if scales.dtype.itemsize != 1:
        raise TypeError(f"scales are {scales.dtype}: the tile order is for scales of one byte")
    if scales.dim() != 2:
        raise ValueError(f"scales are {list(scales.shape)}: wanted [rows, columns]")
    rows, columns = scales.shape
    row_tiles, column_tiles = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    padded = scales.new_zeros((row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS), dtype=torch.uint8)
    padded[:rows, :columns] = scales.view(torch.uint8)
    tiles = padded.view(row_tiles, 4, 32, column_tiles, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles, column_tiles, TILE_ROWS * TILE_COLUMNS).view(scales.dtype)


def unswizzle_scales(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `swizzle_scales`: [row tiles, column tiles, 512] of one byte -> [rows, columns].

    Local; current stream; may be captured in a graph. Raises ValueError.
    """
    wanted = (-(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS), TILE_ROWS * TILE_COLUMNS)
    if tuple(tiles.shape) != wanted:
        raise ValueError(f"tiles are {list(tiles.shape)}: {rows} rows of {columns} scales make {list(wanted)}")
    order = tiles.view(torch.uint8).reshape(*wanted[:2], 32, 4, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    padded = order.reshape(wanted[0] * TILE_ROWS, wanted[1] * TILE_COLUMNS)
    return padded[:rows, :columns].contiguous().view(tiles.dtype)


def _check_is_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")


def _check_values(values: torch.Tensor, fmt: Format) -> None:
    _check_is_tensor("values", values)
    if values.dtype not in abi.NUMBER:
        raise TypeError(f"values are {values.dtype}: bfloat16, float16 or float32 can be encoded")
    multiple = fmt.hidden_multiple
    if values.dim() == 0 or values.shape[-1] == 0 or values.shape[-1] % multiple:
        raise ValueError(f"values are {list(values.shape)}: the last size must be a multiple of {multiple} for {fmt}")
    if not values.is_contiguous():
        raise ValueError(f"values are strided {list(values.stride())}: they must be contiguous")
    check_current(values.device, "values are")


def _params(values: torch.Tensor, planes: Sequence[torch.Tensor], fmt: Format) -> abi.QuantParams:
    params: abi.QuantParams = abi.with_size(abi.QuantParams())
    params.number = abi.NUMBER[values.dtype]
    params.coding = abi.CODING[fmt]
    params.num_rows = values.numel() // values.shape[-1] if values.numel() else 0
    params.hidden = values.shape[-1]
    params.values = values.data_ptr()
    params.codes = planes[0].data_ptr()
    params.scales = planes[1].data_ptr()
    if fmt.row_scale:
        scale = planes[2]
        _check_is_tensor("global_scale", scale)
        if scale.dtype != torch.float32 or scale.device != values.device:
            raise TypeError(f"global_scale is {scale.dtype} on {scale.device}: float32 on {values.device}")
        outer = tuple(values.shape[:-1])
        per_row = tuple(scale.shape) == outer
        if not per_row and scale.numel() != 1:
            raise ValueError(f"global_scale is {list(scale.shape)}: one value, or one for each row {list(outer)}")
        if per_row and not scale.is_contiguous():
            raise ValueError(f"global_scale is strided {list(scale.stride())}: it must be contiguous")
        params.scale_stride = int(per_row and scale.numel() > 1)
        params.global_scale = scale.data_ptr()
    return params
