"""What symmetric memory is, whatever it is made of."""

from __future__ import annotations

import abc
import json
import mmap
from collections.abc import Callable
from typing import Any

import torch

from ep_a2a.errors import ClosedError, EpError, SymmetricMemoryError
from ep_a2a.layout import REGION_ALIGN_BYTES, Kind, round_up
from ep_a2a.rendezvous import Group, one_line


class SymmetricMemory(abc.ABC):
    """A region of equal size on every rank that all ranks of the group reach by address.

    kind            what lies between the ranks, for `layout`'s choices
    bytes_per_rank  size of each region, bytes
    base            address of this rank's region, a multiple of 4096; the region starts as zeros
    peer_bases      addresses, in this process, of the regions of all ranks, by rank; the own one included
    """

    kind: Kind = "cpu"
    bytes_per_rank: int
    base: int
    peer_bases: tuple[int, ...]

    @property
    @abc.abstractmethod
    def region(self) -> torch.Tensor:
        """This rank's region, uint8 [bytes_per_rank], no copy. Local. Raises ClosedError after `close`."""

    @abc.abstractmethod
    def close(self, keep: bool = False) -> None:
        """Give up this rank's use of all regions. Local; again is harmless.

        Nothing is unmapped under a living tensor: the mapping of `region` belongs to the storage that all views of it
        share and goes when the last view dies. Addresses are not views: after `close` they must not be used.

        keep  peers may still be writing here, or kernels reading there: keep all regions as they are
        """


class MappedMemory(SymmetricMemory):
    """Symmetric memory made of one Python mapping per rank.

    A mapping is only ever unmapped by its last reference. This object holds one to each; a tensor from
    `torch.frombuffer` holds one too.
    """

    def __init__(self, rank: int, bytes_per_rank: int, mappings: list[mmap.mmap]) -> None:
        tensors = [torch.frombuffer(m, dtype=torch.uint8, count=bytes_per_rank) for m in mappings]
        self.bytes_per_rank = bytes_per_rank
        self.peer_bases = tuple(t.data_ptr() for t in tensors)
        self.base = self.peer_bases[rank]
        self._rank = rank
        self._tensors: list[torch.Tensor] | None = tensors

    @property
    def region(self) -> torch.Tensor:
        if self._tensors is None:
            raise ClosedError("this symmetric memory was closed")
        return self._tensors[self._rank]


def mapped_bytes(bytes_per_rank: int) -> int:
    """What a region takes: whole pages. Raises ValueError and TypeError where the size is none."""
    if isinstance(bytes_per_rank, bool) or not isinstance(bytes_per_rank, int):
        raise TypeError(f"bytes_per_rank must be an int, not {type(bytes_per_rank).__name__}")
    if not 1 <= bytes_per_rank < 2**62:
        raise ValueError(f"bytes_per_rank={bytes_per_rank}: must be 1 to 2**62 - 1")
    return round_up(bytes_per_rank, REGION_ALIGN_BYTES)


def tell(group: Group, what: str, timeout_s: float, step: Callable[[], Any]) -> list[Any]:
    """Do a step and give all ranks what all ranks got from it, or an error on all where it failed on one."""
    outcome: dict[str, Any]
    try:
        outcome = {"value": step()}
    except (EpError, OSError, RuntimeError, ValueError, ImportError) as error:
        outcome = {"error": str(error) if isinstance(error, EpError) else one_line(error)}
    told = group.all_gather(json.dumps(outcome).encode(), what, timeout_s)
    outcomes = [json.loads(one) for one in told]
    for rank, one in enumerate(outcomes):
        if "error" in one:
            raise SymmetricMemoryError(f"rank {rank}, {what}: {one['error']}")
    return [one["value"] for one in outcomes]
