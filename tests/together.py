"""The ranks of a local GPU world as threads, so that a body written for one rank runs there.

On a GPU a local world is driven by one thread: `world.dispatch([...])` takes the arguments of all ranks. Here every
rank has a thread and a `Seat`, the group that bodies get. The calls of all seats meet, the last thread to come makes
the one call for all, and every thread gets its own result, or the exception.

    found = together.run(ep_a2a.local(4, device="cuda"), 4, bodies.rounds, case)

With `streams=True` no call but connect and close meets: each thread calls the functions of `ep_a2a` for its own rank,
on a stream of its own. A kernel of torch that is loaded while another rank waits in a kernel may have to wait for
that one: run the body without `streams` first, in the same process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

import ep_a2a

PATIENCE_S = 120.0  # other ranks compute references, one at a time
Each = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


class NotMet(AssertionError):
    """Not all ranks came to a call: one failed, or calls something else."""


class Meeting:
    """Where the threads of all ranks meet, one call after the other."""

    def __init__(self, num_ranks: int) -> None:
        self._asked: list[Any] = [None] * num_ranks
        self._answer: Any = None
        self._barrier = threading.Barrier(num_ranks, action=self._act)

    def meet(self, rank: int, what: object, act: Callable[[list[Any]], Sequence[Any]], asked: Any = None) -> Any:
        """Wait for all ranks; the last one calls `act` with what all asked, by rank. Returns this rank's part."""
        self._asked[rank] = what, act, asked
        try:
            self._barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError:
            raise NotMet(f"rank {rank}, {what}: the other ranks did not come") from None
        answer = self._answer  # the next one is made when all have come again, and so have read this one
        if isinstance(answer, BaseException):
            raise answer
        return answer[rank]

    def abort(self) -> None:
        """Nobody meets any more."""
        self._barrier.abort()

    def _act(self) -> None:
        try:
            kinds = [what for what, _, _ in self._asked]
            if any(kind != kinds[0] for kind in kinds):
                raise NotMet(f"ranks call different things: {kinds}")
            self._answer = self._asked[0][1]([asked for _, _, asked in self._asked])
        except BaseException as error:
            self._answer = error


class Seat:
    """A rank of a local world: the group of a body. `calls` has the functions of `ep_a2a` for it."""

    def __init__(self, table: Table, rank: int, streams: bool) -> None:
        self.rank, self.size = rank, table.size
        self._table = table
        self.calls: Any = self
        if streams:
            own = {name: getattr(ep_a2a, name) for name in ep_a2a.__all__ if callable(getattr(ep_a2a, name))}
            self.calls = SimpleNamespace(**own | {"connect": self.connect})

    def barrier(self, what: str, timeout_s: float) -> None:
        """Wait for all ranks on the host."""
        self.meet(("barrier", what), lambda asked: asked)

    def meet(self, what: object, act: Callable[[list[Any]], Sequence[Any]], asked: Any = None) -> Any:
        """`Meeting.meet` of this rank."""
        return self._table.meeting.meet(self.rank, what, act, asked)

    def connect(self, config: ep_a2a.Config, group: object = None) -> Connected:
        """All ranks' objects by one call; this rank's comes out of a `with` statement."""
        return self.meet("connect", self._table.connect, config)

    def dispatch(self, a2a, x, topk_ids, topk_weights, num_tokens=None, extra=(), channel=0):
        """`world.dispatch` of all ranks."""
        entry = a2a, x, topk_ids, topk_weights, num_tokens, extra
        return self.meet(("dispatch", channel), lambda all_: self._table.world.dispatch(all_, channel=channel), entry)

    def combine(self, a2a, handle, rows=None, order=None, out=None):
        """`world.combine` of all ranks."""
        return self.meet("combine", self._table.world.combine, (a2a, handle, rows, order, out))

    def release(self, a2a, handle):
        """`world.release` of all ranks."""

        def act(entries: list[Any]) -> list[Any]:
            self._table.world.release(entries)
            return [None] * len(entries)

        return self.meet("release", act, (a2a, handle))

    def dispatch_begin(self, *args, **options):
        """`ep_a2a.dispatch_begin` of each rank."""
        return self._begin(ep_a2a.dispatch_begin, args, options)

    def combine_begin(self, *args, **options):
        """`ep_a2a.combine_begin` of each rank."""
        return self._begin(ep_a2a.combine_begin, args, options)

    def release_begin(self, *args, **options):
        """`ep_a2a.release_begin` of each rank."""
        return self._begin(ep_a2a.release_begin, args, options)

    def _begin(self, begin: Callable[..., Any], args: Any, options: Any) -> Pending:
        def act(all_: list[Any]) -> list[Any]:
            return self._table.each(lambda one: begin(*one[0], **one[1]), all_)

        return Pending(self, self.meet(begin.__name__, act, (args, options)))


class Pending:
    """A pending call of a rank, whose `wait` and `abandon` meet those of the others."""

    def __init__(self, seat: Seat, pending: Any) -> None:
        self._seat, self._pending = seat, pending

    def wait(self) -> Any:
        """`wait` of each rank."""
        return self._end("wait")

    def abandon(self) -> Any:
        """`abandon` of each rank."""
        return self._end("abandon")

    def _end(self, name: str) -> Any:
        def act(all_: list[Any]) -> list[Any]:
            return self._seat._table.each(lambda one: getattr(one, name)(), all_)

        return self._seat.meet((type(self._pending).__name__, name), act, self._pending)


class Connected:
    """A rank's object, closed with those of the others at the end of a `with` statement."""

    def __init__(self, table: Table, objects: Any, a2a: ep_a2a.A2A) -> None:
        self._table, self._objects, self.a2a = table, objects, a2a

    def __enter__(self) -> ep_a2a.A2A:
        return self.a2a

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._table.meeting.meet(self.a2a.rank, "close", lambda asked: self._table.close(self._objects))


class Table:
    """All seats of a world. `each` calls a function for what every rank gave."""

    def __init__(self, world: Any, num_ranks: int, each: Each, connect: Callable[..., Any], streams: bool) -> None:
        self.world, self.size, self.each = world, num_ranks, each
        self.meeting = Meeting(num_ranks)
        self.seats = [Seat(self, rank, streams) for rank in range(num_ranks)]
        self._connect = connect
        self._open: list[Any] = []

    def connect(self, configs: list[ep_a2a.Config]) -> list[Connected]:
        """Connect all ranks of the world."""
        assert all(config == configs[0] for config in configs), configs
        objects = self._connect(configs[0], group=self.world)
        assert [a2a.rank for a2a in objects] == list(range(self.size))
        self._open.append(objects)
        return [Connected(self, objects, a2a) for a2a in objects]

    def close(self, objects: Any) -> list[None]:
        """Close the objects of all ranks."""
        self._open = [one for one in self._open if one is not objects]
        objects.close()
        return [None] * self.size

    def run(self, body: Callable[..., Any], args: Sequence[Any], start: Callable[[int], Any]) -> list[Any]:
        """Call `body(seat, *args)` in a thread for each rank, inside `start(rank)`."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []  # in the order in which they happened

        def one(seat: Seat) -> None:
            try:
                with start(seat.rank):
                    results[seat.rank] = body(seat, *args)
            except BaseException as error:
                errors.append(error)
                self.meeting.abort()

        threads = [threading.Thread(target=one, args=(seat,), name=f"rank {seat.rank}") for seat in self.seats]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            first = next((error for error in errors if not isinstance(error, NotMet)), errors[0])
            for objects in self._open:
                objects.__exit__(type(first), first, first.__traceback__)
            raise first
        assert not self._open, "objects that no rank has closed"
        return results


class _OnStreams:
    """Each rank's calls on a stream of its own, forked from the current one and joined to it."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self.streams = [torch.cuda.Stream(device) for _ in range(num_ranks)]

    def __call__(self, call: Callable[[Any], Any], given: Sequence[Any]) -> list[Any]:
        current, found = torch.cuda.current_stream(), []
        for stream, one in zip(self.streams, given, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                found.append(call(one))
        for stream in self.streams:
            current.wait_stream(stream)
        return found


def run(world: Any, num_ranks: int, body: Callable[..., Any], *args: Any, streams: bool = False) -> list[Any]:
    """Call `body(seat, *args)` for every rank of a local world on the current GPU. Returns the results by rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    each = _OnStreams(num_ranks, device)

    class Start:
        def __init__(self, rank: int) -> None:
            torch.cuda.set_device(device)  # of this thread
            self._stream = torch.cuda.stream(each.streams[rank] if streams else None)

        def __enter__(self) -> None:
            self._stream.__enter__()

        def __exit__(self, *error: Any) -> None:
            self._stream.__exit__(*error)

    return Table(world, num_ranks, each, ep_a2a.connect, streams).run(body, args, Start)
