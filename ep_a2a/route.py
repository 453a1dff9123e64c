"""Received rows as (row, expert) pairs, grouped by the experts of this rank, for other people's expert kernels.

`Received.compact` and `Received.by_expert` come here. The kernels are those of `route.cu`; all sizes are known on the
host, all counts stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ep_a2a import layout as _layout

if TYPE_CHECKING:
    from ep_a2a.channel import Channel
    from ep_a2a.received import Handle, Received


@dataclass(frozen=True)
class Order:
    """Which slots hold the results of which row; `combine` takes it with rows in these slots, in the same round.

    handle  of the round
    shape   of the slots: (capacity,) or (E_local, max_rows)
    """

    handle: Handle
    shape: tuple[int, ...]
    pair_slots: Tensor  # int32 [R, max_tokens, K]: slot of the pair at received rows, -1 = not here or dropped
    weights: Tensor  # fp32 [*shape], those of `Pairs`


@dataclass(frozen=True)
class Pairs:
    """(row, expert) pairs in slots, grouped by expert, in each group by (source, token, k). S below is `order.shape`.

    rows            the payload's rows [*S, H or H/2], zeros in slots that pad a group; behind the last group unwritten
    scales          NVFP4: float8_e4m3fn [*S, H/16], likewise; else None
    global_scale    NVFP4: fp32 [*S], 0 in slots without a pair; else None
    expert_offsets  int32 [E_local + 1]: first slot of each expert's group, then the end of the last one
    counts          int32 [E_local]: pairs in each group, without its padding
    row_index       int32 [*S]: source * max_tokens + token, -1 = no pair
    k               int32 [*S]: which of the token's ids, -1 = no pair
    weights         fp32 [*S]: routing weight, 0 = no pair; `combine` reads them here
    order           for `combine`
    """

    rows: Tensor
    scales: Tensor | None
    global_scale: Tensor | None
    expert_offsets: Tensor
    counts: Tensor
    row_index: Tensor
    k: Tensor
    weights: Tensor
    order: Order


@dataclass(frozen=True)
class Groups:
    """Where the pairs of a round went, without their rows.

    params   of the routing that was launched, for a kernel that goes on from there
    tensors  that they point to, by their names there; keep them until that kernel is launched
    """

    params: Any
    tensors: dict[str, Tensor]


def topk_ids(received: Received) -> Tensor:
    """See `Received.topk_ids`."""
    channel, params = _start(received)
    out = _empty(received.ids.shape, torch.int32, received.ids.device)
    params.topk_ids = out.data_ptr()
    channel.route_ids(params)
    return out


def num_tokens_per_expert(received: Received) -> Tensor:
    """See `Received.num_tokens_per_expert`."""
    channel, params = _start(received)
    counts = _empty((params.num_experts,), torch.int32, received.ids.device)
    params.counts = counts.data_ptr()
    _route(channel, params, counts.device)
    return counts


def compact(received: Received, pad_multiple: int, capacity: int | None) -> Pairs:
    """See `Received.compact`."""
    channel, params = _start(received)
    _check_int("pad_multiple", pad_multiple, 1, _layout.MAX_PAIRS)
    most = _most_slots(received, params, pad_multiple)
    capacity = most if capacity is None else capacity
    _check_int("capacity", capacity, 0, _layout.MAX_PAIRS)
    if capacity % pad_multiple:
        below = capacity // pad_multiple * pad_multiple
        raise ValueError(
            f"capacity={capacity}: must be a multiple of pad_multiple={pad_multiple}; "
            f"nearest: {below} and {below + pad_multiple}"
        )
    params.pad_multiple = pad_multiple
    return _pairs(received, channel, params, (capacity,))


def by_expert(received: Received, max_rows: int) -> Pairs:
    """See `Received.by_expert`."""
    channel, params = _start(received)
    _check_int("max_rows", max_rows, 1, _layout.MAX_PAIRS // max(1, params.num_experts))
    params.group_rows = max_rows
    return _pairs(received, channel, params, (params.num_experts, max_rows))


def groups(received: Received, experts: range, pad_multiple: int) -> tuple[Channel, Groups]:
    """Group the pairs of these experts into slots for any routing; no row is moved. Local, as `Received.compact`."""
    channel, params = _start(received, experts)
    params.pad_multiple = pad_multiple
    tensors = _numbers(received, params, (_most_slots(received, params, pad_multiple),))
    _route(channel, params, received.ids.device)
    return channel, Groups(params, tensors)


def _most_slots(received: Received, params: Any, pad_multiple: int) -> int:
    ranks, tokens, top_k = received.ids.shape
    most = _layout.most_slots(ranks * tokens, top_k, params.num_experts, pad_multiple)
    if most > _layout.MAX_PAIRS:
        raise ValueError(f"up to {most} slots could be needed, at most {_layout.MAX_PAIRS} can be numbered")
    return most


def _start(received: Received, experts: range | None = None) -> tuple[Channel, Any]:
    """The channel, if the rows are its open round's, and parameters that say where they lie; None = all of the rank."""
    a2a = received._a2a
    a2a._check_ready()
    channel = a2a._channels[received._channel]
    channel.open_handle()
    ranks, tokens, top_k = received.ids.shape
    experts, pairs = a2a.local_experts if experts is None else experts, ranks * tokens * top_k
    if len(experts) > _layout.MAX_ROUTE_EXPERTS or pairs > _layout.MAX_PAIRS:
        raise ValueError(
            f"{len(experts)} experts on this rank and up to {pairs} pairs: at most {_layout.MAX_ROUTE_EXPERTS} experts "
            f"and {_layout.MAX_PAIRS} pairs can be routed"
        )
    params = channel.route_params()
    params.first_expert, params.num_experts = experts.start, len(experts)
    return channel, params


def _pairs(received: Received, channel: Channel, params: Any, shape: tuple[int, ...]) -> Pairs:
    device = received.ids.device

    def column(plane: Tensor | None) -> Tensor | None:
        """Room for a plane's rows, in slots."""
        return None if plane is None else _empty((*shape, *plane.shape[2:]), plane.dtype, device)

    columns = {"rows": column(received.rows), "scales": column(received.scales)}
    for target, rows in zip(params.targets, (rows for rows in columns.values() if rows is not None)):
        target.num_bytes = rows.shape[-1] * rows.dtype.itemsize
        target.rows, target.align_bytes = rows.data_ptr(), _layout.alignment(rows.data_ptr() | target.num_bytes)
    params.num_threads = _layout.copy_threads(max(target.num_bytes for target in params.targets))
    global_scale = column(received.global_scale)
    params.global_scale = None if global_scale is None else global_scale.data_ptr()
    numbers = _numbers(received, params, shape)
    order = Order(channel.open_handle(), shape, numbers.pop("pair_slots"), numbers["weights"])
    _route(channel, params, device)
    return Pairs(**columns, **numbers, global_scale=global_scale, order=order)  # type: ignore[arg-type]


def _numbers(received: Received, params: Any, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Room for what a routing says of slots of this shape, and parameters that point to it."""
    sizes = {"pair_slots": tuple(received.ids.shape), "counts": (params.num_experts,), "row_index": shape, "k": shape}
    sizes |= {"weights": shape, "expert_offsets": (params.num_experts + 1,)}
    found = {}
    for name, size in sizes.items():
        dtype = torch.float32 if name == "weights" else torch.int32
        found[name] = _empty(size, dtype, received.ids.device)
        setattr(params, name, found[name].data_ptr())
    params.num_slots = found["k"].numel()
    return found


def _route(channel: Channel, params: Any, device: torch.device) -> None:
    words = _layout.route_scratch_words(params.num_experts, params.num_segments)
    scratch = _empty((words,), torch.int32, device)
    params.segment_starts, params.counter = scratch.data_ptr(), scratch.data_ptr() + 4 * (words - 1)
    channel.route(params)


def _empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: must be {low} to {high}")
