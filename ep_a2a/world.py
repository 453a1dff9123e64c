"""Which ranks there are: from the launcher, a ProcessGroup, an mpi4py communicator, or as threads of one process.

`resolve` turns whatever the caller has into a `Group`; `local` makes the ranks of one process.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ep_a2a.errors import EpError
from ep_a2a.layout import MAX_RANKS
from ep_a2a.rendezvous import Group, StoreGroup, no_word, of_communicator, of_process_group, one_line, tcp_store

__all__ = ["Group", "LocalRank", "LocalWorld", "local", "resolve"]

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
            because = "".join(f"; rank {r} failed with {one_line(self.failed[r])}" for r in lost[:1])
            missing = lost or missing
        raise no_word(rank, what, missing, time.monotonic() - started, because)


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
    notes = [f"raised by rank {rank} of a local world", *(f"rank {r}: {one_line(e)}" for r, e in errors[1:])]
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
        return local(1).ranks[0]  # the second: inside a Slurm allocation, but not started by srun
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


def _from_store(launcher: _Launcher, rank: int, size: int, env: Mapping[str, str]) -> Group:
    job, prefix = "", env.get("TORCHELASTIC_RESTART_COUNT", "0")
    host, port_text = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if launcher is _SLURM:
        job, step = env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")
        prefix = f"{job}.{step}"
        nodes = next((env[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if n in env), "")
        host = host or _first_host(nodes)
        if not port_text and job.isdigit() and step.isdigit():
            port_text = str(20000 + (131 * int(job) + int(step)) % 12000)
    if size > 1 and not (host and port_text.isdigit() and 0 < int(port_text) < 2**16):
        raise _confused(f"{launcher.name}: no address where ranks can meet: {host or 'no host'}:{port_text}", env)
    serve = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # there the agent holds the server
    open_store = tcp_store(host, int(port_text or 0), serve)
    return StoreGroup(
        rank,
        size,
        f"{launcher.name} at {host}:{port_text}",
        lambda timeout_s: PrefixStore(prefix, open_store(timeout_s)),
    )


def _first_host(nodes: str) -> str:
    """The first host of a Slurm list: `n1` of `n1,n2`, `gpu007` of `gpu[007-009,12],n1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""
