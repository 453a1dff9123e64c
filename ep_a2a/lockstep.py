"""Local worlds whose ranks are driven together: every rank's first half is launched before any rank waits.

So one thread can drive all ranks, on a CPU and on a GPU, and a graph can hold a round of all of them. Where each rank
has a stream, those fork from the current stream and join it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ep_a2a import api, world
from ep_a2a import device as _device
from ep_a2a.layout import MAX_RANKS

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues; the driver reads it when CUDA starts, at most 32


class _Pending(Protocol):
    def wait(self) -> Any: ...


class LockstepWorld(world.LocalWorld):
    """Ranks of one process; each call below is one operation of all ranks, given by rank. Made by `local`.

    Calls run on the current stream of the world's GPU without synchronisation, and may be captured in a graph. All
    ranks' arguments are checked before anything is launched: after a TypeError, ValueError or RoundError the corrected
    call can follow.
    """

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        super().__init__(num_ranks, str(device))
        on_gpu = device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(num_ranks)]

    def dispatch(self, calls: Sequence[tuple[Any, ...]], channel: int = 0) -> list[tuple[api.Received, api.Handle]]:
        """`ep_a2a.dispatch` of every rank: (a2a, x, topk_ids, topk_weights[, num_tokens[, extra]]). Returns by rank."""
        return self._together(api.prepare_dispatch, calls, channel=channel)

    def combine(self, calls: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
        """`ep_a2a.combine` of every rank: (a2a, handle[, rows[, order[, out]]]). Returns by rank."""
        return self._together(api.prepare_combine, calls)

    def release(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """`ep_a2a.release` of every rank: (a2a, handle)."""
        self._together(api.prepare_release, calls)

    def _together(
        self, prepare: Callable[..., Callable[[bool], _Pending]], calls: Sequence[tuple[Any, ...]], **same: int
    ) -> list[Any]:
        if len(calls) != len(self.ranks):
            raise ValueError(f"{len(calls)} calls for {len(self.ranks)} ranks: one for each")
        ranks = [call[0].rank if isinstance(call[0], api.A2A) else None for call in calls]
        if ranks != list(range(len(calls))):
            raise ValueError(f"the calls are of ranks {ranks}: they must come by rank, each with its own A2A")
        places = {call[0].group.connected_in for call in calls if isinstance(call[0].group, world.LocalRank)}
        if len(places) != 1 or places.pop()[0] is not self._meeting:
            raise ValueError("the A2A objects are not of one connection of this world")
        wanted = inspect.signature(prepare)
        for rank, call in enumerate(calls):
            try:
                wanted.bind(*call, **same)
            except TypeError as error:
                raise TypeError(f"the call of rank {rank}: {error}") from None
        begins = [prepare(*call, **same) for call in calls]
        current = None if self.streams[0] is None else torch.cuda.current_stream(self.streams[0].device)
        start = None if current is None else current.record_event()
        in_a_graph = current is not None and torch.cuda.is_current_stream_capturing()
        forked: list[torch.cuda.Stream] = []
        try:
            pending = []
            for stream, begin in zip(self.streams, begins):
                with _device.on(stream):
                    if stream is not None and start is not None:
                        stream.wait_event(start)  # not for what a rank adds, whose stream may be the current one
                        forked.append(stream)
                    pending.append(begin(in_a_graph))  # there branches run side by side: one launch a rank
            results = []
            for stream, one in zip(self.streams, pending):
                with _device.on(stream):
                    results.append(one.wait())
        finally:
            for stream in forked:  # after an exception too: what the current one lent is still in use there
                torch.cuda.current_stream(stream.device).wait_stream(stream)
        return results

    def _enter(self, rank: int) -> None:
        """In a thread of `run`: each rank calls on its own stream, where its waits hold up no other."""
        if (stream := self.streams[rank]) is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)


def local(num_ranks: int, device: str = "cpu") -> LockstepWorld:
    """Make the ranks of a local world, all in this process: threads (`run`), or driven together (`dispatch` ...).

    Local. num_ranks is 1 to 128 on a "cpu"; on "cuda", the current GPU, 1 to 32, a stream each, and
    CUDA_DEVICE_MAX_CONNECTIONS must be set to as many at least before CUDA starts: streams that share a hardware
    queue wait for each other. Raises ValueError, TypeError, EpError (no GPU).
    """
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
        raise TypeError(f"num_ranks must be an int, not {type(num_ranks).__name__}")
    on_gpu = device != "cpu"
    most = 32 if on_gpu else MAX_RANKS
    if not 1 <= num_ranks <= most:
        raise ValueError(f"num_ranks={num_ranks}: must be 1 to {most} on {device!r}")
    chosen = _device.choose(device)
    queues = os.environ.get(_CONNECTIONS, "")
    if on_gpu and num_ranks > 1 and (int(queues) if queues.isdecimal() else 8) < num_ranks:
        raise ValueError(
            f"{num_ranks} ranks on one GPU need as many hardware queues: {_CONNECTIONS} is {queues or 'not set (8)'}, "
            f"set it to 32 before CUDA starts"
        )
    return LockstepWorld(num_ranks, chosen)
