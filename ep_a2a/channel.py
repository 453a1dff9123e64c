"""One channel of one rank: its state on the host, its parameter structs, and the launches of a round."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a import abi, native
from ep_a2a import device as _device
from ep_a2a import layout as _layout
from ep_a2a.errors import EpError, RoundError, StickyError
from ep_a2a.quant import RowEncoder
from ep_a2a.received import Handle, outbox_view, received_views

if TYPE_CHECKING:
    from ep_a2a.a2a import A2A
    from ep_a2a.arguments import DispatchInputs
    from ep_a2a.route import Order
    from ep_a2a.symm import SymmetricMemory


class Stage(enum.Enum):
    """How far the host has brought the channel's round."""

    CLOSED = "closed"
    SENT = "dispatched and not waited for"
    OPEN = "open"
    ENDING = "ended and not waited for"


class Channel:
    """The host's side of a channel; `a2a` holds one for each of `config.channels`."""

    def __init__(self, a2a: A2A, index: int, memory: SymmetricMemory) -> None:
        layout, config = a2a.layout, a2a.config
        self.index = index
        self.stage = Stage.CLOSED
        self.handle: Handle | None = None
        self._a2a = a2a
        self._library = a2a.library
        self._num_rounds = 0
        self._error: StickyError | None = None
        self._inputs: DispatchInputs | None = None
        self.waits_already = False
        start = index * layout.channel_bytes
        region = memory.region[start : start + layout.channel_bytes]
        addresses = [base + start for base in memory.peer_bases]
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=a2a.device)
        self._state = torch.zeros(layout.state_bytes, dtype=torch.uint8, device=a2a.device)
        self._kind = memory.kind
        self._turn = _device.turn(a2a.device, a2a.library.capture_id)
        self._stream = self._turn.take  # the stream of an operation, behind the last one
        self._records = _device.host_memory(native.HOST_RECORD_BYTES, a2a.device)
        self.status, self._inputs_seen = native.host_records(self._records.data_ptr())
        self.received = received_views(a2a, index, layout, config.payload, config.hidden, region, self._state)
        self.outbox = None if config.combine.is_encoded else outbox_view(layout, config.combine, config.hidden, region)
        self._start_state()
        self._make_params()

    @cached_property
    def scratch(self) -> torch.Tensor:
        """Rows [source rank, max_tokens, H] in bf16 for results that combine encodes."""
        config = self._a2a.config
        shape = self._a2a.num_ranks, config.max_tokens, config.hidden
        with torch.inference_mode(False):  # it outlives such a block
            return torch.empty(shape, dtype=torch.bfloat16, device=self._a2a.device)

    def _start_state(self) -> None:
        config, state = self._a2a.config, abi.ChannelState()
        state.bad_routing = abi.NO_BAD_ROUTING
        state.timeout_ns = int(config.timeout_s * 1e9)
        state.first_timeout_ns = int(config.first_timeout_s * 1e9)
        self._state[: ctypes.sizeof(state)] = torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def _make_params(self) -> None:
        a2a, layout, config = self._a2a, self._a2a.layout, self._a2a.config
        shared = abi.Channel(
            peers=self._peers.data_ptr(),
            state=self._state.data_ptr(),
            status=ctypes.addressof(self.status),
            inputs=ctypes.addressof(self._inputs_seen[0]),
            rank=a2a.rank,
            num_ranks=a2a.num_ranks,
            max_tokens=layout.max_tokens,
            bitmap_words=layout.bitmap_words,
            mask_words=layout.mask_words,
            flag_parts=layout.flag_parts,
            num_experts=config.num_experts,
            dispatch_flags_offset=layout.dispatch_flags_offset,
            end_flags_offset=layout.end_flags_offset,
            abort_words_offset=layout.abort_words_offset,
            bitmap_offset=layout.bitmap_offset,
            source_counts_offset=layout.source_counts_offset,
            masks_offset=layout.masks_offset,
        )

        def params(struct: type[ctypes.Structure], **fields: Any) -> Any:
            return abi.with_size(struct(channel=shared, **fields))

        experts_per_rank, num_longer_ranks = _layout.shares(config.num_experts, a2a.num_ranks)
        self._dispatch = params(
            abi.DispatchParams,
            num_planes=len(layout.planes),
            top_k=config.top_k,
            experts_per_rank=experts_per_rank,
            num_longer_ranks=num_longer_ranks,
            per_longer_rank=_layout.divisor(experts_per_rank + 1),
            per_rank=_layout.divisor(max(1, experts_per_rank)),
            ids_plane=len(config.payload.columns),
        )
        self._make_sources()
        self._wait = {
            phase: params(abi.WaitParams, phase=phase)
            for phase in (abi.PHASE_DISPATCH, abi.PHASE_COMBINE, abi.PHASE_RELEASE)
        }
        self._outbox_params = params(
            abi.OutboxParams,
            num_threads=_layout.copy_threads(layout.outbox_row.row_bytes),
            hidden=config.hidden,
            outbox_offset=layout.outbox_offset,
            outbox_row_bytes=layout.outbox_row.row_bytes,
            coding=abi.CODING.get(config.combine, 0),
            scales_offset=layout.outbox_row.scales_offset,
            row_scale_offset=layout.outbox_row.row_scale_offset,
        )
        self._make_route_params(params)

    def _make_sources(self) -> None:
        """Where the rows of each plane come from and go to; what encodes those that come in full precision."""
        a2a, layout, config = self._a2a, self._a2a.layout, self._a2a.config
        split = a2a.split.tile_offsets if isinstance(a2a.split, _layout.PhasedSplit) else ()
        for i, (plane, offset) in enumerate(zip(layout.planes, layout.plane_offsets)):
            slot = self._dispatch.planes[i]
            slot.offset, slot.row_bytes, slot.tile_offset = offset, plane.row_bytes, split[i] if split else 0
            self._dispatch.sources[i].num_bytes = plane.source_bytes
        self._sources = list(self._dispatch.sources)[: len(layout.planes)]
        encoded = [self._state.data_ptr() + offset for offset in layout.encoded_offsets]
        self._encode = RowEncoder(config.payload, config.hidden, encoded, self._library) if encoded else None
        self._encoded = encoded[: len(config.payload.columns)]
        self._encoded_scales = encoded[-1] if config.payload.row_scale else None
        self._grid: _layout.Grid | None = None
        self._places: tuple[object, ...] = ()  # of the inputs of the last dispatch
        self._low_bits: list[int] = []  # of their addresses, and the coding
        self._ids_source = self._dispatch.sources[len(config.payload.columns)]

    def _make_route_params(self, params: Callable[..., Any]) -> None:
        a2a, layout, config = self._a2a, self._a2a.layout, self._a2a.config
        self._order = params(
            abi.OrderParams,
            num_threads=_layout.copy_threads(layout.outbox_row.row_bytes),
            hidden=config.hidden,
            top_k=config.top_k,
        )
        num_segments, words_per_segment = _layout.route_segments(a2a.num_ranks * layout.bitmap_words)
        self._route = params(
            abi.RouteParams,
            num_segments=num_segments,
            words_per_segment=words_per_segment,
            top_k=config.top_k,
            first_expert=a2a.local_experts.start,
            num_experts=len(a2a.local_experts),
            ids_plane=len(config.payload.columns),
            pad_multiple=1,
            planes=self._dispatch.planes,
        )

    def _use(self, grid: _layout.Grid) -> None:
        """Launch dispatches by this grid."""
        params, self._grid = self._dispatch, None  # until all of it is there: a signal's exception may come in between
        params.phased = grid.phased
        params.num_ctas, params.num_threads, params.shared_bytes = grid.num_ctas, grid.num_threads, grid.shared_bytes
        params.shares_log2, params.share_ranks = grid.shares_log2, grid.share_ranks
        params.flags_apart, params.is_large = grid.flags_apart, grid.is_large
        self._grid = grid

    def _place(
        self, num_rows: int, sources: list[int], tail: int | None, stride: int, count: int | None, number: int
    ) -> None:
        """Take the inputs of a dispatch from these addresses; `number`: as in DispatchInputs."""
        params = self._dispatch
        params.num_rows, params.num_tokens = num_rows, count
        params.coding, params.number = (0, 0) if number < 0 else (abi.CODING[self._a2a.config.payload], number)
        params.topk_ids = sources[params.ids_plane]
        self._ids_source.tail, self._ids_source.tail_stride = tail, stride
        for source, address in zip(self._sources, sources):
            source.rows = address
        low_bits = [address % _layout.VECTOR_BYTES for address in sources] + [params.coding]
        if low_bits != self._low_bits:
            self._low_bits = []  # as in `_use`
            self._align(sources)
            self._low_bits = low_bits

    def _align(self, sources: list[int]) -> None:
        """Read the rows of every plane as the low bits of their addresses allow."""
        params, whole, narrow = self._dispatch, 0, 0
        for i, (address, plane) in enumerate(zip(sources, self._a2a.layout.planes)):
            align_bytes = _layout.alignment(address | plane.source_bytes)
            params.sources[i].align_bytes = align_bytes
            if i > params.ids_plane + 1 or (i < params.ids_plane and not params.coding):
                fits = align_bytes == _layout.VECTOR_BYTES and plane.source_bytes == plane.row_bytes
                whole, narrow = whole | fits << i, narrow | (not fits) << i
        params.whole_planes, params.narrow_planes = whole, narrow

    # ---- what went wrong ----

    def error(self) -> StickyError | None:
        """Why this channel has ended for ever; None while it is healthy."""
        if self._error is None and self.status.failure:
            where = f" on channel {self.index}" if self._a2a.config.channels > 1 else ""
            self._error = native.sticky_error(self._a2a.rank, self.status, where)
        return self._error

    def raise_input_error(self) -> None:
        """Raise and clear what a kernel had to correct in the inputs of an earlier round, or could not place."""
        if error := native.take_input_error(self._a2a.rank, self._inputs_seen):
            raise error

    def raise_if_known(self) -> None:
        """Raise the end of the channel as soon as the host can know: on a CPU a launch has run when it returns."""
        if not self._state.is_cuda and (error := self.error()):
            raise error

    def expect_closed(self) -> None:
        """Raise RoundError if a round is under way; what was captured, perhaps in vain, is not under way here."""
        if self.stage is not Stage.CLOSED and not self._turn.is_in_a_graph():
            raise RoundError(
                f"channel {self.index} has a round (number {self._num_rounds - 1}) that is {self.stage.value}: "
                f"combine or release it first, or use another of the {self._a2a.config.channels} channels"
            )

    def expect_open(self, handle: Handle) -> None:
        """Raise RoundError unless `handle` is the channel's open round."""
        if self.handle is not handle:
            raise RoundError(
                f"this handle is of round {handle.round} of channel {self.index}, which has ended; "
                f"{self._num_rounds} rounds were dispatched"
            )
        if self.stage is not Stage.OPEN:
            raise RoundError(f"round {handle.round} of channel {self.index} is {self.stage.value}")

    def open_handle(self) -> Handle:
        """The handle of the round whose rows may be read now. Raises RoundError if there is none."""
        if self.handle is None or self.stage is not Stage.OPEN:
            raise RoundError(f"channel {self.index} is {self.stage.value}: it holds no rows that may be read")
        return self.handle

    # ---- the launches of a round ----

    def _num_ctas(self, num_items: int) -> int:
        return _layout.num_ctas(self._kind, num_items, self._a2a.config.num_sms)

    def mark(self) -> None:
        """End an operation here, where the next one may come on another stream."""
        self._turn.mark()

    def send(self, inputs: DispatchInputs, and_wait: bool) -> Handle:
        """Send the rows of a new round; `and_wait`: what launches it also waits for those of the peers."""
        params, num_rows = self._dispatch, inputs.num_rows
        stream, sources, tail = self._stream(), inputs.sources, inputs.tail
        grid, number = self._a2a.grid(num_rows), inputs.number
        by_itself = grid.encodes and not self._turn.capture  # calls are bound by their launches, graphs are not
        if number >= 0 and self._encode and not by_itself:
            self._encode(sources[0], number, num_rows, stream)  # where no earlier round reads any more
            sources = self._encoded + sources[len(self._encoded) :]
            tail, number = self._encoded_scales, -1
        places = num_rows, sources, tail, inputs.tail_stride, inputs.num_tokens, number
        if places != self._places:  # often all lies where it lay before
            self._places = ()  # as in `_use`
            self._place(*places)
            self._places = places
        if grid is not self._grid:
            self._use(grid)
        params.waits = and_wait
        self._inputs = inputs
        handle = self.handle = Handle(self._a2a, self.index, self._num_rounds, num_rows)
        self._num_rounds += 1
        self.stage, self.waits_already = Stage.SENT, and_wait  # first: a signal's exception may come between two lines
        try:
            self._library.dispatch_send(params, stream)
        except EpError:
            self.stage, self.waits_already = Stage.CLOSED, False
            raise
        return handle

    def wait(self, phase: int, then: Stage) -> None:
        """Wait for all peers' flags of a phase, unless what began it waits already."""
        before, self.stage = self.stage, then  # first: as in `send`
        if self.waits_already:
            self.waits_already = False
        else:
            try:
                self._end(phase, signals=False, waits=True)
            except EpError:
                self.stage = before
                raise
        self._inputs = None
        if phase != abi.PHASE_COMBINE:  # a combine has yet to write its NaN rows
            self.raise_if_known()

    def stage_rows(self, rows: torch.Tensor) -> None:
        """Copy or encode the valid ones of `rows` into the outbox."""
        self._outbox_params.rows = rows.data_ptr()
        self._outbox_params.number = abi.NUMBER[rows.dtype]
        self._outbox_params.num_ctas = self._num_ctas(self._a2a.config.max_tokens)
        self._library.outbox_stage(self._outbox_params, self._stream())

    def route_params(self) -> Any:
        """Parameters of a routing, to be completed: where the received rows lie."""
        return abi.RouteParams.from_buffer_copy(self._route)

    def route(self, params: Any) -> None:
        """Number the pairs of received rows and experts; with slots, fill those."""
        params.num_ctas = self._num_ctas(params.num_slots)
        self._library.route(params, self._stream())

    def experts(self, params: Any) -> None:
        """Apply local experts to pairs that were grouped."""
        params.num_ctas = self._num_ctas(params.route.num_slots)
        self._library.experts(abi.with_size(params), self._stream())

    def route_ids(self, params: Any) -> None:
        """Write the ids of this rank's experts."""
        self._library.route_ids(params, self._stream())

    def stage_pairs(self, rows: torch.Tensor, order: Order) -> None:
        """Add up the rows of pairs into the valid rows of the outbox."""
        to = self.outbox
        if to is None:  # sums in fp32 are encoded into it
            shape = (self._a2a.num_ranks, self._a2a.config.max_tokens, self._a2a.config.hidden)
            to = rows.new_empty(shape, dtype=torch.float32)
        self._order.num_ctas = self._num_ctas(self._a2a.config.max_tokens)
        self._order.rows, self._order.rows_number = rows.data_ptr(), abi.NUMBER[rows.dtype]
        self._order.to, self._order.to_number = to.data_ptr(), abi.NUMBER[to.dtype]
        self._order.to_row_bytes = to.stride(1) * to.dtype.itemsize
        self._order.pair_slots = order.pair_slots.data_ptr()
        self._order.weights = order.weights.data_ptr()
        self._library.outbox_order(self._order, self._stream())
        if self.outbox is None:
            self.stage_rows(to)

    def signal_end(self, phase: int, and_wait: bool) -> int:
        """Tell the peers that this rank has ended the round; `and_wait`: what launches it also waits for them.

        Returns the stream of the launch.
        """
        before, self.stage, self.waits_already = self.stage, Stage.ENDING, and_wait  # first: as in `send`
        try:
            return self._end(phase, signals=True, waits=and_wait)
        except EpError:
            self.stage, self.waits_already = before, False
            raise

    def _end(self, phase: int, signals: bool, waits: bool) -> int:
        params = self._wait[phase]
        params.signals, params.waits = int(signals), int(waits)
        stream = self._stream()
        self._library.end(params, stream)
        return stream

    def leave(self) -> None:
        """Tell the peers that this rank comes no more; at once, as the last operation may be waiting for them."""
        self._library.leave(self._wait[abi.PHASE_DISPATCH], _device.current_stream(self._a2a.device))

    def pull(self, out: torch.Tensor, stream: int | None = None) -> None:
        """Add up the peers' rows into `out`; `stream`: that of the last operation, if it is the current one still."""
        self._outbox_params.out = out.data_ptr()
        self._outbox_params.number = abi.NUMBER[out.dtype]
        self._outbox_params.num_rows = out.shape[0]
        self._outbox_params.num_ctas = self._num_ctas(out.shape[0])
        self._library.combine_pull(self._outbox_params, self._stream() if stream is None else stream)
