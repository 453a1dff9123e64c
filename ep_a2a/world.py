"""Which ranks there are: from the launcher, a ProcessGroup, an mpi4py communicator, or as threads of one process.

`resolve` turns whatever the caller has into a `Group`; `LocalWorld` has the ranks of one process.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ep_a2a.errors import EpError, RendezvousTimeout
from ep_a2a.rendezvous import Board, BoardGroup, Deadline, Group, one_line
from ep_a2a.rendezvous.mpi import of_communicator
from ep_a2a.rendezvous.store import StoreGroup, of_process_group, tcp_store

__all__ = ["Group", "LocalRank", "LocalWorld", "resolve"]

# ---- ranks of one process ----------------------------------------------------------------------------------------


class _Meeting:
    """The memory that the ranks of a local world share; `changed` is told of a step that is complete, and of news."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.words: dict[tuple[int, int], dict[int, tuple[str, Any]]] = {}  # by connection and step, then by rank
        self.num_gone: dict[tuple[int, int], int] = {}  # ranks that have gone on from there
        self.left: dict[int, dict[int, str]] = {}  # by connection and rank: why it left, empty where all did
        self.latest = 0
        self.num_news = 0
        self.failed: dict[int, str] = {}  # ranks whose function ended with an error, or was cut off: they will not come

    def tell(self) -> None:
        """Wake the ranks that wait, as somebody failed, left or began a connection; with `changed` held."""
        self.num_news += 1
        self.changed.notify_all()

    def forget(self, number: int) -> None:
        """Drop the steps of a connection; with `changed` held."""
        for key in [key for key in self.words if key[0] == number]:
            del self.words[key]
        for key in [key for key in self.num_gone if key[0] == number]:
            del self.num_gone[key]

    def fail(self, ranks: Iterable[int], error: BaseException) -> None:
        with self.changed:
            self.failed.update(dict.fromkeys(ranks, f"failed with {one_line(error)}"))
            self.tell()


class _LocalBoard(Board):
    """A rank's side of a meeting."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.meeting = meeting
        self._rank = rank
        self._num_seen = 0  # of the news

    def latest(self) -> int:
        return self.meeting.latest

    def begun(self, number: int) -> None:
        with self.meeting.changed:
            if number > self.meeting.latest:
                self.meeting.latest = number
                self.meeting.tell()

    def post(self, number: int, step: int, what: str, value: Any) -> None:
        meeting = self.meeting
        with meeting.changed:
            if self._rank in meeting.failed:  # and yet it is here
                raise RendezvousTimeout(
                    f"rank {self._rank}, {what}: the run of the local world that this rank is of "
                    f"{meeting.failed[self._rank]}, its ranks do not meet any more"
                )
            words = meeting.words.setdefault((number, step), {})
            words[self._rank] = what, value
            if len(words) == meeting.size:
                meeting.changed.notify_all()

    def look(self, number: int, step: int, peer: int) -> tuple[str, Any] | None:
        return self.meeting.words.get((number, step), {}).get(peer)

    def leave(self, number: int, why: str) -> None:
        meeting = self.meeting
        with meeting.changed:
            left = meeting.left.setdefault(number, {})
            left.setdefault(self._rank, why)
            if why:
                meeting.tell()
            if len(left) == meeting.size:
                meeting.forget(number)
                for old in [n for n in meeting.left if n < number or not any(left.values())]:
                    if len(meeting.left[old]) == meeting.size:
                        del meeting.left[old]

    def lost(self, number: int) -> dict[int, str]:
        with self.meeting.changed:
            self._num_seen = self.meeting.num_news
            return {r: why for r, why in self.meeting.left.get(number, {}).items() if why} | self.meeting.failed

    def nap(self, number: int, step: int, deadline: Deadline) -> bool:
        meeting, words = self.meeting, self.meeting.words.get((number, step), {})
        with meeting.changed:
            meeting.changed.wait_for(
                lambda: len(words) == meeting.size or meeting.num_news != self._num_seen, min(deadline.left(), 0.1)
            )
        return deadline.left() > 0

    def finish(self, number: int, step: int, complete: bool) -> None:
        meeting, key = self.meeting, (number, step)
        with meeting.changed:
            meeting.num_gone[key] = meeting.num_gone.get(key, 0) + 1
            if meeting.num_gone[key] == meeting.size:
                meeting.words.pop(key, None)
                del meeting.num_gone[key]


class LocalRank(BoardGroup):
    """One rank of a local world: a thread of this process."""

    def __init__(self, meeting: _Meeting, rank: int, device: str | None) -> None:
        super().__init__(rank, meeting.size, f"local world of {meeting.size}", _LocalBoard(meeting, rank))
        self._meeting = meeting
        self.device = device

    @property
    def connected_in(self) -> tuple[object, int | None]:
        """What tells this connection of this world from all others."""
        return self._meeting, self._number

    def gather_objects(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """`all_gather` for any object: the ranks share an address space, so nothing is copied. Collective."""
        return self._gather(value, what, timeout_s)

    def __repr__(self) -> str:
        return f"LocalRank({self.rank} of {self.size})"


class LocalWorld:
    """Ranks of one process; `ranks[r]` is the group that rank r passes to `connect`. None as device: not decided."""

    def __init__(self, num_ranks: int, device: str | None) -> None:
        self._running = threading.Lock()
        self.device = device
        self._start_afresh(num_ranks)

    def _start_afresh(self, num_ranks: int) -> None:
        self._meeting = _Meeting(num_ranks)
        self.ranks: tuple[LocalRank, ...] = tuple(LocalRank(self._meeting, r, self.device) for r in range(num_ranks))

    def _restart(self) -> None:
        """Put all ranks in step; only while no rank runs."""
        last = max(rank._step for rank in self.ranks)
        for rank in self.ranks:
            rank._step = last
        with self._meeting.changed:
            self._meeting.forget(0)
            self._meeting.failed.clear()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(rank, *args)` for every rank, each in a thread of its own, and wait for all of them.

        Local. When a rank fails, ranks that wait for it in a host collective fail at once, the others go on to their
        own end or deadline; then the error that happened first is raised, with the others as notes. Where the wait
        itself is interrupted (Ctrl-C), threads may go on: they are cut off, every host collective of theirs fails,
        `ranks` are new ones, and objects that were connected before can only be closed.

        Returns the results by rank. Raises EpError where the world is running already, else what `fn` raised.
        """
        if not self._running.acquire(blocking=False):
            raise EpError("the ranks of this local world are running already: one `run` at a time")
        try:
            return self._run(fn, args)
        finally:
            self._running.release()

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        self._restart()
        meeting = self._meeting
        results: list[Any] = [None] * len(self.ranks)
        errors: list[tuple[int, BaseException]] = []  # in the order in which they happened

        def one(rank: LocalRank) -> None:
            try:
                self._enter(rank.rank)
                results[rank.rank] = fn(rank, *args)
            except BaseException as error:  # SystemExit too: it is raised again in the caller's thread
                errors.append((rank.rank, error))
                meeting.fail([rank.rank], error)

        threads = [threading.Thread(target=one, args=(r,), name=f"rank {r.rank}", daemon=True) for r in self.ranks]
        started = 0
        try:
            try:
                for thread in threads:
                    thread.start()
                    started += 1
            except RuntimeError as error:  # no more threads
                errors.insert(0, (started, error))
                meeting.fail(range(started, len(threads)), error)
            for thread in threads[:started]:
                while thread.is_alive():
                    thread.join(0.5)  # Ctrl-C just before a wait without end would be seen only behind it
        except BaseException as error:
            meeting.fail(range(len(threads)), error)
            self._start_afresh(len(threads))
            raise
        if errors:
            _raise_first(errors)
        return results

    def _enter(self, rank: int) -> None:
        """What a rank's thread needs before it runs."""

    def __repr__(self) -> str:
        return f"LocalWorld({len(self.ranks)}, {self.device!r})"


def _raise_first(errors: list[tuple[int, BaseException]]) -> None:
    rank, first = errors[0]
    notes = [f"raised by rank {rank} of a local world", *(f"rank {r}: {one_line(e)}" for r, e in errors[1:])]
    vars(first)["__notes__"] = [*getattr(first, "__notes__", ()), *notes]  # add_note came with Python 3.11
    try:
        raise first
    finally:
        del first, errors


# ---- which group -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Launcher:
    """A launcher and the two variables by which it tells a process its rank and the number of ranks."""

    name: str
    rank: str
    size: str


_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE")
_OPEN_MPI = _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_MPICH = _Launcher("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE")
_SLURM = _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS")
_LAUNCHERS = (_TORCHRUN, _OPEN_MPI, _MPICH, _SLURM)  # in this order
_OTHERS = ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")


def resolve(group: object | None) -> Group:
    """The group that `group` stands for. Local: nobody is waited for, except by MPI's own initialisation.

    A Group is itself; a torch ProcessGroup (a sub-group too) meets at its own store, whatever its backend; an mpi4py
    communicator (a Split one too) meets through MPI. None stands for all ranks that the launcher started, by the
    first of these that applies:

    1. torch.distributed is initialised: its default group.
    2. torchrun: RANK, WORLD_SIZE; they meet at MASTER_ADDR, MASTER_PORT.
    3. Open MPI: OMPI_COMM_WORLD_RANK, _SIZE; MPICH and Intel MPI: PMI_RANK, PMI_SIZE. They meet at MASTER_ADDR,
       MASTER_PORT where both are set, else through mpi4py.
    4. Slurm: SLURM_PROCID, SLURM_NTASKS. They meet at MASTER_ADDR, by default the first host of the step, and
       MASTER_PORT, by default 20000 + (131 * job id + step id) % 12000.
    5. Nothing of all that: this process is a world of one rank.

    Raises EpError, listing what was found, where the environment is half set or contradicts itself; ValueError where
    this rank is not a member of the group; TypeError for anything else.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        if dist.is_initialized():
            return resolve(dist.group.WORLD)
        return _from_environment(os.environ)
    if isinstance(group, LocalWorld):
        raise TypeError("group is a local world: pass one of its ranks, world.ranks[r]; world.run gives each its own")
    if isinstance(group, dist.ProcessGroup):
        return of_process_group(group)
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group is what torch.distributed.new_group gives a rank that is not a member")
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(group, mpi.Comm):
        return of_communicator(group)
    raise TypeError(
        f"group must be None, a ProcessGroup, an mpi4py communicator or a rank of a local world, "
        f"not {type(group).__name__}"
    )


def _from_environment(env: Mapping[str, str]) -> Group:
    launcher = next((one for one in _LAUNCHERS if one.rank in env or one.size in env), None)
    if launcher is None or (launcher is _SLURM and _SLURM.rank not in env and env[_SLURM.size] == "1"):
        return LocalWorld(1, None).ranks[0]  # the second: inside a Slurm allocation, but not started by srun
    rank, size = _rank_and_size(launcher, env)
    has_address = "MASTER_ADDR" in env and "MASTER_PORT" in env
    if launcher in (_OPEN_MPI, _MPICH) and not has_address:
        return _from_mpi(launcher, rank, size, env)
    if launcher is _TORCHRUN and not has_address and size > 1:
        raise _confused("torchrun: RANK and WORLD_SIZE need MASTER_ADDR and MASTER_PORT", env)
    return _from_store(launcher, rank, size, env)


def _rank_and_size(launcher: _Launcher, env: Mapping[str, str]) -> tuple[int, int]:
    hint = "; in an allocation, start ranks with srun" if launcher is _SLURM else ""
    for name in (launcher.rank, launcher.size):
        if name not in env:
            raise _confused(f"{launcher.name}: {name} is missing{hint}", env)
    try:
        rank, size = int(env[launcher.rank]), int(env[launcher.size])
    except ValueError:
        raise _confused(f"{launcher.name}: {launcher.rank} and {launcher.size} must be numbers", env) from None
    if not 0 <= rank < size:
        raise _confused(f"{launcher.name}: rank {rank} is none of {size} ranks", env)
    if launcher is _SLURM and env.get("SLURM_STEP_NUM_TASKS", str(size)) != str(size):
        raise _confused(f"Slurm: SLURM_NTASKS is {size}, but the step has other tasks{hint}", env)
    return rank, size


def _is_number(text: str) -> bool:
    """Is it a number in plain digits, and a short one? `int` and `isdigit` take more, and not the same."""
    return re.fullmatch("[0-9]{1,18}", text) is not None


def _confused(what: str, env: Mapping[str, str]) -> EpError:
    names = [name for one in _LAUNCHERS for name in (one.rank, one.size)]
    found = [f"{name}={env[name]}" for name in (*names, *_OTHERS) if name in env]
    return EpError(f"{what}. Found {', '.join(found)}. Set or unset the variables, or pass a group to connect")


def _from_mpi(launcher: _Launcher, rank: int, size: int, env: Mapping[str, str]) -> Group:
    try:
        from mpi4py import MPI
    except ImportError as error:
        if (env.get(_SLURM.rank), env.get(_SLURM.size)) == (str(rank), str(size)):
            return _from_store(_SLURM, rank, size, env)  # srun with its PMI plug-in
        raise _confused(f"{launcher.name}: needs mpi4py ({error}), or MASTER_ADDR and MASTER_PORT", env) from error
    found = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if found != (rank, size):
        raise _confused(
            f"{launcher.name}: rank {rank} of {size} by the environment, {found[0]} of {found[1]} by mpi4py, which "
            f"was built for another MPI ({MPI.Get_library_version().splitlines()[0].strip()})",
            env,
        )
    return of_communicator(MPI.COMM_WORLD)


_of_launchers: dict[tuple[str, str, bool, int, int], StoreGroup] = {}  # for the process's life: calls are numbered once


def _from_store(launcher: _Launcher, rank: int, size: int, env: Mapping[str, str]) -> Group:
    job, prefix = "", env.get("TORCHELASTIC_RESTART_COUNT", "0")
    host, port_text = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if launcher is _SLURM:
        job, step = env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")
        prefix = f"{job}.{step}"
        nodes = next((env[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if n in env), "")
        host = host or _first_host(nodes)
        if not port_text and _is_number(job) and _is_number(step):
            port_text = str(20000 + (131 * int(job) + int(step)) % 12000)
    port = int(port_text or 0) if _is_number(port_text or "0") else -1
    if port < 0 or (size > 1 and not (host and 0 < port < 2**16)):
        raise _confused(f"{launcher.name}: no address where ranks can meet: {host or 'no host'}:{port_text}", env)
    serve = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # there the agent holds the server
    open_store = tcp_store(host, port, serve)
    name = f"{launcher.name} at {host}:{port_text}"
    key = (name, prefix, serve, rank, size)
    if key not in _of_launchers:
        _of_launchers[key] = StoreGroup(rank, size, name, lambda timeout_s: PrefixStore(prefix, open_store(timeout_s)))
    return _of_launchers[key]


def _first_host(nodes: str) -> str:
    """The first host of a Slurm list: `n1` of `n1,n2`, `gpu007` of `gpu[007-009,12],n1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""
