"""The checks of what a caller passes, before anything is launched; every message prints what was found and wanted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from ep_a2a import abi
from ep_a2a.config import Config
from ep_a2a.layout import Layout, alignment
from ep_a2a.quant import encode

Rows = torch.Tensor | tuple[torch.Tensor, ...]


class Source(NamedTuple):
    """The tensor that fills a plane, and the fp32 word behind each of its rows."""

    rows: torch.Tensor
    tail: torch.Tensor | None = None


def check_tensor(
    name: str, tensor: object, dtypes: Sequence[torch.dtype], shape: tuple[int | str, ...], device: torch.device
) -> torch.Tensor:
    """`tensor`, if it is contiguous on `device`, one of `dtypes`, and of `shape`, whose letters fit any size.

    Raises TypeError (not a tensor, dtype) or ValueError (shape, device, contiguity).
    """
    if (
        isinstance(tensor, torch.Tensor)
        and tensor.shape == shape
        and tensor.dtype in dtypes
        and tensor.device == device
        and tensor.is_contiguous()
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    ):
        return tensor  # at once, as this comes before every launch
    return _check_in_words(name, tensor, dtypes, shape, device)


def _check_in_words(
    name: str, tensor: object, dtypes: Sequence[torch.dtype], shape: tuple[int | str, ...], device: torch.device
) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}, wanted {' or '.join(map(str, dtypes))}")
    wanted = f"[{', '.join(map(str, shape))}]"
    fits = len(shape) == tensor.dim() and all(isinstance(w, str) or w == n for w, n in zip(shape, tensor.shape))
    if not fits:
        raise ValueError(f"{name} is {list(tensor.shape)}, wanted {wanted}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, wanted {device}")
    if tensor.layout != torch.strided or tensor.is_neg():
        kind = "a negated view" if tensor.is_neg() else tensor.layout
        raise ValueError(f"{name} is {kind}: it must be a plain strided tensor")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tuple(tensor.stride())}: it must be contiguous ({name}.contiguous())")
    return tensor


class DispatchInputs:
    """Checked inputs of a dispatch, rows encoded where they came in full precision; keeps every tensor alive."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        x: Rows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: torch.Tensor | None,
        extra: Sequence[torch.Tensor],
    ) -> None:
        first = x[0] if isinstance(x, tuple) and x else x
        rows = first.shape[0] if isinstance(first, torch.Tensor) and first.dim() == 2 else "T"
        self.topk_ids = check_tensor("topk_ids", topk_ids, (torch.int32,), (rows, config.top_k), device)
        self.num_rows = topk_ids.shape[0]
        if self.num_rows > config.max_tokens:
            raise ValueError(f"{self.num_rows} tokens, but max_tokens={config.max_tokens}")
        columns, scale = _check_rows(config, device, x, self.num_rows)
        check_tensor("topk_weights", topk_weights, (torch.float32,), (self.num_rows, config.top_k), device)
        if not isinstance(extra, (tuple, list)):
            raise TypeError(f"extra must be a tuple or list of tensors, not {type(extra).__name__}")
        if len(extra) != len(config.extra_planes):
            raise ValueError(f"{len(extra)} extra tensors, but extra_planes={config.extra_planes}")
        for i, (tensor, num_bytes) in enumerate(zip(extra, config.extra_planes)):
            check_tensor(f"extra[{i}]", tensor, (torch.uint8,), (self.num_rows, num_bytes), device)
        self.num_tokens = _check_count(num_tokens, device)
        if isinstance(x, torch.Tensor):  # the first launch, behind all checks
            columns, scale = _encode(config, x)
        self.sources = [
            *(Source(column) for column in columns),
            Source(topk_ids, tail=scale),
            Source(topk_weights),
            *(Source(tensor) for tensor in extra),
        ]

    def fill(self, params: abi.DispatchParams, layout: Layout) -> None:
        """Put the addresses of the inputs into the parameters of a launch."""
        params.num_rows = self.num_rows
        params.topk_ids = self.topk_ids.data_ptr()
        params.num_tokens = None if self.num_tokens is None else self.num_tokens.data_ptr()
        for plane, source, slot in zip(layout.planes, self.sources, params.sources):
            slot.rows = address = source.rows.data_ptr()
            slot.align_bytes = alignment(address | plane.source_bytes)
            if source.tail is not None:
                slot.tail = source.tail.data_ptr()
                slot.tail_stride = int(source.tail.dim() > 0)


@cache
def unit_scale(device: torch.device) -> torch.Tensor:
    """The global scale of rows that come without one. Local; made when a channel is, never in a graph's memory."""
    return torch.ones((), dtype=torch.float32, device=device)


def _check_count(num_tokens: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    if num_tokens is None:
        return None
    if isinstance(num_tokens, torch.Tensor) and num_tokens.dim() == 0:
        return check_tensor("num_tokens", num_tokens, (torch.int32,), (), device)
    return check_tensor("num_tokens", num_tokens, (torch.int32,), (1,), device)


Payload = tuple[tuple[torch.Tensor, ...], torch.Tensor | None]  # columns, and the global scale of the rows


def _encode(config: Config, x: torch.Tensor) -> Payload:
    planes = encode(x, config.payload)
    return planes[: len(config.payload.columns)], planes[-1] if config.payload.row_scale else None


def _check_rows(config: Config, device: torch.device, x: Rows, num_rows: int) -> Payload:
    """The columns of rows that came encoded; rows in full precision are only checked."""
    payload = config.payload
    if isinstance(x, torch.Tensor):
        return (check_tensor("x", x, tuple(abi.NUMBER), (num_rows, config.hidden), device),), None
    if not payload.is_encoded:
        raise TypeError(f"x is a {type(x).__name__}: {payload} rows are one tensor")
    legal = sorted({len(payload.columns), len(payload.plane_names)})
    if not isinstance(x, tuple) or len(x) not in legal:
        tuples = " or ".join(f"({', '.join(payload.plane_names[:n])})" for n in legal)
        raise TypeError(f"x must be a tensor, or for {payload} {tuples}")
    columns = []
    for tensor, column in zip(x, payload.columns):
        width = config.hidden // column.hidden_per_element
        columns.append(check_tensor(f"x: {column.name}", tensor, (column.dtype,), (num_rows, width), device))
    if not payload.row_scale:
        return tuple(columns), None
    given = x[2] if len(x) == 3 else unit_scale(device)
    if isinstance(given, torch.Tensor) and given.numel() == 1 and given.dim() == 1 and num_rows != 1:
        given = given[0]
    shape = () if isinstance(given, torch.Tensor) and given.dim() == 0 else (num_rows,)
    return tuple(columns), check_tensor("x: global_scale", given, (torch.float32,), shape, device)
