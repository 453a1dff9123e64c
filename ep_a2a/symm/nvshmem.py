"""Symmetric memory between processes on GPUs, through NVSHMEM. The only file that knows nvshmem4py.

1. Ranks compare what they see: packages, GPU, whether NVSHMEM is initialised, and by whom. If it is not, they
   initialise it over their group, which then has all processes (PEs) that it will ever have.
2. NVSHMEM's own allocation is collective over all PEs and blocks, so it is done rarely: a heap of the size that
   `reserve` asks for, after which there is no more; without `reserve` each `connect` of all PEs that finds no room
   allocates another. Heaps are never freed, and NVSHMEM is never finalised: a rank may be dead by then.
3. A connection takes a part of a heap without a collective call. Ranks tell each other where theirs begins.

Before each call of NVSHMEM in which all PEs have to meet, they meet here, with a deadline; if it then does not return,
a watchdog ends the process with a sentence.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ep_a2a.errors import ClosedError, EpError, SymmetricMemoryError
from ep_a2a.layout import REGION_ALIGN_BYTES, Kind, round_up
from ep_a2a.rendezvous import Group, host_key
from ep_a2a.symm.base import SymmetricMemory, mapped_bytes, tell

_MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED
_HANG_EXIT_CODE = 70


class _Heap:
    """Memory of this PE at one symmetric address; `taken` has the first and last byte + 1 of its parts, in order."""

    def __init__(self, base: int, num_bytes: int) -> None:
        self.base = base
        self.num_bytes = num_bytes
        self.taken: list[tuple[int, int]] = []

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Where a part could begin, and how long it could be."""
        start = 0
        for first, end in [*self.taken, (self.num_bytes, self.num_bytes)]:
            if first > start:
                yield start, first - start
            start = end


class _Part:
    """A part of a heap, as an array; given back when the last tensor on it is gone, if it is not `kept` by then."""

    def __init__(self, heap: _Heap, first: int, num_bytes: int) -> None:
        self._heap, self._span, self.kept = heap, (first, first + round_up(num_bytes, REGION_ALIGN_BYTES)), True
        insort(heap.taken, self._span)  # in place: another thread may just give one back
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (heap.base + first, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if not self.kept:
            self._heap.taken.remove(self._span)


_heaps: list[_Heap] = []  # in the order of allocation, which is collective: the same on all PEs
_taking = threading.Lock()
_reserved_bytes = 0  # what `reserve` was asked for in all


class NvshmemMemory(SymmetricMemory):
    """The regions of a group's ranks, as one of them sees them."""

    def __init__(self, part: _Part, rank: int, bytes_per_rank: int, bases: list[int], kind: Kind) -> None:
        self.kind = kind
        self.bytes_per_rank = bytes_per_rank
        self.peer_bases = tuple(bases)
        self.base = self.peer_bases[rank]
        self._part: _Part | None = part
        self._region: torch.Tensor | None = torch.as_tensor(part, device=torch.cuda.current_device())
        if self._region.data_ptr() != self.base:
            raise SymmetricMemoryError(
                f"NVSHMEM's memory at {self.base:#x} is not on torch's current GPU cuda:{torch.cuda.current_device()}: "
                f"torch.cuda.set_device to the one on which it was initialised"
            )
        self._region.zero_()

    @property
    def region(self) -> torch.Tensor:
        if self._region is None:
            raise ClosedError("this symmetric memory was closed")
        return self._region

    def close(self, keep: bool = False) -> None:
        if self._part is not None and not keep:
            self._part.kept = False  # all ranks have come to their end: no peer writes there any more
        self._part = self._region = None


def reserve(group: Group, num_bytes: int, timeout_s: float, device: torch.device) -> None:
    """Initialise NVSHMEM over a group, unless it is, and allocate a heap of `num_bytes` on each of its ranks.

    Collective over all PEs. Raises SymmetricMemoryError, RendezvousTimeout.
    """
    global _reserved_bytes
    pes = _join(group, mapped_bytes(num_bytes), timeout_s, device)
    if not pes.are_all:
        raise SymmetricMemoryError(f"NVSHMEM has {pes.count} PEs, the group {group.size} ranks: reserve needs all PEs")
    _grow(group, mapped_bytes(num_bytes), timeout_s, device, pes)
    _reserved_bytes += num_bytes


def allocate(group: Group, bytes_per_rank: int, timeout_s: float, device: torch.device) -> NvshmemMemory:
    """Symmetric memory for processes on GPUs that reach each other by load and store.

    Collective. `bytes_per_rank` is equal on all ranks; `timeout_s` is how long, in seconds, each step waits for them.
    Raises SymmetricMemoryError on all ranks where one of them gets none, and RendezvousTimeout.
    """
    num_bytes = mapped_bytes(bytes_per_rank)
    pes = _join(group, num_bytes, timeout_s, device)
    part, found = _take_all(group, num_bytes, bytes_per_rank, timeout_s)
    if part is None and (_reserved_bytes or not pes.are_all):
        free = ", ".join(f"rank {r}: {longest}" for r, (_, _, longest) in enumerate(found))
        raise SymmetricMemoryError(
            f"each rank needs {bytes_per_rank} bytes of NVSHMEM's heap, free in one piece are {free}: "
            f"ep_a2a.reserve({_reserved_bytes} and as many more) on all {pes.count} PEs, before the first connect"
        )
    if part is None:
        _grow(group, num_bytes, timeout_s, device, pes)
        part, found = _take_all(group, num_bytes, bytes_per_rank, timeout_s)
    if part is None:
        raise SymmetricMemoryError(f"another thread took the {num_bytes} bytes: one connect at a time on a GPU")

    def reach() -> list[int]:
        library = _library()
        bases = []
        for rank, (peer_index, peer_first, _) in enumerate(found):
            address = library.nvshmem_ptr(_heaps[peer_index].base, pes.of_rank[rank])
            if not address:
                raise SymmetricMemoryError(
                    f"GPU {pes.gpus[group.rank]} does not reach the memory of rank {rank}, GPU {pes.gpus[rank]}: they "
                    f"need NVLink or another P2P path; ranks that only a network joins are not served yet"
                )
            bases.append(address + peer_first)
        return bases

    try:
        bases = tell(group, "NVSHMEM, peers", timeout_s, reach)[group.rank]
    except SymmetricMemoryError:  # on all ranks
        part.kept = False
        raise
    kind: Kind = "nvlink" if len(set(pes.gpus)) == group.size else "gpu"
    return NvshmemMemory(part, group.rank, bytes_per_rank, bases, kind)


# ---- who is there ------------------------------------------------------------------------------------------------


class _Pes:
    """The PEs of a group's ranks."""

    def __init__(self, of_rank: list[int], count: int, gpus: list[str]) -> None:
        self.of_rank = of_rank
        self.count = count
        self.gpus = gpus
        self.are_all = len(of_rank) == count


def _join(group: Group, num_bytes: int, timeout_s: float, device: torch.device) -> _Pes:
    """Compare the ranks, initialise NVSHMEM if it is not. Collective."""
    seen = tell(group, "NVSHMEM, ranks", timeout_s, lambda: _look(num_bytes, device))
    for rank, one in enumerate(seen):
        if one["bytes"] != seen[0]["bytes"]:
            raise SymmetricMemoryError(f"bytes: {seen[0]['bytes']} on rank 0, {one['bytes']} on rank {rank}")
        if bool(one["pes"]) != bool(seen[0]["pes"]):
            with_it, without = (rank, 0) if one["pes"] else (0, rank)
            raise SymmetricMemoryError(
                f"NVSHMEM is initialised on rank {with_it} and not on rank {without}, and a PE can never join later: "
                f"ep_a2a.reserve(bytes) on all ranks of the job before the first connect of some of them"
            )
    _check_gpus(seen)
    if not seen[0]["pes"]:
        _initialize(group, num_bytes, timeout_s, device)
        seen = tell(group, "NVSHMEM, PEs", timeout_s, lambda: _look(num_bytes, device))
    of_rank, counts = [one["pe"] for one in seen], {one["pes"] for one in seen}
    if len(counts) > 1 or len(set(of_rank)) < group.size:
        raise SymmetricMemoryError(f"the ranks are PEs {of_rank} of {sorted(counts)}: they are not of one NVSHMEM job")
    return _Pes(of_rank, counts.pop(), [one["gpu"] for one in seen])


def _look(num_bytes: int, device: torch.device) -> dict[str, Any]:
    """What this rank sees of itself."""
    bindings = _modules()[1]
    status = bindings.init_status()
    is_up = bindings.Init_status.STATUS_IS_INITIALIZED <= status < bindings.Init_status.STATUS_INVALID
    driver, mps = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(mps), _MPS_ENABLED, device.index)
    return {
        "bytes": num_bytes,
        "gpu": f"{torch.cuda.get_device_properties(device).uuid} of {host_key().split()[-1]}",
        "mps": bool(mps.value),
        "pe": bindings.my_pe() if is_up else -1,
        "pes": bindings.n_pes() if is_up else 0,
    }


def _check_gpus(seen: list[dict[str, Any]]) -> None:
    """Processes that share a GPU without MPS take turns of milliseconds, and a wait in one stops the others."""
    first: dict[str, int] = {}
    for rank, one in enumerate(seen):
        other = first.setdefault(one["gpu"], rank)
        if other != rank and not (one["mps"] and seen[other]["mps"]):
            raise SymmetricMemoryError(
                f"ranks {other} and {rank} are on one GPU, {one['gpu']}, without MPS: {len(seen)} ranks on "
                f"{len({each['gpu'] for each in seen})} GPUs. Give each rank its own (ep_a2a.set_device() before "
                f"connect), or start them under MPS (bash launch/mps.sh --ranks-per-gpu N -- torchrun ...)"
            )


def _initialize(group: Group, num_bytes: int, timeout_s: float, device: torch.device) -> None:
    """Collective; rank 0's unique id goes to all."""
    core, bindings = _modules()
    from cuda.core import Device

    here = Device(device.index)
    here.set_current()
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(num_bytes + (64 << 20)))  # where the heap cannot grow
    uid = core.get_unique_id(empty=group.rank != 0)
    raw = (ctypes.c_char * uid._data.nbytes).from_address(uid.ptr)
    raw.raw = group.all_gather(raw.raw if group.rank == 0 else b"", "NVSHMEM, unique id", timeout_s)[0]
    with _watchdog(f"rank {group.rank}: NVSHMEM's initialisation over {group.size} ranks", timeout_s):
        core.init(device=here, uid=uid, rank=group.rank, nranks=group.size, initializer_method="uid")
    status = bindings.init_status()
    if not bindings.Init_status.STATUS_IS_INITIALIZED <= status < bindings.Init_status.STATUS_INVALID:
        raise SymmetricMemoryError(f"rank {group.rank}: NVSHMEM could not be initialised (status {status}): see above")


def _grow(group: Group, num_bytes: int, timeout_s: float, device: torch.device, pes: _Pes) -> None:
    """Allocate a heap on all PEs. Collective over them."""
    free = tell(group, "NVSHMEM, memory", timeout_s, lambda: torch.cuda.mem_get_info(device)[0])
    for rank, gpu in enumerate(pes.gpus):
        needed = num_bytes * pes.gpus.count(gpu)
        if free[rank] < needed:
            raise SymmetricMemoryError(
                f"NVSHMEM's heap needs {num_bytes} bytes on each rank, {needed} on GPU {gpu}, of which {free[rank]} "
                f"are free (fewer max_tokens or channels)"
            )
    with _watchdog(f"rank {group.rank}: NVSHMEM's allocation of {num_bytes} bytes", timeout_s):
        address = _library().nvshmem_malloc(num_bytes)
    _heaps.append(_Heap(address or 0, num_bytes if address else 0))  # every call counts, as it does on all PEs
    for rank, found in enumerate(group.all_gather(b"yes" if address else b"", "NVSHMEM, heap", timeout_s)):
        if not found:
            raise SymmetricMemoryError(
                f"NVSHMEM has no {num_bytes} bytes for rank {rank}, of which {free[rank]} are free on its GPU; "
                f"NVSHMEM_SYMMETRIC_SIZE is {os.environ.get('NVSHMEM_SYMMETRIC_SIZE', 'not set')}"
            )


def _take(num_bytes: int, part_bytes: int) -> tuple[_Part | None, tuple[int, int, int]]:
    """The first gap that is long enough, taken: the part, its heap and first byte; else the longest gap there is."""
    with _taking:
        longest = 0
        for index, heap in enumerate(_heaps):
            for first, length in heap.gaps():
                if length >= num_bytes:
                    return _Part(heap, first, part_bytes), (index, first, length)
                longest = max(longest, length)
        return None, (-1, 0, longest)


def _take_all(
    group: Group, num_bytes: int, part_bytes: int, timeout_s: float
) -> tuple[_Part | None, list[tuple[int, int, int]]]:
    """The same on all ranks, or on none. Collective."""
    part, mine = _take(num_bytes, part_bytes)
    found = tell(group, "NVSHMEM, room", timeout_s, lambda: mine)
    if all(index >= 0 for index, _, _ in found):
        return part, found
    if part is not None:
        part.kept = False  # nobody was told
    return None, found


# ---- the package -------------------------------------------------------------------------------------------------


def _modules() -> tuple[Any, Any]:
    """nvshmem4py, with NVSHMEM itself loaded."""
    try:
        core, bindings = importlib.import_module("nvshmem.core"), importlib.import_module("nvshmem.bindings")
        _library()
    except Exception as error:  # it raises types of its own where it finds no libnvshmem_host
        raise EpError(
            f"ranks on GPUs need NVSHMEM: pip install nvshmem4py-cu13 nvidia-nvshmem-cu13 ({type(error).__name__}: "
            f"{error})"
        ) from error
    return core, bindings


def _library() -> Any:
    """NVSHMEM's host library. Its blocking calls are made here: those of nvshmem4py hold Python's lock meanwhile."""
    pathfinder = importlib.import_module("cuda.pathfinder")
    library = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("nvshmem_host").abs_path)
    library.nvshmem_malloc.restype = library.nvshmem_ptr.restype = ctypes.c_void_p
    library.nvshmem_malloc.argtypes, library.nvshmem_ptr.argtypes = [ctypes.c_size_t], [ctypes.c_void_p, ctypes.c_int]
    return library


@contextmanager
def _watchdog(what: str, timeout_s: float) -> Iterator[None]:
    """Ends the process if the block does not end in time."""

    def give_up() -> None:
        print(f"ep_a2a: {what} did not return within {timeout_s:.1f} s: this process ends", file=sys.stderr, flush=True)
        os._exit(_HANG_EXIT_CODE)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
