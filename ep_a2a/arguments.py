"""The checks of what a caller passes, before anything is launched; every message prints what was found and wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ep_a2a import abi
from ep_a2a.config import Config

Rows = torch.Tensor | tuple[torch.Tensor, ...]


_INT32, _FP32, _NUMBERS = (torch.int32,), (torch.float32,), tuple(abi.NUMBER)


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


class DispatchInputs(NamedTuple):
    """Checked inputs of a dispatch, as addresses."""

    num_rows: int
    sources: list[int]  # of every plane; without the payload's where `values` are to be encoded
    tail: int | None  # fp32, behind the rows of ids
    tail_stride: int  # 0: one for all
    num_tokens: int | None  # int32
    values: torch.Tensor | None  # [T, H] in full precision, of a payload that is encoded
    tensors: tuple[object, ...]  # that must live


class DispatchSpec:
    """What a dispatch takes, by its Config; made once, since checks come before every launch."""

    def __init__(self, config: Config, device: torch.device) -> None:
        payload = config.payload
        self._config, self._device = config, device
        self._top_k, self._hidden, self._max_tokens = config.top_k, config.hidden, config.max_tokens
        self._dtype = None if payload.is_encoded else payload.columns[0].dtype  # of rows as they are
        self._columns = [
            (f"x: {c.name}", (c.dtype,), config.hidden // c.hidden_per_element)
            for c in (payload.columns if payload.is_encoded else ())
        ]
        self._legal = {len(self._columns), len(payload.plane_names)}  # tensors of encoded rows
        self._extra = [(f"extra[{i}]", num_bytes) for i, num_bytes in enumerate(config.extra_planes)]
        self._unit_scale = torch.ones((), dtype=torch.float32, device=device)  # never in a graph's memory

    def check(
        self,
        x: Rows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: torch.Tensor | None,
        extra: Sequence[torch.Tensor],
    ) -> DispatchInputs:
        """The inputs, if all of them fit. Raises TypeError, ValueError."""
        device, top_k = self._device, self._top_k
        first = x[0] if isinstance(x, tuple) and x else x
        rows = first.shape[0] if isinstance(first, torch.Tensor) and first.dim() == 2 else "T"
        num_rows = check_tensor("topk_ids", topk_ids, _INT32, (rows, top_k), device).shape[0]
        if num_rows > self._max_tokens:
            raise ValueError(f"{num_rows} tokens, but max_tokens={self._max_tokens}")
        scale: torch.Tensor | None = None
        values: torch.Tensor | None = None
        columns: tuple[torch.Tensor, ...] = ()
        if isinstance(x, torch.Tensor):
            values = check_tensor("x", x, _NUMBERS, (num_rows, self._hidden), device)
        else:
            columns, scale = self._check_planes(x, num_rows)
        check_tensor("topk_weights", topk_weights, _FP32, (num_rows, top_k), device)
        if self._extra or not isinstance(extra, (tuple, list)) or extra:
            self._check_extra(extra, num_rows)
        count: int | None = None
        if num_tokens is not None:
            is_scalar = isinstance(num_tokens, torch.Tensor) and num_tokens.dim() == 0
            count = check_tensor("num_tokens", num_tokens, _INT32, () if is_scalar else (1,), device).data_ptr()
        if values is not None and self._dtype is not None:
            columns, values = (values.to(self._dtype),), None  # perhaps the first launch, behind all checks
        tail, tail_stride = (None, 1) if scale is None else (scale.data_ptr(), scale.dim())
        sources = [tensor.data_ptr() for tensor in (*columns, topk_ids, topk_weights, *extra)]
        tensors = columns, topk_ids, topk_weights, scale, num_tokens, extra
        return DispatchInputs(num_rows, sources, tail, tail_stride, count, values, tensors)

    def _check_planes(self, x: object, num_rows: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """The columns of rows that came encoded, and their global scale."""
        payload, device, num_columns = self._config.payload, self._device, len(self._columns)
        if not num_columns:
            raise TypeError(f"x is a {type(x).__name__}: {payload} rows are one tensor")
        if not isinstance(x, tuple) or len(x) not in self._legal:
            tuples = " or ".join(f"({', '.join(payload.plane_names[:n])})" for n in sorted(self._legal))
            raise TypeError(f"x must be a tensor, or for {payload} {tuples}")
        for tensor, (name, dtypes, width) in zip(x, self._columns):
            check_tensor(name, tensor, dtypes, (num_rows, width), device)
        if not payload.row_scale:
            return x, None
        scale = x[num_columns] if len(x) > num_columns else self._unit_scale
        if isinstance(scale, torch.Tensor) and scale.dim() == 1 and num_rows != 1 and scale.numel() == 1:
            scale = scale[0]
        is_scalar = isinstance(scale, torch.Tensor) and scale.dim() == 0
        check_tensor("x: global_scale", scale, _FP32, () if is_scalar else (num_rows,), device)
        return x[:num_columns], scale

    def _check_extra(self, extra: object, num_rows: int) -> None:
        if not isinstance(extra, (tuple, list)):
            raise TypeError(f"extra must be a tuple or list of tensors, not {type(extra).__name__}")
        if len(extra) != len(self._extra):
            raise ValueError(f"{len(extra)} extra tensors, but extra_planes={self._config.extra_planes}")
        for tensor, (name, num_bytes) in zip(extra, self._extra):
            check_tensor(name, tensor, (torch.uint8,), (num_rows, num_bytes), self._device)
