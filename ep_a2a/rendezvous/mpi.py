"""Ranks that meet through MPI: an mpi4py communicator."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ep_a2a.errors import EpError, RendezvousTimeout
from ep_a2a.rendezvous import Board, BoardGroup, Deadline, Group, no_word

_SHOW_UP_TAG = 32767  # the largest that the standard promises
_HEAD = struct.Struct("<qqq")  # connection, step, bytes of its name; step -1: left, and why
_LEFT = -1


class _MpiBoard(Board):
    """Words as messages between the ranks of an mpi4py communicator, kept by their keys as they come.

    Messages travel over a duplicate of the communicator, made in the first call, after all ranks have shown up there:
    a program's own messages and ours never meet. All calls poll, from the thread that called, so a deadline holds and
    no level of thread support is needed.
    """

    def __init__(self, comm: Any, name: str) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        self._name = name
        self._rank = comm.Get_rank()
        self._peers = [r for r in range(comm.Get_size()) if r != self._rank]
        self._here: set[int] = set()  # who has shown up
        self._own: tuple[Any, Any] | None = None  # the duplicate and the request that makes it
        self._freed = False
        self._failed = False  # a message may be under way that nobody awaits
        self._sends: list[tuple[int, int, int, Any]] = []  # connection, step, to whom, request
        self._receives: list[tuple[int, bytearray, Any]] = []
        self._open = {0}  # connections that this rank takes part in
        self._seen = 0  # the last connection that a peer has spoken of
        self._words: dict[tuple[int, int, int], tuple[str, bytes]] = {}
        self._left: dict[int, dict[int, str]] = {}

    def run(self, rank: int, what: str, deadline: Deadline, work: Callable[[], Any]) -> Any:
        if self._freed:
            raise EpError(f"rank {rank}, {what}: {self._name} was freed")
        try:
            self._duplicate(rank, what, deadline)
            return work()
        except BaseException:
            self._failed = True
            raise

    def _duplicate(self, rank: int, what: str, deadline: Deadline) -> None:
        """Show up, once; with all ranks here, make the duplicate, or go on making it."""
        if self._own is None:
            if not self._sends:
                byte = self._mpi.BYTE
                self._sends = [(0, 0, r, self._comm.Isend([b"", byte], r, _SHOW_UP_TAG)) for r in self._peers]
            while missing := [r for r in self._peers if not self._has_shown_up(r)]:
                if not deadline.nap(longest_s=0.002):
                    raise no_word(rank, what, missing, deadline.seconds())
            self._own = self._comm.Idup()
        while not self._own[1].Test():
            if not deadline.nap(longest_s=0.002):
                raise RendezvousTimeout(
                    f"rank {rank}, {what}: a rank left while {self._name} was being duplicated, no word from it "
                    f"after {deadline.timeout_s:.1f} s"
                )

    def _has_shown_up(self, peer: int) -> bool:
        if peer not in self._here:
            message = self._comm.Improbe(peer, _SHOW_UP_TAG)
            if message is not None:
                message.Recv([bytearray(), self._mpi.BYTE])
                self._here.add(peer)
        return peer in self._here

    def free(self) -> None:
        """Give up the duplicate, where no message can be under way. With the communicator, so on all ranks."""
        self._freed = True
        if self._own is not None and self._own[1].Test() and not self._failed:
            self._progress()
            if not self._sends and not self._receives:
                self._own[0].Free()

    def _send(self, number: int, step: int, what: str, payload: bytes) -> None:
        assert self._own is not None  # `run` has made it
        text = what.encode()
        message = _HEAD.pack(number, step, len(text)) + text + payload
        for r in self._peers:
            self._sends.append((number, step, r, self._own[0].Isend([message, self._mpi.BYTE], r, 0)))

    def _progress(self) -> None:
        """Take every message that is here; drop the requests that are done."""
        assert self._own is not None
        status, byte = self._mpi.Status(), self._mpi.BYTE
        while True:
            message = self._own[0].Improbe(self._mpi.ANY_SOURCE, 0, status)
            if message is None:
                break
            data = bytearray(status.Get_count(byte))
            self._receives.append((status.Get_source(), data, message.Irecv([data, byte])))
        waiting = []
        for source, data, request in self._receives:
            if request.Test():
                self._take(source, bytes(data))
            else:
                waiting.append((source, data, request))
        self._receives = waiting
        self._sends = [one for one in self._sends if not one[3].Test()]

    def _take(self, source: int, message: bytes) -> None:
        number, step, num_bytes = _HEAD.unpack_from(message)
        self._seen = max(self._seen, number)
        if number not in self._open and number <= self.newest:
            return  # of a connection that this rank has left
        text = message[_HEAD.size : _HEAD.size + num_bytes].decode()
        if step == _LEFT:
            self._left.setdefault(number, {})[source] = text
        else:
            self._words[number, step, source] = text, message[_HEAD.size + num_bytes :]

    def latest(self) -> int:
        self._progress()
        return max(self.newest, self._seen)

    def begun(self, number: int) -> None:
        self._open.add(number)
        for key in [key for key in self._words if key[0] < number and key[0] not in self._open]:
            del self._words[key]
        for old in [old for old in self._left if old < number - 1 and old not in self._open]:
            del self._left[old]

    def post(self, number: int, step: int, what: str, value: Any) -> None:
        self._words[number, step, self._rank] = what, value
        self._send(number, step, what, value)

    def look(self, number: int, step: int, peer: int) -> tuple[str, Any] | None:
        word = self._words.get((number, step, peer))
        if word is None:
            self._progress()
        return word or self._words.get((number, step, peer))

    def leave(self, number: int, why: str) -> None:
        if why:
            self._failed = True
            self._send(number, _LEFT, why, b"")
        self._open.discard(number)
        for key in [key for key in self._words if key[0] == number]:
            del self._words[key]
        self._progress()

    def lost(self, number: int) -> dict[int, str]:
        return self._left.get(number, {})

    def nap(self, number: int, step: int, deadline: Deadline) -> bool:
        return deadline.nap(longest_s=0.002)

    def unsent(self, number: int, step: int) -> list[int]:
        self._progress()
        return [to for n, s, to, _ in self._sends if (n, s) == (number, step)]

    def finish(self, number: int, step: int, complete: bool) -> None:
        for rank in [self._rank, *self._peers] if complete else []:
            self._words.pop((number, step, rank), None)


class MpiGroup(BoardGroup):
    """Ranks of an mpi4py communicator."""

    def __init__(self, comm: Any) -> None:
        name = f"mpi4py communicator {comm.Get_name() or 'without a name'}"
        board = _MpiBoard(comm, name)
        super().__init__(comm.Get_rank(), comm.Get_size(), name, board)
        self.free = board.free


_mpi_keyval: list[int] = []


def of_communicator(comm: Any) -> Group:
    """The group of a communicator: one for its life, kept as its attribute, so that calls are numbered once."""
    from mpi4py import MPI

    if comm == MPI.COMM_NULL:
        raise ValueError("group is MPI.COMM_NULL: this rank is not a member of the communicator")
    if comm.Is_inter():
        raise ValueError("group is an intercommunicator; pass one whose ranks are one group, such as its Merge()")
    if not _mpi_keyval:
        _mpi_keyval.append(MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, group: group.free()))
    found = comm.Get_attr(_mpi_keyval[0])
    if not isinstance(found, MpiGroup):
        found = MpiGroup(comm)
        comm.Set_attr(_mpi_keyval[0], found)
    return found
