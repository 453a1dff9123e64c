"""The collective interface: connect, dispatch, combine, release, and their begin forms.

A round is a dispatch and the combine or release that ends it. Every rank takes part in every round of a channel, in
the same order; a rank without tokens passes tensors of zero rows. `cuda/sync.cuh` has the contracts between ranks.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from types import TracebackType

import torch

from ep_a2a import layout as _layout
from ep_a2a import native, symm, world
from ep_a2a.arguments import DispatchInputs, Rows, check_tensor
from ep_a2a.channel import Channel, Stage
from ep_a2a.config import Config
from ep_a2a.errors import ClosedError, ConfigMismatch, EpError, RoundError
from ep_a2a.received import Handle, Received
from ep_a2a.rendezvous import one_line
from ep_a2a.route import Order, Pairs

__all__ = [
    "A2A",
    "Handle",
    "Order",
    "Pairs",
    "PendingCombine",
    "PendingDispatch",
    "PendingRelease",
    "Received",
    "combine",
    "combine_begin",
    "connect",
    "dispatch",
    "dispatch_begin",
    "release",
    "release_begin",
]


def connect(config: Config, group: object | None = None) -> A2A:
    """Join the ranks of a group: compare their configurations, allocate, load every kernel, and meet.

    Collective. Nothing is allocated later but the results of calls. Each step waits at most `config.first_timeout_s`.

    config   equal on all ranks
    group    a torch ProcessGroup, an mpi4py communicator, a rank of a local world, or None = from the launcher
    Returns  an `A2A`; close it, or use it in a `with` statement
    Raises   ConfigMismatch (ranks, field, values), RendezvousTimeout (who did not come), SymmetricMemoryError,
             EpError (no library), TypeError, ValueError
    """
    if not isinstance(config, Config):
        raise TypeError(f"config must be an ep_a2a.Config, not {type(config).__name__}")
    ranks = world.resolve(group)
    if not 1 <= ranks.size <= _layout.MAX_RANKS:
        raise ValueError(f"the group has {ranks.size} ranks, at most {_layout.MAX_RANKS} are served")
    meeting = ranks.connection()
    try:
        return A2A(config, meeting)
    except BaseException as error:
        meeting.leave(one_line(error))
        raise


class A2A:
    """The ranks of one group, connected. One object serves all layers of equal `Config`. Made by `connect`.

    rank, num_ranks  of this process in the group
    config, layout   what was agreed, and where everything lies
    local_experts    range of the global experts of this rank; earlier ranks own one more where they do not divide
    schedule         "phased" or "general": how a CTA's threads divide the planes; chosen, may be set for measurements
    """

    def __init__(self, config: Config, group: world.Group) -> None:
        self.config = config
        self.group = group
        self.rank, self.num_ranks = group.rank, group.size
        self.device = torch.device("cpu")
        self.layout = _layout.layout(config, group.size)
        self.local_experts = _layout.local_experts(group.rank, config.num_experts, group.size)
        self._closed = False
        self._kind: _layout.Kind = "cpu"
        self._split = _layout.phased_split(config.payload, config.hidden, config.top_k, group.size, config.extra_planes)
        timeout_s = config.first_timeout_s
        self.library = _agree(config, group, timeout_s)
        with torch.inference_mode(False):  # views of memory that outlives such a block
            self._memory = symm.allocate(group, self.layout.region_bytes, timeout_s)
            self._channels = [Channel(self, index, self._memory) for index in range(config.channels)]
        self.schedule = _layout.choose_schedule(self._kind, self._split)
        group.barrier("connect", timeout_s)

    @property
    def schedule(self) -> _layout.Schedule:
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: _layout.Schedule) -> None:
        if schedule not in ("general", "phased"):
            raise ValueError(f"schedule={schedule!r}: must be 'general' or 'phased'")
        split = self._split if schedule == "phased" else None
        if isinstance(split, _layout.NoSplit):
            raise ValueError(f"there is no phased schedule: {split.reason}")
        self._schedule = schedule
        for channel in self._channels:
            channel.set_schedule(split)

    def outbox(self, channel: int = 0) -> torch.Tensor:
        """Where results of received rows go, [num_ranks, max_tokens, H] in `config.combine`'s dtype, as a view.

        Local. This rank's to write from the end of its dispatch wait to its combine call, at valid rows; results that
        were written there need no copy: `combine(a2a, handle)`. Raises ClosedError, ValueError, also where
        `config.combine` is encoded, a sticky error.
        """
        self._check_alive()
        outbox = self._channel(channel).outbox
        if outbox is None:
            raise ValueError(f"{self.config.combine} outbox rows are encoded by combine: give it the results as rows=")
        return outbox.detach()  # a new tensor: what is written into it by autograd hangs on that one alone

    def scratch(self, channel: int = 0) -> torch.Tensor:
        """Where results may go if combine encodes them, to be given to it as `rows`: bf16 [num_ranks, max_tokens, H].

        Local. One for each channel, for all layers; from torch's allocator at the first call. This rank's to write
        from one combine call to the next. Raises ClosedError, ValueError, a sticky error.
        """
        self._check_alive()
        return self._channel(channel).scratch

    def check(self) -> None:
        """Raise what went wrong so far on the device. Local; no synchronisation, under a microsecond.

        Raises PeerTimeout, PeerLeft, ChannelMisuse, RoundMismatch (for ever); InvalidRouting, InvalidCount,
        CapacityExceeded (once); ClosedError.
        """
        self._check_alive()
        for channel in self._channels:
            channel.raise_input_error()

    def close(self) -> None:
        """End the object. Collective with a deadline; after a sticky error local. Closing twice is harmless.

        A `with` block that ends by an exception does not wait: it tells the peers, whose next wait raises PeerLeft.
        Memory that a peer or a living view can still reach stays mapped. Raises RendezvousTimeout.
        """
        error = next(filter(None, (channel.error() for channel in self._channels)), None)
        self._close(one_line(error) if error else "")

    def __enter__(self) -> A2A:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            for channel in self._channels:
                channel.leave()
            self._close(one_line(error) if error else kind.__name__)  # the peers may not be on their way to a close

    def __repr__(self) -> str:
        return f"A2A(rank {self.rank} of {self.num_ranks}, {self.config})"

    def _close(self, alone: str) -> None:
        """Close with the peers; or alone, and tell them why."""
        if self._closed:
            return
        self._closed = True
        met = False
        try:
            if not alone:
                self.group.barrier("close", self.config.first_timeout_s, self._peers_left)
                met = True
        except BaseException as error:
            alone = one_line(error)
            raise
        finally:
            self.group.leave(alone)
            self._memory.close(keep=not met)
            self._channels = []  # their views would keep the memory

    def _peers_left(self) -> str | None:
        """What a peer wrote here when it ended a channel for ever, as then it closes alone; polled on the host."""
        for channel in self._channels:
            start = channel.index * self.layout.channel_bytes + self.layout.abort_words_offset
            words = self._memory.region[start : start + 8 * self.num_ranks].view(torch.int64).tolist()
            for rank, word in enumerate(words):
                if error := native.sticky_error(self.rank, native.abort_status(word)):
                    return f"rank {rank} ended channel {channel.index} for ever: {one_line(error)}"
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this A2A was closed")

    def _check_alive(self) -> None:
        self._check_open()
        for channel in self._channels:
            if error := channel.error():
                raise error

    def _channel(self, index: int) -> Channel:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"channel must be an int, not {type(index).__name__}")
        if not 0 <= index < len(self._channels):
            last = len(self._channels) - 1
            raise ValueError(f"channel={index}: config.channels={last + 1}, legal are 0 to {last}")
        return self._channels[index]

    def _channel_of(self, handle: Handle) -> Channel:
        """The channel of a round that may be ended now."""
        self._check_alive()
        if not isinstance(handle, Handle):
            raise TypeError(f"handle must be what dispatch returned, not {type(handle).__name__}")
        if handle.a2a is not self:
            raise RoundError("this handle was made by another A2A")
        channel = self._channels[handle.channel]
        channel.expect_open(handle)
        return channel


def _agree(config: Config, group: world.Group, timeout_s: float) -> native.Library:
    """The library, once all ranks have loaded it and have the same Config; else every rank says who differs and how."""
    try:
        library, problem = native.load("host"), ""
    except (EpError, OSError) as error:
        library, problem = None, str(error)
    mine = {field.name: repr(getattr(config, field.name)) for field in dataclasses.fields(config)}
    texts = group.all_gather(json.dumps([problem, mine]).encode(), "connect: configurations", timeout_s)
    told: list[tuple[str, dict[str, str]]] = [json.loads(text) for text in texts]
    for rank, (theirs, _) in enumerate(told):
        if theirs:
            raise EpError(f"rank {group.rank}, connect: rank {rank} has no library: {theirs}")
    assert library is not None  # this rank was among those just asked
    different = []
    for name in mine:
        holders: dict[str, list[int]] = {}
        for rank, (_, fields) in enumerate(told):
            holders.setdefault(fields.get(name, "absent"), []).append(rank)
        if len(holders) > 1:
            different.append(f"{name}: " + ", ".join(f"{v} on rank {_ranks(r)}" for v, r in holders.items()))
    if different:
        raise ConfigMismatch(f"rank {group.rank}: the ranks' configurations differ: {'; '.join(different)}")
    return library


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")


# ---- dispatch ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PendingDispatch:
    """A dispatch under way. `wait` once, or `abandon`."""

    _handle: Handle

    def wait(self) -> tuple[Received, Handle]:
        """Wait for the rows of all peers; on a GPU it is the current stream that waits.

        Collective, in the same order as other waits. Returns and raises as `dispatch`.
        """
        channel = _begun(self._handle, Stage.SENT, "dispatch")
        channel.wait(native.PHASE_DISPATCH, Stage.OPEN)
        return channel.received, self._handle

    def abandon(self) -> None:
        """End the round without using it: wait, then release. Collective, as those two."""
        release(self._handle.a2a, self.wait()[1])


def dispatch_begin(
    a2a: A2A,
    x: Rows,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
    extra: Sequence[torch.Tensor] = (),
    channel: int = 0,
) -> PendingDispatch:
    """Send the rows and return before those of the peers are here; arguments and errors as `dispatch`. Collective."""
    _check_a2a(a2a)._check_alive()
    target = a2a._channel(channel)
    target.raise_input_error()
    target.expect_closed()
    inputs = DispatchInputs(a2a.config, a2a.device, x, topk_ids, topk_weights, num_tokens, extra)
    return PendingDispatch(target.send(inputs))


def dispatch(
    a2a: A2A,
    x: Rows,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
    extra: Sequence[torch.Tensor] = (),
    channel: int = 0,
) -> tuple[Received, Handle]:
    """Send each token once to every rank that owns one of its experts, and wait for the peers' rows.

    Collective: every rank, once per round of a channel, with 0 to `max_tokens` rows, T of which may differ. Runs on
    the current stream. Inputs may be reused by later work on that stream.

    x             [T, H] bf16, fp16 or fp32 (encoded to the payload format), or that format's own planes, as
                  `quant.encode` returns them: `(rows, scales)`, for NVFP4 also `(rows, scales, global_scale)` with
                  fp32 [] or [T]; without it the global scale is 1
    topk_ids      int32 [T, K] global experts, -1 = none; an id twice in a token counts twice
    topk_weights  fp32 [T, K]
    num_tokens    int32 of one element on the device: rows that count, clamped to [0, T]; None = T
    extra         uint8 [T, bytes] for each of `config.extra_planes`
    Returns       (Received, Handle); pass the handle to `combine` or `release`
    Raises        TypeError, ValueError, RoundError: before anything was sent; InvalidRouting, InvalidCount: about an
                  earlier round, before anything was sent; PeerTimeout, PeerLeft, ChannelMisuse: for ever
    Moves         `config.bytes(R).row_bytes` to each distinct rank of a token
    """
    return dispatch_begin(a2a, x, topk_ids, topk_weights, num_tokens, extra, channel).wait()


# ---- the end of a round ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PendingCombine:
    """A combine under way. `wait` once."""

    _handle: Handle
    _out: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Wait for the peers' outboxes and add up their rows. Collective. Returns and raises as `combine`."""
        channel = _begun(self._handle, Stage.ENDING, "combine")
        channel.wait(native.PHASE_COMBINE, Stage.CLOSED)
        channel.pull(self._out)
        channel.raise_if_known()
        return self._out


@dataclasses.dataclass(frozen=True)
class PendingRelease:
    """A release under way. `wait` once."""

    _handle: Handle

    def wait(self) -> None:
        """Wait until all peers have released the round. Collective. Raises as `release`."""
        channel = _begun(self._handle, Stage.ENDING, "release")
        channel.wait(native.PHASE_RELEASE, Stage.CLOSED)


def combine_begin(
    a2a: A2A,
    handle: Handle,
    rows: torch.Tensor | None = None,
    order: Order | None = None,
    out: torch.Tensor | None = None,
) -> PendingCombine:
    """Tell the peers that the outbox is ready, and return; arguments and errors as `combine`. Collective."""
    channel = _check_a2a(a2a)._channel_of(handle)
    combined, hidden = a2a.config.combine, a2a.config.hidden
    dtype = combined.result_dtype
    if order is not None:
        rows = _check_order(handle, rows, order, hidden, a2a.device)
    elif rows is not None:
        shape = (a2a.num_ranks, a2a.config.max_tokens, hidden)
        dtypes = tuple(native.NUMBER) if combined.is_encoded else (dtype,)
        _check_vectors("rows", check_tensor("rows", rows, dtypes, shape, a2a.device))
    elif combined.is_encoded:
        raise TypeError(f"rows=None: {combined} outbox rows are encoded by combine: give it the results as rows=")
    if out is None:
        out = torch.empty((handle.num_rows, hidden), dtype=dtype, device=a2a.device)
    else:
        _check_vectors("out", check_tensor("out", out, (dtype,), (handle.num_rows, hidden), a2a.device))
        _check_apart("out", out, a2a)
    if rows is not None and order is not None:
        channel.stage_pairs(rows, order)
    elif rows is not None:
        channel.stage_rows(rows)
    channel.signal_end(native.PHASE_COMBINE)
    return PendingCombine(handle, out)


def combine(
    a2a: A2A,
    handle: Handle,
    rows: torch.Tensor | None = None,
    order: Order | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Bring the results back: for each token the rows of its distinct ranks, added in rank order in fp32.

    Collective; ends the round. Runs on the current stream. The same bits in every run. Routing weights are
    applied here only with an `order`: else experts put weighted, locally reduced rows into the outbox.

    handle   of the open round
    rows     [num_ranks, max_tokens, H] in the combine dtype, contiguous, on a multiple of 16 bytes: results at the
             valid rows; None = they are in `a2a.outbox(channel)` already. Where `config.combine` is encoded: bf16,
             fp16 or fp32, and not None
    order    of this round's `compact` or `by_expert`: then `rows` are [*order.shape, H] in bf16, fp16 or fp32, one row
             for each pair. A received row is the sum of its pairs in k order, each times its weight, in fp32 from
             zero, rounded once to the combine format; pairs that were dropped add nothing
    out      [T, H] in the combine dtype, bf16 where that is encoded, contiguous, on a multiple of 16 bytes; None = from
             torch's allocator
    Returns  [T, H]; rows past `num_tokens` and tokens that went nowhere are zero; NaN after an abort
    Raises   TypeError, ValueError, RoundError: nothing was sent, the round is still open; PeerTimeout, PeerLeft,
             ChannelMisuse, RoundMismatch: for ever
    """
    return combine_begin(a2a, handle, rows, order, out).wait()


def release_begin(a2a: A2A, handle: Handle) -> PendingRelease:
    """Tell the peers that this rank reads its rows no more, and return; errors as `release`. Collective."""
    _check_a2a(a2a)._channel_of(handle).signal_end(native.PHASE_RELEASE)
    return PendingRelease(handle)


def release(a2a: A2A, handle: Handle) -> None:
    """End a round without results. Collective: all ranks release it, or all combine it.

    Runs on the current stream. Raises RoundError (nothing was sent), PeerTimeout, PeerLeft, ChannelMisuse,
    RoundMismatch.
    """
    release_begin(a2a, handle).wait()


def _begun(handle: Handle, stage: Stage, what: str) -> Channel:
    """The channel of a pending operation, if it was not waited for yet."""
    handle.a2a._check_alive()
    channel = handle.a2a._channels[handle.channel]
    if channel.stage is not stage or channel.handle is not handle:
        raise RoundError(f"this {what} was waited for already (channel {handle.channel}, round {handle.round})")
    return channel


def _check_a2a(a2a: A2A) -> A2A:
    if not isinstance(a2a, A2A):
        raise TypeError(f"a2a must be what connect returned, not {type(a2a).__name__}")
    return a2a


def _check_order(
    handle: Handle, rows: torch.Tensor | None, order: Order, hidden: int, device: torch.device
) -> torch.Tensor:
    """`rows`, if they fit `order`, and that the round."""
    if not isinstance(order, Order):
        raise TypeError(f"order must be the order of what compact or by_expert returned, not {type(order).__name__}")
    if order.handle is not handle:
        there, here = order.handle, handle
        raise RoundError(
            f"this order is of round {there.round} of channel {there.channel}"
            f"{'' if there.a2a is here.a2a else ' of another A2A'}, the handle of round {here.round} of channel "
            f"{here.channel}"
        )
    if rows is None:
        raise ValueError(f"order needs rows [{', '.join(map(str, (*order.shape, hidden)))}], they are None")
    _check_vectors("rows", check_tensor("rows", rows, tuple(native.NUMBER), (*order.shape, hidden), device))
    return rows


def _check_apart(name: str, tensor: torch.Tensor, a2a: A2A) -> None:
    first, end = a2a._memory.base, a2a._memory.base + a2a._memory.bytes_per_rank
    if tensor.numel() and first <= tensor.data_ptr() < end:
        raise ValueError(f"{name} lies in this rank's symmetric memory, which peers read and write: it must not")


def _check_vectors(name: str, tensor: torch.Tensor) -> None:
    if tensor.data_ptr() % _layout.VECTOR_BYTES:
        raise ValueError(f"{name} starts at {tensor.data_ptr():#x}: it must start at a multiple of 16 bytes")
