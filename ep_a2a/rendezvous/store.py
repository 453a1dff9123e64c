"""Ranks that meet at a torch.distributed store: the launcher's, or that of a ProcessGroup."""

from __future__ import annotations

import datetime
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ep_a2a.errors import EpError, RendezvousTimeout
from ep_a2a.rendezvous import Board, BoardGroup, Deadline, Group, one_line

_LINGER_AFTER_FAILURE_S = 1.0  # ranks that came a little later still learn who is missing
_LINGER_S = 10.0
_PIECE_BYTES = 1 << 22  # of what a rank brings, in one message: a TCPStore breaks off above 8 MiB
_SILENCE_S = 1.0  # how long after the deadline one answer of a store is waited for
_tcp_stores: dict[tuple[str, int], Store] = {}  # for the process's life: rank 0's holds the server
_tcp_stores_lock = threading.Lock()
_of_process_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, StoreGroup] = weakref.WeakKeyDictionary()


class _Call:
    """Work in a thread of its own, which may hang in a store."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.asked: float | None = None  # when the store was asked what it has not answered yet
        self.abandoned = False

    def is_stuck(self, silence_s: float) -> bool:
        asked = self.asked
        return asked is not None and time.monotonic() - asked > silence_s


class _StoreBoard(Board):
    """Words as keys of a store.

    A group's keys begin with `ep_a2a/<n>`: n counts the groups that this rank has made at this store, so any number
    of groups may share one, as long as all ranks make them in the same order. `<connection>/<step>/<rank>` is what a
    rank brought. The ranks that have read a step are counted under `gone`; rank 0 leaves last and deletes the keys,
    for two reasons: the store does not grow, and rank 0, whose process often holds the server, does not exit under a
    reader. A step that failed leaves its keys, as a late rank may want them; there too rank 0 waits a little, so that
    all learn who is missing.

    A store that has stopped does not even answer a question that must not block, so all calls are made in a thread
    that can be left behind.
    """

    def __init__(self, rank: int, size: int, name: str, open_store: Callable[[float], Store]) -> None:
        self._rank = rank
        self._size = size
        self._name = name
        self._open_store = open_store  # given seconds
        self._store: Store | None = None
        self._here = threading.local()
        self._num_pieces: dict[str, int] = {}  # of what was seen and not deleted yet, by key

    def run(self, rank: int, what: str, deadline: Deadline, work: Callable[[], Any]) -> Any:
        call = _Call()

        def body() -> None:
            self._here.call = call
            try:
                if self._store is None:
                    self._store = self._bounded(lambda: self._open(deadline.timeout_s))
                call.result = work()
            except BaseException as error:
                call.error = error
            call.done.set()

        try:
            threading.Thread(target=body, name=f"ep_a2a, {what}", daemon=True).start()
        except RuntimeError:  # no more threads, as at exit: then nothing bounds the wait for an answer
            body()
        silence_s = min(_SILENCE_S, max(deadline.timeout_s, 0.1))
        try:
            while not call.done.wait(max(deadline.left(), 0.05)):
                if call.is_stuck(silence_s):
                    break
        finally:
            call.abandoned = True  # harmless where it is done
        error = call.error
        if call.done.is_set() and error is None:
            return call.result
        if error is not None and (isinstance(error, EpError) or not isinstance(error, RuntimeError)):
            raise error
        cause = f" ({one_line(error)})" if error else ""  # a RuntimeError: the server is not there, or not any more
        raise RendezvousTimeout(
            f"rank {rank}, {what}: the store of {self._name} does not answer after {deadline.seconds():.1f} s{cause}"
        ) from error

    def _bounded(self, ask: Callable[[], Any]) -> Any:
        """The answer of the store, in the thread of a call."""
        call: _Call = self._here.call
        if call.abandoned:
            raise RendezvousTimeout("nobody waits for this any more")
        call.asked = time.monotonic()
        try:
            return ask()
        finally:
            call.asked = None

    def _open(self, timeout_s: float) -> Store:
        store = PrefixStore("ep_a2a", self._open_store(timeout_s))
        return PrefixStore(str(store.add(f"made/{self._rank}", 1)), store)

    def _ask(self, method: str, *args: Any) -> Any:
        return self._bounded(lambda: getattr(self._store, method)(*args))

    def latest(self) -> int:
        return int(self._ask("compare_set", "latest", "", "0"))  # reads, and never waits

    def begun(self, number: int) -> None:
        latest = self.latest()
        while latest < number:
            latest = int(self._ask("compare_set", "latest", str(latest), str(number)))

    def post(self, number: int, step: int, what: str, value: Any) -> None:
        key = f"{number}/{step}/{self._rank}"
        pieces = [value[i : i + _PIECE_BYTES] for i in range(0, len(value), _PIECE_BYTES)]
        for i, piece in enumerate(pieces):
            self._ask("set", f"{key}/{i}", piece)
        self._ask("set", key, f"{len(pieces)} {what}")  # last: who sees it finds the pieces

    def look(self, number: int, step: int, peer: int) -> tuple[str, Any] | None:
        key = f"{number}/{step}/{peer}"
        if not self._ask("check", [key]):  # never a blocking wait: it would lock out the store's other users
            return None
        num_pieces, _, what = self._ask("get", key).decode().partition(" ")
        self._num_pieces[key] = int(num_pieces)
        return what, b"".join(self._ask("get", f"{key}/{i}") for i in range(int(num_pieces)))

    def leave(self, number: int, why: str) -> None:
        if why:
            self._ask("set", f"{number}/left/{self._rank}", why)
            self._ask("set", f"{number}/left", "")

    def lost(self, number: int) -> dict[int, str]:
        if not number or not self._ask("check", [f"{number}/left"]):
            return {}
        keys = {rank: f"{number}/left/{rank}" for rank in range(self._size)}
        return {r: self._ask("get", key).decode() for r, key in keys.items() if self._ask("check", [key])}

    def nap(self, number: int, step: int, deadline: Deadline) -> bool:
        return deadline.nap()

    def finish(self, number: int, step: int, complete: bool) -> None:
        keys = [f"{number}/{step}/{rank}" for rank in range(self._size)]
        gone = f"{number}/{step}/gone"
        num_here = self._size if complete else 0 if self._rank else sum(self._ask("check", [key]) for key in keys)
        num_gone = self._ask("add", gone, 1)
        linger = Deadline(_LINGER_S if complete else _LINGER_AFTER_FAILURE_S)
        while self._rank == 0 and num_gone < num_here and linger.nap():
            num_gone = self._ask("add", gone, 0)
        pieces = [f"{key}/{i}" for key in keys for i in range(self._num_pieces.pop(key, 0))]
        if self._rank == 0 and num_gone >= self._size:
            for key in [*keys, *pieces, gone]:
                self._ask("delete_key", key)


class StoreGroup(BoardGroup):
    """Ranks that meet at a torch.distributed store, whatever the backend of the group that it came from."""

    def __init__(self, rank: int, size: int, name: str, open_store: Callable[[float], Store]) -> None:
        super().__init__(rank, size, name, _StoreBoard(rank, size, name, open_store))


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
    """The group of a ProcessGroup: one for its life, so that calls are numbered once.

    Raises ValueError where torch.distributed does not know it.
    """
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
    except KeyError:
        raise ValueError("group is a ProcessGroup that torch.distributed does not know, or not any more") from None
    if group not in _of_process_groups:
        name = f"ProcessGroup {group.group_name!r}"
        _of_process_groups[group] = StoreGroup(group.rank(), group.size(), name, lambda timeout_s: store)
    return _of_process_groups[group]
