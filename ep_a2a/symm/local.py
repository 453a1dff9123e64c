"""Symmetric memory of a local world: a region per rank, all in the address space of this process.

On a CPU each is an anonymous mapping, whose pages are zero and cost nothing until they are touched; on a GPU it comes
from torch's allocator. Every rank's object holds a reference to the regions of all ranks, so a region goes when the
last rank of the world has closed and no view of it lives.
"""

from __future__ import annotations

import mmap

import torch

from ep_a2a.errors import ClosedError, SymmetricMemoryError
from ep_a2a.layout import REGION_ALIGN_BYTES
from ep_a2a.rendezvous import one_line
from ep_a2a.symm.base import SymmetricMemory, mapped_bytes
from ep_a2a.world import LocalRank

_MAP_NORESERVE = 0x4000  # Linux; `mmap` has the name since Python 3.11


class LocalMemory(SymmetricMemory):
    """The regions of a local world, as one of its ranks sees them."""

    def __init__(self, rank: int, regions: list[torch.Tensor]) -> None:
        self.kind = "gpu" if regions[0].is_cuda else "cpu"
        self.bytes_per_rank = regions[0].numel()
        self.peer_bases = tuple(region.data_ptr() for region in regions)
        self.base = self.peer_bases[rank]
        self._rank = rank
        self._regions: list[torch.Tensor] | None = regions
        self._key = object()
        if self.kind == "gpu":
            _kept[self._key] = regions

    @property
    def region(self) -> torch.Tensor:
        if self._regions is None:
            raise ClosedError("this symmetric memory was closed")
        return self._regions[self._rank]

    def close(self, keep: bool = False) -> None:
        if not keep:
            _kept.pop(self._key, None)
        self._regions = None  # the regions stay until every rank has come here


_kept: dict[object, list[torch.Tensor]] = {}  # on a GPU, where kernels may come later than an object lives


def allocate(group: LocalRank, bytes_per_rank: int, timeout_s: float, device: torch.device) -> LocalMemory:
    """Symmetric memory for the ranks of a local world.

    Collective. `bytes_per_rank` is equal on all ranks; `timeout_s` is how long, in seconds, to wait for them.
    Raises SymmetricMemoryError on all ranks where one of them gets none, and RendezvousTimeout.
    """
    num_bytes = mapped_bytes(bytes_per_rank)
    mine: torch.Tensor | str
    try:
        mine = (_on_gpu if device.type == "cuda" else _on_cpu)(num_bytes, device)[:bytes_per_rank]
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:
        mine = f"{num_bytes} bytes on {device}: {one_line(error)}"
    found = group.gather_objects((bytes_per_rank, mine), "symmetric memory", timeout_s)
    for rank, (_, theirs) in enumerate(found):
        if isinstance(theirs, str):
            raise SymmetricMemoryError(f"rank {rank}, {theirs}")
    for rank, (asked_bytes, _) in enumerate(found):
        if asked_bytes != found[0][0]:
            raise SymmetricMemoryError(f"bytes_per_rank: {found[0][0]} on rank 0, {asked_bytes} on rank {rank}")
    return LocalMemory(group.rank, [theirs for _, theirs in found])


def alone(bytes_per_rank: int, device: torch.device) -> LocalMemory:
    """Symmetric memory of the only rank, on a GPU. Local. Raises SymmetricMemoryError."""
    try:
        return LocalMemory(0, [_on_gpu(mapped_bytes(bytes_per_rank), device)[:bytes_per_rank]])
    except torch.OutOfMemoryError as error:
        raise SymmetricMemoryError(f"{bytes_per_rank} bytes on {device}: {one_line(error)}") from error


def _on_cpu(num_bytes: int, device: torch.device) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


def _on_gpu(num_bytes: int, device: torch.device) -> torch.Tensor:
    memory = torch.zeros(num_bytes + REGION_ALIGN_BYTES, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % REGION_ALIGN_BYTES :]
