"""What a dispatch gives back: views of the receive memory, and the handle that ends the round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ep_a2a import route
from ep_a2a.layout import Format, Layout
from ep_a2a.quant import decode, swizzle_scales

if TYPE_CHECKING:
    from ep_a2a.api import A2A


@dataclass(eq=False)
class Handle:
    """A round that was dispatched; `combine` or `release` takes it once."""

    a2a: A2A
    channel: int
    round: int  # rounds that this object had opened on the channel before
    num_rows: int  # T of the dispatch


@dataclass(frozen=True, eq=False)
class Received:
    """The rows that this rank received in a round, as views: [source rank, max_tokens, ...].

    A token's row has the index that it has at its source; `valid` says which rows hold one. The views are this rank's
    to read from the end of the dispatch wait to its combine or release call; afterwards they hold other rounds' rows.
    They keep the memory, not the round.

    rows          NVFP4, MXFP4: packed uint8 [R, max_tokens, H/2], low nibble first; FP8, MXFP8: float8_e4m3fn
                  [R, max_tokens, H]; BF16, FP16: that [R, max_tokens, H]
    scales        NVFP4: float8_e4m3fn [R, max_tokens, H/16]; MXFP4, MXFP8: float8_e8m0fnu [R, max_tokens, H/32];
                  FP8: fp32 [R, max_tokens, H/128]; else None
    global_scale  NVFP4: fp32 [R, max_tokens]; else None
    ids           int32 [R, max_tokens, K], global experts as the source gave them, other ranks' too
    weights       fp32 [R, max_tokens, K]
    extra         uint8 [R, max_tokens, bytes] for each extra plane
    num_tokens    int32 [R]: tokens that each source had this round (not: sent here); 0 after an aborted dispatch
    """

    payload: Format
    hidden: int
    rows: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    extra: tuple[torch.Tensor, ...]
    num_tokens: torch.Tensor
    _bitmap: torch.Tensor = field(repr=False)
    _a2a: A2A = field(repr=False)  # keeps the memory of the views
    _channel: int = field(repr=False)

    def __repr__(self) -> str:
        ranks, max_tokens = self.ids.shape[:2]
        return f"Received({self.payload}, {ranks} ranks x {max_tokens} rows, hidden {self.hidden})"

    @property
    def valid(self) -> torch.Tensor:
        """bool [R, max_tokens]: True where a source sent a row this round. Local; current stream; allocates."""
        max_tokens = self.rows.shape[1]
        token = torch.arange(max_tokens, device=self.rows.device)
        bits = self._bitmap[:, token // 32] >> (token % 32)
        return (bits & 1).bool() & (token < self.num_tokens[:, None])

    def values(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[R, max_tokens, H]: all rows decoded to bf16, fp16 or fp32; garbage where rows are not valid.

        Local; current stream; may be captured in a graph; allocates. Raises TypeError.
        """
        planes = (self.rows, self.scales, self.global_scale)
        return decode([plane for plane in planes if plane is not None], self.payload, dtype)

    def scales_128x4(self) -> torch.Tensor:
        """The scales of all rows, source by source, in the tile order of `quant.swizzle_scales`.

        Local; current stream; allocates [ceil(R * max_tokens / 128), ceil(scales of a row / 4), 512]. Tiles hold
        garbage where rows are not valid. Raises TypeError where the payload has no scales of one byte.
        """
        if self.scales is None:
            raise TypeError(f"{self.payload} rows have no scales")
        return swizzle_scales(self.scales.flatten(0, 1))

    # The operations below run on the current stream without synchronisation, take their results from torch's
    # allocator, give the same bits every run, and may be captured in a graph. They are made while the round is open.

    def topk_ids(self) -> torch.Tensor:
        """int32 [R, max_tokens, K]: global experts, -1 where the row is not valid or the expert not this rank's.

        Local; allocates. Raises RoundError (the round is not open), StickyError, ClosedError, ValueError (too many
        experts or pairs).
        """
        return route.topk_ids(self)

    @property
    def num_tokens_per_expert(self) -> torch.Tensor:
        """int32 [E_local]: (row, expert) pairs of each expert of this rank; an id twice in a token counts twice.

        Local; every access counts anew on the device and allocates. Raises as `topk_ids`.
        """
        return route.num_tokens_per_expert(self)

    def compact(self, pad_multiple: int = 1, capacity: int | None = None) -> route.Pairs:
        """Gather the rows of each expert of this rank, one behind the other: slots are [capacity].

        Local; allocates. Moves each pair's payload row once.

        pad_multiple  each group takes a multiple of this many slots
        capacity      slots, a multiple of `pad_multiple`; None = as many as any routing can need, which is
                      R * max_tokens * K and padding: a token may name an expert K times
        Returns       `Pairs`. Pairs that find no slot are dropped, nothing is written past the end, and
                      `CapacityExceeded` with the slots needed is raised by `check()` or the next dispatch
        Raises        TypeError, ValueError; as `topk_ids`
        """
        return route.compact(self, pad_multiple, capacity)

    def by_expert(self, max_rows: int) -> route.Pairs:
        """Gather the rows of each expert of this rank into a group of its own: slots are [E_local, max_rows].

        Local; allocates. Moves each pair's payload row once, and zeros into the slots without a pair.

        max_rows  slots of each expert
        Returns   `Pairs`; pairs past `max_rows` are dropped and told as in `compact`, of the lowest expert that has
                  too many
        Raises    TypeError, ValueError; as `topk_ids`
        """
        return route.by_expert(self, max_rows)


def strided(memory: torch.Tensor, dtype: torch.dtype, offset: int, *dims: tuple[int, int]) -> torch.Tensor:
    """A view of uint8 `memory` at byte `offset`, with `dims` as (size, stride in bytes)."""
    itemsize = dtype.itemsize
    base = memory[: memory.numel() // itemsize * itemsize].view(dtype)
    strides = [stride // itemsize for _, stride in dims]
    return base.as_strided([size for size, _ in dims], strides, base.storage_offset() + offset // itemsize)


def received_views(
    a2a: A2A, channel: int, layout: Layout, payload: Format, hidden: int, memory: torch.Tensor, state: torch.Tensor
) -> Received:
    """The views of one channel: `memory` is this rank's part of the region for it, `state` its private state."""
    ranks, tokens = layout.num_ranks, layout.max_tokens

    def plane(index: int, columns: int) -> torch.Tensor:
        spec = layout.planes[index]
        rows = (ranks, tokens * spec.row_bytes), (tokens, spec.row_bytes)
        return strided(memory, spec.dtype, layout.plane_offsets[index], *rows, (columns, spec.dtype.itemsize))

    by_name = {
        spec.name: plane(index, spec.source_bytes // spec.dtype.itemsize) for index, spec in enumerate(layout.planes)
    }
    global_scale = None
    if payload.row_scale:  # the word behind each row of ids
        index = list(by_name).index("ids")
        spec = layout.planes[index]
        rows = (ranks, tokens * spec.row_bytes), (tokens, spec.row_bytes)
        global_scale = strided(memory, torch.float32, layout.plane_offsets[index] + spec.source_bytes, *rows)
    bitmap_words = (ranks, 4 * layout.bitmap_words), (layout.bitmap_words, 4)
    return Received(
        payload=payload,
        hidden=hidden,
        rows=by_name["rows"],
        scales=by_name.get("scales"),
        global_scale=global_scale,
        ids=by_name["ids"],
        weights=by_name["weights"],
        extra=tuple(view for name, view in by_name.items() if name.startswith("extra")),
        num_tokens=strided(state, torch.int32, layout.source_counts_offset, (ranks, 4)),
        _bitmap=strided(memory, torch.int32, layout.bitmap_offset, *bitmap_words),
        _a2a=a2a,
        _channel=channel,
    )


def outbox_view(layout: Layout, combine: Format, hidden: int, memory: torch.Tensor) -> torch.Tensor:
    """The outbox of one channel, [source rank, max_tokens, H], where its rows are not encoded."""
    dtype, row_bytes = combine.columns[0].dtype, layout.outbox_row.row_bytes
    rows = (layout.num_ranks, layout.max_tokens * row_bytes), (layout.max_tokens, row_bytes)
    return strided(memory, dtype, layout.outbox_offset, *rows, (hidden, dtype.itemsize))
