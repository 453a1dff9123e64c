"""The checks of what a caller passes, before anything is launched; every message prints what was found and wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ep_a2a import abi
from ep_a2a.config import Config
from ep_a2a.quant import on_vectors

Rows = torch.Tensor | tuple[torch.Tensor, ...]

_INT32, _FP32, _NUMBERS = (torch.int32,), (torch.float32,), tuple(abi.NUMBER)


def check_tensor(
    name: str, tensor: object, dtypes: Sequence[torch.dtype], shape: tuple[int | str, ...], device: torch.device
) -> torch.Tensor:
    """`tensor`, if it is contiguous on `device`, one of `dtypes`, and of `shape`. A letter there fits no size.

    Raises TypeError (not a tensor, dtype) or ValueError (shape, device, contiguity).
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}, wanted {' or '.join(map(str, dtypes))}")
    if tensor.shape != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}, wanted [{', '.join(map(str, shape))}]")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, wanted {device}")
    if tensor.layout is not torch.strided or tensor.is_neg():
        kind = "a negated view" if tensor.is_neg() else tensor.layout
        raise ValueError(f"{name} is {kind}: it must be a plain strided tensor")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tuple(tensor.stride())}: it must be contiguous ({name}.contiguous())")
    return tensor


def _like(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Are other tensors of the same types, shapes, strides and devices? One call, by what guards torch's compiled code.

    No, where this torch has no such guards: then every call checks in words.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        alike: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (AttributeError, RuntimeError, TypeError):
        return lambda *_: False
    return alike


class DispatchInputs(NamedTuple):
    """Checked inputs of a dispatch, as addresses."""

    num_rows: int
    sources: list[int]  # of every plane; of the payload's, all the values where those are to be encoded
    tail: int | None  # fp32, behind the rows of ids
    tail_stride: int  # 0: one for all
    num_tokens: int | None  # int32
    number: int  # of values [T, H] that are to be encoded, as the kernels name their dtype; -1: there are none
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
        self._row_scale = payload.row_scale
        self._extra = [(f"extra[{i}]", num_bytes) for i, num_bytes in enumerate(config.extra_planes)]
        self._unit_scale = torch.ones((), dtype=torch.float32, device=device)  # never in a graph's memory
        self._passed: dict[object, Callable[..., bool]] = {}  # like the last that fit, of so many tokens

    def check(
        self,
        x: Rows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: torch.Tensor | None,
        extra: Sequence[torch.Tensor],
    ) -> DispatchInputs:
        """The inputs, if all of them fit. Raises TypeError, ValueError."""
        planes = x if isinstance(x, tuple) else (x,)
        try:
            num_rows = topk_ids.shape[0]
            fits = self._passed[isinstance(x, tuple), num_rows](topk_ids, topk_weights, *planes)
        except (AttributeError, LookupError, RuntimeError, TypeError):  # the first of its kind; or nothing that can fit
            fits = False
        if not fits:
            num_rows = self._check_rows(x, topk_ids, topk_weights)
            self._passed[isinstance(x, tuple), num_rows] = _like(topk_ids, topk_weights, *planes)
        if self._extra or not isinstance(extra, (tuple, list)) or extra:
            self._check_extra(extra, num_rows)
        count: int | None = None
        if num_tokens is not None:
            is_scalar = isinstance(num_tokens, torch.Tensor) and num_tokens.dim() == 0
            count = check_tensor("num_tokens", num_tokens, _INT32, () if is_scalar else (1,), self._device).data_ptr()
        columns, scale, number = planes, None, -1
        if not isinstance(x, tuple):
            if self._dtype is None:
                columns, number = (on_vectors(x),) * len(self._columns), abi.NUMBER[x.dtype]
            else:
                columns = (x.to(self._dtype),)  # perhaps the first launch, behind all checks
        elif self._row_scale:
            num_columns = len(self._columns)
            columns = planes[:num_columns]
            scale = planes[num_columns] if len(planes) > num_columns else self._unit_scale
        tail, tail_stride = (None, 1) if scale is None else (scale.data_ptr(), int(scale.numel() > 1))
        sources = [tensor.data_ptr() for tensor in (*columns, topk_ids, topk_weights, *extra)]
        tensors = columns, topk_ids, topk_weights, scale, num_tokens, extra
        return DispatchInputs(num_rows, sources, tail, tail_stride, count, number, tensors)

    def _check_rows(self, x: object, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> int:
        """One after the other, with what is wrong in words. Returns T."""
        given = (x[0] if isinstance(x, tuple) and x else x), topk_ids
        rows = next((t.shape[0] for t in given if isinstance(t, torch.Tensor) and t.dim() == 2), "T")
        num_rows = check_tensor("topk_ids", topk_ids, _INT32, (rows, self._top_k), self._device).shape[0]
        if num_rows > self._max_tokens:
            raise ValueError(f"{num_rows} tokens, but max_tokens={self._max_tokens}")
        if isinstance(x, torch.Tensor):
            check_tensor("x", x, _NUMBERS, (num_rows, self._hidden), self._device)
        else:
            self._check_planes(x, num_rows)
        check_tensor("topk_weights", topk_weights, _FP32, (num_rows, self._top_k), self._device)
        return num_rows

    def _check_planes(self, x: object, num_rows: int) -> None:
        """The columns of rows that came encoded, and their global scale if there is one."""
        payload, num_columns = self._config.payload, len(self._columns)
        if not num_columns:
            raise TypeError(f"x is a {type(x).__name__}: {payload} rows are one tensor")
        legal = {num_columns, len(payload.plane_names)}
        if not isinstance(x, tuple) or len(x) not in legal:
            tuples = " or ".join(f"({', '.join(payload.plane_names[:n])})" for n in sorted(legal))
            raise TypeError(f"x must be a tensor, or for {payload} {tuples}")
        for tensor, (name, dtypes, width) in zip(x, self._columns):
            check_tensor(name, tensor, dtypes, (num_rows, width), self._device)
        for scale in x[num_columns:]:
            is_one = isinstance(scale, torch.Tensor) and scale.dim() < 2 and scale.numel() == 1
            check_tensor("x: global_scale", scale, _FP32, scale.shape if is_one else (num_rows,), self._device)

    def _check_extra(self, extra: object, num_rows: int) -> None:
        if not isinstance(extra, (tuple, list)):
            raise TypeError(f"extra must be a tuple or list of tensors, not {type(extra).__name__}")
        if len(extra) != len(self._extra):
            raise ValueError(f"{len(extra)} extra tensors, but extra_planes={self._config.extra_planes}")
        for tensor, (name, num_bytes) in zip(extra, self._extra):
            check_tensor(name, tensor, (torch.uint8,), (num_rows, num_bytes), self._device)
