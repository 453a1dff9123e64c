"""Ranks that meet on the host: who they are, how many, and a collective exchange of bytes with a deadline.

`resolve` turns whatever the caller has (nothing, a ProcessGroup, an mpi4py communicator, a rank of a local world) into
a `Group`. Every wait in a group has a deadline, and the error names the ranks that did not come.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ep_a2a.errors import EpError, RendezvousTimeout
from ep_a2a.layout import MAX_RANKS


class Group(abc.ABC):
    """Ranks that meet on the host. All methods are collective: every rank makes the same calls in the same order.

    rank  this rank, 0 to size - 1
    size  number of ranks
    name  where the group comes from, for messages
    """

    rank: int
    size: int
    name: str

    @abc.abstractmethod
    def all_gather(self, payload: bytes, what: str, timeout_s: float) -> list[bytes]:
        """Give every rank the payloads of all ranks.

        Collective. Payloads may differ in length; `what` names the caller's step in messages.

        Returns the payloads by rank. Raises RendezvousTimeout, naming the ranks that did not arrive within
        `timeout_s` seconds; a rank that comes later than that may still see everybody and succeed.
        """

    def barrier(self, what: str, timeout_s: float) -> None:
        """Wait until every rank is here. Collective. Raises as `all_gather` does."""
        self.all_gather(b"", what, timeout_s)


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 2 and 5`, `ranks 1, 2 and 5`, and the number of the rest where there are many."""
    found = [str(rank) for rank in ranks]
    if len(found) > 9:
        found = [*found[:8], f"{len(found) - 8} more"]
    if len(found) == 1:
        return f"rank {found[0]}"
    return f"ranks {', '.join(found[:-1])} and {found[-1]}"


def _no_word(rank: int, what: str, missing: Iterable[int], seconds: float, because: str = "") -> RendezvousTimeout:
    return RendezvousTimeout(f"rank {rank}, {what}: no word from {_ranks(missing)} after {seconds:.1f} s{because}")


# ---- ranks of one process ----------------------------------------------------------------------------------------


@dataclass
class _Slot:
    """What the ranks brought to one collective call, and how many of them have gone on."""

    values: dict[int, Any] = field(default_factory=dict)
    num_gone: int = 0


class _Meeting:
    """The memory that the ranks of a local world share: a slot for each collective call under way."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.calls = [0] * size  # of each rank, so far
        self.slots: dict[int, _Slot] = {}
        self.failed: dict[int, BaseException] = {}  # ranks whose function ended with an error: they will not come

    def restart(self) -> None:
        """Put all ranks in step; only while no rank runs."""
        with self.changed:
            self.calls = [max(self.calls)] * self.size
            self.slots.clear()
            self.failed.clear()

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            self.failed[rank] = error
            self.changed.notify_all()

    def gather(self, rank: int, value: Any, what: str, timeout_s: float) -> list[Any]:
        started = time.monotonic()
        with self.changed:
            call = self.calls[rank]
            self.calls[rank] += 1
            slot = self.slots.setdefault(call, _Slot())
            slot.values[rank] = value
            if len(slot.values) == self.size:
                self.changed.notify_all()
            self.changed.wait_for(
                lambda: len(slot.values) == self.size or any(r not in slot.values for r in self.failed), timeout_s
            )
            slot.num_gone += 1
            if slot.num_gone == self.size:
                del self.slots[call]
            missing = [r for r in range(self.size) if r not in slot.values]
            if not missing:
                return [slot.values[r] for r in range(self.size)]
            lost = [r for r in missing if r in self.failed]
            because = "".join(f"; rank {r} failed with {_line(self.failed[r])}" for r in lost[:1])
            missing = lost or missing
        raise _no_word(rank, what, missing, time.monotonic() - started, because)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip(": ").split("\n", 1)[0]


class LocalRank(Group):
    """One rank of a local world: a thread of this process."""

    def __init__(self, meeting: _Meeting, rank: int, device: str) -> None:
        self.rank = rank
        self.size = meeting.size
        self.name = f"local world of {meeting.size}"
        self.device = device
        self._meeting = meeting

    def all_gather(self, payload: bytes, what: str, timeout_s: float) -> list[bytes]:
        return self.gather_objects(payload, what, timeout_s)

    def gather_objects(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """`all_gather` for any object: the ranks share an address space, so nothing is copied. Collective."""
        return self._meeting.gather(self.rank, value, what, timeout_s)

    def __repr__(self) -> str:
        return f"LocalRank({self.rank} of {self.size})"


class LocalWorld:
    """Ranks of one process; `ranks[r]` is the group that rank r passes to `connect`."""

    def __init__(self, num_ranks: int, device: str) -> None:
        self._meeting = _Meeting(num_ranks)
        self._running = threading.Lock()
        self.device = device
        self.ranks: tuple[LocalRank, ...] = tuple(LocalRank(self._meeting, r, device) for r in range(num_ranks))

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(rank, *args)` for every rank, each in a thread of its own, and wait for all of them.

        Local. When a rank fails, ranks that wait for it in a host collective fail at once, the others go on to their
        own end or deadline; then the error that happened first is raised, with the others as notes.

        Returns the results by rank. Raises EpError where the world is running already, else what `fn` raised.
        """
        if not self._running.acquire(blocking=False):
            raise EpError("the ranks of this local world are running already: one `run` at a time")
        try:
            self._meeting.restart()
            results: list[Any] = [None] * len(self.ranks)
            errors: list[tuple[int, BaseException]] = []  # in the order in which they happened

            def one(rank: LocalRank) -> None:
                try:
                    results[rank.rank] = fn(rank, *args)
                except BaseException as error:  # SystemExit too: it is raised again in the caller's thread
                    errors.append((rank.rank, error))
                    self._meeting.fail(rank.rank, error)

            threads = [threading.Thread(target=one, args=(r,), name=f"rank {r.rank}", daemon=True) for r in self.ranks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._running.release()
        if errors:
            _raise_first(errors)
        return results

    def __repr__(self) -> str:
        return f"LocalWorld({len(self.ranks)}, {self.device!r})"


def _raise_first(errors: list[tuple[int, BaseException]]) -> None:
    rank, first = errors[0]
    notes = [f"raised by rank {rank} of a local world", *(f"rank {r}: {_line(e)}" for r, e in errors[1:])]
    vars(first)["__notes__"] = [*getattr(first, "__notes__", ()), *notes]  # add_note came with Python 3.11
    try:
        raise first
    finally:
        del first, errors


def local(num_ranks: int, device: str = "cpu") -> LocalWorld:
    """Make the ranks of a local world: `num_ranks` ranks as threads of this process.

    Local. num_ranks is 1 to 128; device is "cpu". Raises ValueError and TypeError.
    """
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
        raise TypeError(f"num_ranks must be an int, not {type(num_ranks).__name__}")
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"num_ranks={num_ranks}: must be 1 to {MAX_RANKS}")
    if torch.device(device).type != "cpu":
        raise ValueError(f"device={device!r}: the ranks of a local world run on 'cpu' so far")
    return LocalWorld(num_ranks, device)


# ---- which group -------------------------------------------------------------------------------------------------


def resolve(group: object | None) -> Group:
    """The group that `group` stands for."""
    if isinstance(group, Group):
        return group
    if group is None:
        return local(1).ranks[0]
    raise TypeError(f"group must be None or a Group, not {type(group).__name__}")
