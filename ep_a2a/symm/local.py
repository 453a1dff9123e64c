"""Symmetric memory of a local world: one anonymous mapping per rank, all in the address space of this process.

Pages are zero and cost nothing until they are touched. Every rank's object holds a reference to the regions of all
ranks, so a region goes when the last rank of the world has closed and no view of it lives.
"""

from __future__ import annotations

import mmap

from ep_a2a.errors import SymmetricMemoryError
from ep_a2a.symm.base import MappedMemory, mapped_bytes
from ep_a2a.world import LocalRank

_MAP_NORESERVE = 0x4000  # Linux; `mmap` has the name since Python 3.11


class LocalMemory(MappedMemory):
    """The regions of a local world, as one of its ranks sees them."""

    def close(self, keep: bool = False) -> None:
        self._tensors = None  # kept or not, the regions stay until every rank has come here


def allocate(group: LocalRank, bytes_per_rank: int, timeout_s: float) -> LocalMemory:
    """Symmetric memory for the ranks of a local world.

    Collective. `bytes_per_rank` is equal on all ranks; `timeout_s` is how long, in seconds, to wait for them.
    Raises SymmetricMemoryError on all ranks where one of them gets none, and RendezvousTimeout.
    """
    num_bytes = mapped_bytes(bytes_per_rank)
    mapping: mmap.mmap | str
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        mapping = mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, OverflowError) as error:
        mapping = f"mapping {num_bytes} bytes: {error}"
    found = group.gather_objects((bytes_per_rank, mapping), "symmetric memory", timeout_s)
    for rank, (_, theirs) in enumerate(found):
        if isinstance(theirs, str):
            raise SymmetricMemoryError(f"rank {rank}, {theirs}")
    for rank, (asked_bytes, _) in enumerate(found):
        if asked_bytes != found[0][0]:
            raise SymmetricMemoryError(f"bytes_per_rank: {found[0][0]} on rank 0, {asked_bytes} on rank {rank}")
    return LocalMemory(group.rank, bytes_per_rank, [theirs for _, theirs in found])
