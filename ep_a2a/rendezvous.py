"""How ranks meet on the host: a collective exchange of bytes with a deadline, at a torch store or through MPI.

Every wait in a group has a deadline, and the error names the ranks that did not come. `world.py` says which group a
process belongs to, and has the group whose ranks are threads of one process.
"""

from __future__ import annotations

import abc
import datetime
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ep_a2a.errors import RendezvousTimeout


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


class Deadline:
    """A deadline, and ever longer naps until then."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.started = time.monotonic()
        self._nap_s = 0.0002

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def nap(self, longest_s: float = 0.01) -> bool:
        """Sleep a little; False, at once, where the deadline has passed."""
        left = self.timeout_s - self.seconds()
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


# ---- ranks that meet at a torch store ----------------------------------------------------------------------------

_LINGER_AFTER_FAILURE_S = 1.0  # ranks that came a little later still learn who is missing
_LINGER_S = 10.0
_tcp_stores: dict[tuple[str, int], Store] = {}  # for the process's life: rank 0's holds the server
_tcp_stores_lock = threading.Lock()


class StoreGroup(Group):
    """Ranks that meet at a torch.distributed store, whatever the backend of the group that it came from.

    Keys of a group are `ep_a2a/<n>/<call>/<rank>`: n counts the groups that this rank has made at this store, so any
    number of groups may share one, as long as all ranks make them in the same order. The ranks that have read a
    call's payloads are counted under `gone`; rank 0 leaves last and deletes the keys, for two reasons: the store does
    not grow, and rank 0, whose process often holds the server, does not exit under a reader. A call that failed
    leaves its keys, as a late rank may want them; there too rank 0 waits a little, so that all learn who is missing.
    """

    def __init__(self, rank: int, size: int, name: str, open_store: Callable[[float], Store]) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self._open_store = open_store  # given seconds
        self._store: Store | None = None
        self._calls = 0

    def all_gather(self, payload: bytes, what: str, timeout_s: float) -> list[bytes]:
        if self.size == 1:
            return [payload]
        deadline = Deadline(timeout_s)
        self._calls += 1
        try:
            if self._store is None:
                store = PrefixStore("ep_a2a", self._open_store(timeout_s))
                self._store = PrefixStore(str(store.add(f"made/{self.rank}", 1)), store)
            return self._meet(PrefixStore(str(self._calls), self._store), payload, what, deadline)
        except RendezvousTimeout:
            raise
        except RuntimeError as error:  # what a store raises when its server is not there, or not any more
            raise RendezvousTimeout(
                f"rank {self.rank}, {what}: the store of {self.name} does not answer after {deadline.seconds():.1f} s "
                f"({one_line(error)})"
            ) from error

    def _meet(self, store: Store, payload: bytes, what: str, deadline: Deadline) -> list[bytes]:
        store.set(str(self.rank), payload)  # type: ignore[arg-type]  # the stub says str, bytes go as they are
        found = []
        for peer in range(self.size):
            while not store.check([str(peer)]):  # never a blocking wait: it would lock out the store's other users
                if not deadline.nap():
                    missing = [p for p in range(peer, self.size) if not store.check([str(p)])]
                    if missing:
                        self._leave(store, self.size - len(missing), _LINGER_AFTER_FAILURE_S)
                        raise no_word(self.rank, what, missing, deadline.seconds())
            found.append(store.get(str(peer)))
        if self._leave(store, self.size, _LINGER_S):
            for key in [*map(str, range(self.size)), "gone"]:
                store.delete_key(key)
        return found

    def _leave(self, store: Store, num_here: int, linger_s: float) -> bool:
        """Say that this rank is done with a call; rank 0 waits for the others that came, and says if they are done."""
        num_gone = store.add("gone", 1)
        linger = Deadline(linger_s)
        while self.rank == 0 and num_gone < num_here and linger.nap():
            num_gone = store.add("gone", 0)
        return self.rank == 0 and num_gone >= num_here


def tcp_store(host: str, port: int, serve: bool) -> Callable[[float], Store]:
    """How to reach the store at an address, once per process; `serve` where this rank holds the server."""

    def open_store(timeout_s: float) -> Store:
        with _tcp_stores_lock:
            if (host, port) not in _tcp_stores:
                timeout = datetime.timedelta(seconds=max(timeout_s, 1.0))
                _tcp_stores[host, port] = TCPStore(  # several in a process: torch's own may follow at this port
                    host, port, None, serve, timeout, wait_for_workers=False, multi_tenant=True
                )
            return _tcp_stores[host, port]

    return open_store


def of_process_group(group: dist.ProcessGroup) -> Group:
    """The group of a ProcessGroup. Raises ValueError where torch.distributed does not know it."""
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
    except KeyError:
        raise ValueError("group is a ProcessGroup that torch.distributed does not know, or not any more") from None
    return StoreGroup(group.rank(), group.size(), f"ProcessGroup {group.group_name!r}", lambda timeout_s: store)


# ---- ranks that meet through MPI ---------------------------------------------------------------------------------

_MPI_TAGS = 32767  # the standard's promise


class MpiGroup(Group):
    """Ranks of an mpi4py communicator.

    Messages travel over a duplicate of the communicator, made in the first call, after all ranks have shown up there:
    a program's own messages and ours never meet. All calls poll, from the thread that called, so a deadline holds and
    no level of thread support is needed.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        self._own: tuple[Any, Any] | None = None  # the duplicate and the request that makes it
        self._unfinished: list[Any] = []  # requests of calls that failed: their buffers must stay
        self._unread: list[tuple[Any, int, int]] = []  # what late ranks sent, or will: communicator, rank, tag
        self._calls = 0
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.name = f"mpi4py communicator {comm.Get_name() or 'without a name'}"

    def all_gather(self, payload: bytes, what: str, timeout_s: float) -> list[bytes]:
        if self.size == 1:
            return [payload]
        deadline = Deadline(timeout_s)
        self._calls += 1
        if self._own is None or not self._own[1].Test():
            # show up, in every call until there is a duplicate: whoever has one knows that all began to make it
            self._exchange(self._comm, b"", what, deadline, self._own and self._own[1])
            self._own = self._own or self._comm.Idup()
        duplicate, request = self._own
        while not request.Test():
            if not deadline.nap():
                raise RendezvousTimeout(
                    f"rank {self.rank}, {what}: a rank left while {self.name} was being duplicated, no word from it "
                    f"after {timeout_s:.1f} s"
                )
        found = self._exchange(duplicate, payload, what, deadline)
        self._tidy()
        return found

    def _tidy(self) -> None:
        """Finish what calls that failed have left behind: MPICH ends badly over a message that nobody received."""
        for comm, r, tag in [*self._unread]:
            if (message := comm.Improbe(r, tag, status := self._mpi.Status())) is not None:
                data = bytearray(status.Get_count(self._mpi.BYTE))
                self._unfinished.append(message.Irecv([data, self._mpi.BYTE]))
                self._unread.remove((comm, r, tag))
        self._unfinished = [request for request in self._unfinished if not request.Test()]

    def _exchange(self, comm: Any, payload: bytes, what: str, deadline: Deadline, instead: Any = None) -> list[bytes]:
        """Payloads by rank; or what there is of them as soon as the request `instead` is complete."""
        byte, tag, status = self._mpi.BYTE, self._calls % _MPI_TAGS, self._mpi.Status()
        peers = [r for r in range(self.size) if r != self.rank]
        sends = {r: comm.Isend([payload, byte], r, tag) for r in peers}
        receives: dict[int, tuple[bytearray, Any]] = {}
        while True:
            for r in peers:
                if r not in receives and (message := comm.Improbe(r, tag, status)) is not None:
                    data = bytearray(status.Get_count(byte))
                    receives[r] = data, message.Irecv([data, byte])
            missing = [r for r in peers if r not in receives or not receives[r][1].Test()]
            missing = missing or [r for r in peers if not sends[r].Test()]
            if not missing:
                return [payload if r == self.rank else bytes(receives[r][0]) for r in range(self.size)]
            enough = instead is not None and instead.Test()
            if enough or not deadline.nap(longest_s=0.002):
                self._unfinished += [*sends.values(), *(request for _, request in receives.values())]
                self._unread += [(comm, r, tag) for r in peers if r not in receives]
                if enough:
                    return []
                raise no_word(self.rank, what, missing, deadline.seconds())


_mpi_keyval: list[int] = []


def of_communicator(comm: Any) -> Group:
    """The group of a communicator: one for its life, kept as its attribute, so that calls are numbered once."""
    from mpi4py import MPI

    if comm == MPI.COMM_NULL:
        raise ValueError("group is MPI.COMM_NULL: this rank is not a member of the communicator")
    if comm.Is_inter():
        raise ValueError("group is an intercommunicator; pass one whose ranks are one group, such as its Merge()")
    if not _mpi_keyval:
        _mpi_keyval.append(MPI.Comm.Create_keyval())
    found = comm.Get_attr(_mpi_keyval[0])
    if not isinstance(found, MpiGroup):
        found = MpiGroup(comm)
        comm.Set_attr(_mpi_keyval[0], found)
    return found
