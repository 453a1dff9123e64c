"""The collective interface: connect, dispatch, combine, release, and their begin forms.

A round is a dispatch and the combine or release that ends it. Every rank takes part in every round of a channel, in
the same order; a rank without tokens passes tensors of zero rows. `cuda/sync.cuh` has the contracts between ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import overload

import torch

from ep_a2a import abi, world
from ep_a2a import layout as _layout
from ep_a2a.a2a import A2A, Watch
from ep_a2a.arguments import Rows, check_tensor
from ep_a2a.channel import Channel, Stage
from ep_a2a.config import Config
from ep_a2a.device import choose, current_stream
from ep_a2a.errors import RoundError
from ep_a2a.received import Handle, Received
from ep_a2a.rendezvous import one_line
from ep_a2a.route import Order, Pairs
from ep_a2a.symm import nvshmem

__all__ = [
    "A2A",
    "Handle",
    "Order",
    "Pairs",
    "PendingCombine",
    "PendingDispatch",
    "PendingRelease",
    "Ranks",
    "Received",
    "Watch",
    "combine",
    "combine_begin",
    "connect",
    "dispatch",
    "dispatch_begin",
    "release",
    "release_begin",
    "reserve",
]


class Ranks(list[A2A]):
    """The `A2A` objects of all ranks of a local world, by rank; closed together."""

    def __init__(self, group: world.LocalWorld, a2as: Sequence[A2A]) -> None:
        super().__init__(a2as)
        self._world = group

    def close(self) -> None:
        """Close every rank's object, those whose peers have ended for ever too. Raises RendezvousTimeout."""
        ended = [a2a._why_ended() for a2a in self]
        known = next(filter(None, ended), "")
        self._world.run(lambda rank: self[rank.rank]._close(ended[rank.rank] or known))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._world.run(lambda rank: self[rank.rank].__exit__(kind, error, trace))


@overload
def connect(config: Config, group: world.LocalWorld) -> Ranks: ...  # type: ignore[overload-overlap]
@overload
def connect(config: Config, group: object | None = None, device: str | torch.device | None = None) -> A2A: ...
def connect(config: Config, group: object | None = None, device: str | torch.device | None = None) -> A2A | Ranks:
    """Join the ranks of a group: compare their configurations, allocate, load every kernel, and meet.

    Collective. Nothing is allocated later but the results of calls. Each step waits at most `config.first_timeout_s`.

    config   equal on all ranks
    group    a torch ProcessGroup, an mpi4py communicator, a rank of a local world, or None = from the launcher; a whole
             local world: its ranks' objects are made at once
    device   None = torch's current GPU, or the CPU where torch sees none; "cpu" = the CPU all the same. Processes on
             GPUs initialise NVSHMEM over the group, unless it is already (`reserve`)
    Returns  an `A2A`, or those of a local world by rank; close it, or use it in a `with` statement
    Raises   ConfigMismatch (ranks, field, values), RendezvousTimeout (who did not come), SymmetricMemoryError,
             EpError (no library, no GPU that can be used), TypeError, ValueError
    """
    if not isinstance(config, Config):
        raise TypeError(f"config must be an ep_a2a.Config, not {type(config).__name__}")
    if isinstance(group, world.LocalWorld):
        if device is not None:
            raise ValueError(f"device={str(device)!r}: the ranks of a local world are where that was made")
        return Ranks(group, group.run(lambda rank: connect(config, rank)))
    ranks = world.resolve(group)
    if not 1 <= ranks.size <= _layout.MAX_RANKS:
        raise ValueError(f"the group has {ranks.size} ranks, at most {_layout.MAX_RANKS} are served")
    meeting = ranks.connection()
    try:
        return A2A(config, meeting, device)
    except BaseException as error:
        meeting.leave(one_line(error))
        raise


def reserve(num_bytes: int, group: object | None = None, timeout_s: float = 300.0) -> None:
    """Initialise NVSHMEM over all ranks of a job and allocate a heap, from which later connections take their parts.

    Collective; needed before `connect` of groups that are not all ranks. There is then no more than what was reserved;
    without it the first `connect` initialises NVSHMEM over its group, and each allocates what it needs. Memory that
    another library's NVSHMEM has is not touched. Does nothing on a CPU.

    num_bytes  of each rank, equal on all: the sum of `Config.bytes(R).region_bytes` of what will be connected at a
               time; more where connections come and go, as each takes one piece
    group      as for `connect`: all ranks that will ever take part
    timeout_s  how long each step waits for the other ranks, seconds
    Raises     SymmetricMemoryError (what is missing: package, GPU, bytes), RendezvousTimeout, EpError, TypeError,
               ValueError
    """
    ranks, chosen = world.resolve(group), choose(None)
    if chosen.type == "cuda" and not isinstance(ranks, world.LocalRank):
        nvshmem.reserve(ranks, num_bytes, timeout_s, chosen)


# ---- dispatch ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class PendingDispatch:
    """A dispatch under way. `wait` once, or `abandon`."""

    _handle: Handle

    def wait(self) -> tuple[Received, Handle]:
        """Wait for the rows of all peers; on a GPU it is the current stream that waits.

        Collective, in the same order as other waits. Returns and raises as `dispatch`.
        """
        channel = _begun(self._handle, Stage.SENT, "dispatch")
        channel.wait(abi.PHASE_DISPATCH, Stage.OPEN)
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
    pending = prepare_dispatch(a2a, x, topk_ids, topk_weights, num_tokens, extra, channel)(False)
    a2a._channels[channel].mark()
    return pending


def prepare_dispatch(
    a2a: A2A,
    x: Rows,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
    extra: Sequence[torch.Tensor] = (),
    channel: int = 0,
) -> Callable[[bool], PendingDispatch]:
    """Check everything; what is returned begins the dispatch, and may launch its wait. Local."""
    target = _channel_for_dispatch(a2a, channel)
    inputs = a2a.spec.check(x, topk_ids, topk_weights, num_tokens, extra)
    return lambda and_wait: PendingDispatch(target.send(inputs, and_wait))


def _channel_for_dispatch(a2a: A2A, index: int) -> Channel:
    _check_a2a(a2a)._check_ready()
    channel = a2a._channel(index)
    channel.raise_input_error()
    channel.expect_closed()
    return channel


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
    target = _channel_for_dispatch(a2a, channel)  # as `prepare_dispatch` and `wait`, but shorter
    handle = target.send(a2a.spec.check(x, topk_ids, topk_weights, num_tokens, extra), and_wait=True)
    target.wait(abi.PHASE_DISPATCH, Stage.OPEN)
    return target.received, handle


# ---- the end of a round ------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class PendingCombine:
    """A combine under way. `wait` once."""

    _handle: Handle
    _out: torch.Tensor
    _stream: int  # of whose memory it may be

    def wait(self) -> torch.Tensor:
        """Wait for the peers' outboxes and add up their rows. Collective. Returns and raises as `combine`."""
        channel = _begun(self._handle, Stage.ENDING, "combine")
        if self._stream != current_stream(self._out.device):
            self._out.record_stream(torch.cuda.current_stream(self._out.device))
        channel.wait(abi.PHASE_COMBINE, Stage.CLOSED)
        channel.pull(self._out)
        channel.raise_if_known()
        return self._out


@dataclasses.dataclass(eq=False)
class PendingRelease:
    """A release under way. `wait` once."""

    _handle: Handle

    def wait(self) -> None:
        """Wait until all peers have released the round. Collective. Raises as `release`."""
        channel = _begun(self._handle, Stage.ENDING, "release")
        channel.wait(abi.PHASE_RELEASE, Stage.CLOSED)


def combine_begin(
    a2a: A2A,
    handle: Handle,
    rows: torch.Tensor | None = None,
    order: Order | None = None,
    out: torch.Tensor | None = None,
) -> PendingCombine:
    """Tell the peers that the outbox is ready, and return; arguments and errors as `combine`. Collective."""
    pending = prepare_combine(a2a, handle, rows, order, out)(False)
    a2a._channels[handle.channel].mark()
    return pending


def prepare_combine(
    a2a: A2A,
    handle: Handle,
    rows: torch.Tensor | None = None,
    order: Order | None = None,
    out: torch.Tensor | None = None,
) -> Callable[[bool], PendingCombine]:
    """Check everything; what is returned begins the combine, and may launch its wait. Local."""
    channel, rows, out = _check_combine(a2a, handle, rows, order, out)

    def begin(and_wait: bool) -> PendingCombine:
        _begin_combine(channel, rows, order, and_wait)
        return PendingCombine(handle, out, current_stream(a2a.device))

    return begin


def _begin_combine(channel: Channel, rows: torch.Tensor | None, order: Order | None, and_wait: bool) -> int:
    """Returns the stream that it is on."""
    if rows is not None and order is not None:
        channel.stage_pairs(rows, order)
    elif rows is not None:
        channel.stage_rows(rows)
    return channel.signal_end(abi.PHASE_COMBINE, and_wait)


def _check_combine(
    a2a: A2A, handle: Handle, rows: torch.Tensor | None, order: Order | None, out: torch.Tensor | None
) -> tuple[Channel, torch.Tensor | None, torch.Tensor]:
    """The channel, the rows if there are any, and where the sums go."""
    channel = _check_a2a(a2a)._channel_of(handle)
    combined, hidden = a2a.config.combine, a2a.config.hidden
    dtype = combined.result_dtype
    if order is not None:
        rows = _check_order(handle, rows, order, hidden, a2a.device)
    elif rows is not None:
        shape = (a2a.num_ranks, a2a.config.max_tokens, hidden)
        dtypes = tuple(abi.NUMBER) if combined.is_encoded else (dtype,)
        _check_vectors("rows", check_tensor("rows", rows, dtypes, shape, a2a.device))
    elif combined.is_encoded:
        raise TypeError(f"rows=None: {combined} outbox rows are encoded by combine: give it the results as rows=")
    if out is None:
        out = torch.empty((handle.num_rows, hidden), dtype=dtype, device=a2a.device)
    else:
        _check_vectors("out", check_tensor("out", out, (dtype,), (handle.num_rows, hidden), a2a.device))
        _check_apart("out", out, a2a)
    return channel, rows, out


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
    channel, rows, out = _check_combine(a2a, handle, rows, order, out)  # as `prepare_combine` and `wait`, but shorter
    stream = _begin_combine(channel, rows, order, and_wait=True)
    channel.wait(abi.PHASE_COMBINE, Stage.CLOSED)
    channel.pull(out, stream)
    channel.raise_if_known()
    return out


def release_begin(a2a: A2A, handle: Handle) -> PendingRelease:
    """Tell the peers that this rank reads its rows no more, and return; errors as `release`. Collective."""
    pending = prepare_release(a2a, handle)(False)
    a2a._channels[handle.channel].mark()
    return pending


def prepare_release(a2a: A2A, handle: Handle) -> Callable[[bool], PendingRelease]:
    """Check everything; what is returned begins the release, and may launch its wait. Local."""
    channel = _check_a2a(a2a)._channel_of(handle)

    def begin(and_wait: bool) -> PendingRelease:
        channel.signal_end(abi.PHASE_RELEASE, and_wait)
        return PendingRelease(handle)

    return begin


def release(a2a: A2A, handle: Handle) -> None:
    """End a round without results. Collective: all ranks release it, or all combine it.

    Runs on the current stream. Raises RoundError (nothing was sent), PeerTimeout, PeerLeft, ChannelMisuse,
    RoundMismatch.
    """
    prepare_release(a2a, handle)(True).wait()


def _begun(handle: Handle, stage: Stage, what: str) -> Channel:
    """The channel of a pending operation, if it was not waited for yet."""
    handle.a2a._check_open()
    channel = handle.a2a._channels[handle.channel]
    if not channel.waits_already:  # else an end that is known by now comes with what it leaves behind, as NaN rows
        handle.a2a._check_ready()
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
    _check_vectors("rows", check_tensor("rows", rows, tuple(abi.NUMBER), (*order.shape, hidden), device))
    return rows


def _check_apart(name: str, tensor: torch.Tensor, a2a: A2A) -> None:
    first, end = a2a._memory.base, a2a._memory.base + a2a._memory.bytes_per_rank
    if tensor.numel() and first <= tensor.data_ptr() < end:
        raise ValueError(f"{name} lies in this rank's symmetric memory, which peers read and write: it must not")


def _check_vectors(name: str, tensor: torch.Tensor) -> None:
    if tensor.data_ptr() % _layout.VECTOR_BYTES:
        raise ValueError(f"{name} starts at {tensor.data_ptr():#x}: it must start at a multiple of 16 bytes")
