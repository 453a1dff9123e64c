"""How ranks meet on the host: a collective exchange with a deadline, in steps with keys.

store   at a torch.distributed store
mpi     through MPI

A meeting has a key: the connection that it belongs to and the number of its step there. Ranks meet in the same step
of the same connection or not at all, so a rank that skipped a step of one connection shifts no other. A rank that
leaves a connection early says so, and nobody waits for it. Every wait has a deadline, and the error names the ranks
that did not come.

`world.py` says which group a process belongs to, and has the group whose ranks are threads of one process.
"""

from __future__ import annotations

import abc
import copy
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ep_a2a.errors import EpError, RendezvousTimeout

GiveUp = Callable[[], "str | None"]  # polled in a wait: why nobody needs to be waited for any more


class Group(abc.ABC):
    """Ranks that meet on the host.

    rank  this rank, 0 to size - 1
    size  number of ranks
    name  where the group comes from, for messages
    """

    rank: int
    size: int
    name: str

    @abc.abstractmethod
    def all_gather(self, payload: bytes, what: str, timeout_s: float, give_up: GiveUp | None = None) -> list[bytes]:
        """Give every rank the payloads of all ranks.

        Collective: every rank makes the same calls in the same order. Payloads may differ in length; `what` names
        the caller's step in messages, and is compared.

        Returns the payloads by rank. Raises RendezvousTimeout, naming the ranks that did not arrive within
        `timeout_s` seconds, or at once where it is known that they will not, by what they said or by `give_up`; a
        rank that comes later than that may still see everybody and succeed. Raises EpError where `what` differs.
        """

    def barrier(self, what: str, timeout_s: float, give_up: GiveUp | None = None) -> None:
        """Wait until every rank is here. Collective. Raises as `all_gather` does."""
        self.all_gather(b"", what, timeout_s, give_up)

    @abc.abstractmethod
    def connection(self) -> Group:
        """The same ranks with steps of their own. Local; all ranks make their connections in the same order.

        A rank that failed to make one gets back in step in the next, whose first step waits for all ranks.
        """

    @abc.abstractmethod
    def leave(self, why: str = "") -> None:
        """This rank takes no further step in this connection. Local, within a second.

        why  told to ranks that still wait for this one there; empty where all have left by a collective step
        """


class Deadline:
    """A deadline, and ever longer naps until then."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.started = time.monotonic()
        self._nap_s = 0.0002

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def left(self) -> float:
        return max(0.0, self.timeout_s - self.seconds())

    def nap(self, longest_s: float = 0.01) -> bool:
        """Sleep a little; False, at once, where the deadline has passed."""
        left = self.left()
        if left <= 0:
            return False
        time.sleep(min(self._nap_s, left))
        self._nap_s = min(self._nap_s * 1.5, longest_s)
        return True


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 2 and 5`, `ranks 1, 2 and 5`, and the number of the rest where there are many."""
    found = [str(rank) for rank in ranks]
    if len(found) > 9:
        found = [*found[:8], f"{len(found) - 8} more"]
    if len(found) == 1:
        return f"rank {found[0]}"
    return f"ranks {', '.join(found[:-1])} and {found[-1]}"


def no_word(rank: int, what: str, missing: Iterable[int], seconds: float, because: str = "") -> RendezvousTimeout:
    """The error of `rank` for the ranks that did not come to its step `what`. Local."""
    return RendezvousTimeout(f"rank {rank}, {what}: no word from {_ranks(missing)} after {seconds:.1f} s{because}")


def one_line(error: BaseException) -> str:
    """Type and first line of an error. Local."""
    return f"{type(error).__name__}: {error}".strip(": ").split("\n", 1)[0]


def host_key() -> str:
    """What tells this host from others: its boot and its name. Local."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.uname().nodename}"


# ---- steps and connections ---------------------------------------------------------------------------------------


class Board(abc.ABC):
    """Where the ranks of a group leave word for each other; an object for each rank. Connection 0 is the group itself.

    newest  the last connection that this rank has begun
    """

    newest = 0

    @abc.abstractmethod
    def latest(self) -> int:
        """The last connection that any rank is known to have begun."""

    @abc.abstractmethod
    def begun(self, number: int) -> None:
        """Tell the others that this rank begins a connection."""

    @abc.abstractmethod
    def post(self, number: int, step: int, what: str, value: Any) -> None:
        """Bring `value` to a step."""

    @abc.abstractmethod
    def look(self, number: int, step: int, peer: int) -> tuple[str, Any] | None:
        """What `peer` has brought to a step: its name there, and the value."""

    @abc.abstractmethod
    def leave(self, number: int, why: str) -> None:
        """Take this rank out of a connection; tell the others where `why` is not empty."""

    @abc.abstractmethod
    def lost(self, number: int) -> dict[int, str]:
        """The ranks that have left a connection early, and why."""

    @abc.abstractmethod
    def nap(self, number: int, step: int, deadline: Deadline) -> bool:
        """Wait a little for news; False where the deadline has passed."""

    def unsent(self, number: int, step: int) -> list[int]:
        """Ranks that have yet to take what this one has brought."""
        return []

    @abc.abstractmethod
    def finish(self, number: int, step: int, complete: bool) -> None:
        """This rank is done with a step, to which all ranks came where it is `complete`."""

    def run(self, rank: int, what: str, deadline: Deadline, work: Callable[[], Any]) -> Any:
        """Call `work`, which uses this board. Raises RendezvousTimeout where the board does not answer in time."""
        return work()

    def begin(self) -> int:
        """The number of a new connection: behind all that were begun here, or abandoned anywhere."""
        latest = self.latest()
        self.newest = max(self.newest + 1, latest + (latest > 0 and bool(self.lost(latest))))
        self.begun(self.newest)
        return self.newest

    def follow(self, number: int) -> int:
        """Begin the connection to which others have gone on from `number`, in which somebody is missing."""
        self.leave(number, f"went on to connection {self.latest()}")
        self.newest = max(self.newest, self.latest())
        self.begun(self.newest)
        return self.newest


class BoardGroup(Group):
    """Ranks that meet at a board: the group itself, or a connection of it."""

    def __init__(self, rank: int, size: int, name: str, board: Board) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self._board = board
        self._number: int | None = 0  # None: a connection that is numbered in its first step
        self._step = 0

    def connection(self) -> BoardGroup:
        made = copy.copy(self)
        made._number, made._step = None, 0
        return made

    def leave(self, why: str = "") -> None:
        number = self._number
        if number and self.size > 1:
            with suppress(RendezvousTimeout):
                self._board.run(
                    self.rank, "leave", Deadline(0.5), lambda: self._board.leave(number, why and f"left with {why}")
                )

    def all_gather(self, payload: bytes, what: str, timeout_s: float, give_up: GiveUp | None = None) -> list[bytes]:
        return self._gather(payload, what, timeout_s, give_up)

    def _gather(self, value: Any, what: str, timeout_s: float, give_up: GiveUp | None = None) -> list[Any]:
        if self.size == 1:
            return [value]
        deadline = Deadline(timeout_s)
        self._step += 1
        found: list[Any] = self._board.run(
            self.rank, what, deadline, lambda: self._meet(self._step, value, what, deadline, give_up)
        )
        return found

    def _meet(self, step: int, value: Any, what: str, deadline: Deadline, give_up: GiveUp | None) -> list[Any]:
        board = self._board
        number = self._number = board.begin() if self._number is None else self._number
        board.post(number, step, what, value)
        found: list[Any] = []
        try:
            while len(found) < self.size:
                word = board.look(number, step, len(found))
                if word is not None:
                    found.append(self._checked(word, number, step, len(found), what))
                elif step == 1 and number and board.latest() > number:  # nobody who comes now will come here
                    number = self._number = board.follow(number)
                    board.post(number, step, what, value)
                    found.clear()
                else:
                    self._wait(number, step, what, len(found), deadline, give_up)
            while late := board.unsent(number, step):
                if not board.nap(number, step, deadline):
                    raise no_word(self.rank, what, late, deadline.seconds())
        except BaseException:
            board.finish(number, step, complete=False)
            raise
        board.finish(number, step, complete=True)
        return found

    def _checked(self, word: tuple[str, Any], number: int, step: int, peer: int, what: str) -> Any:
        if word[0] != what:
            raise EpError(
                f"rank {self.rank}, {what}: rank {peer} is elsewhere, in {word[0]!r} instead of {what!r} (step {step} "
                f"of connection {number}): not all ranks made the same calls"
            )
        return word[1]

    def _wait(self, number: int, step: int, what: str, first: int, deadline: Deadline, give_up: GiveUp | None) -> None:
        """Wait a little for the ranks from `first` on. Raises where they will not come, or are late."""
        board, because = self._board, ""
        lost = board.lost(number)
        missing = [p for p in range(first, self.size) if p in lost and board.look(number, step, p) is None]
        if missing:
            because = f"; rank {missing[0]} {lost[missing[0]]}"
        else:
            because = give_up() or "" if give_up else ""
            if not because and board.nap(number, step, deadline):
                return
            words = {p: board.look(number, step, p) for p in range(first, self.size)}
            for peer, word in words.items():
                if word is not None:
                    self._checked(word, number, step, peer, what)
            missing = [p for p, word in words.items() if word is None]
            if not missing:
                return  # in the last moment
            if because:
                because = f"; {because}"
            elif number and board.latest() > number:
                because = f"; this is connection {number}, others have begun connection {board.latest()}"
            elif number and (before := board.lost(number - 1)).get(missing[0]):
                because = f"; before, rank {missing[0]} {before[missing[0]]}"
        raise no_word(self.rank, what, missing, deadline.seconds(), because)
