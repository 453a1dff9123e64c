"""Symmetric memory: a region of equal size on every rank that the kernels of all ranks reach by address.

local    ranks of this process
posix    processes of one host, on a CPU, through /dev/shm
nvshmem  processes on GPUs
"""

from __future__ import annotations

import torch

from ep_a2a.device import CPU
from ep_a2a.symm import local as _local
from ep_a2a.symm import nvshmem as _nvshmem
from ep_a2a.symm import posix as _posix
from ep_a2a.symm.base import SymmetricMemory
from ep_a2a.world import Group, LocalRank

__all__ = ["SymmetricMemory", "allocate"]


def allocate(group: Group, bytes_per_rank: int, timeout_s: float, device: torch.device = CPU) -> SymmetricMemory:
    """Allocate one zeroed region per rank, reachable by all ranks of `group`.

    Collective. A failure on one rank is an error on every rank, and then nothing is left behind.

    bytes_per_rank  size of each region, equal on all ranks
    timeout_s       how long each step waits for the other ranks, seconds
    device          of this rank; all ranks run on CPUs, or all on GPUs
    Returns         the regions as this rank sees them
    Raises          SymmetricMemoryError (too little memory, ranks on different hosts, sizes that differ),
                    GPUs that do not reach each other), RendezvousTimeout, ValueError, TypeError
    """
    if isinstance(group, LocalRank):
        return _local.allocate(group, bytes_per_rank, timeout_s, device)
    if device.type == "cuda" and group.size == 1:
        return _local.alone(bytes_per_rank, device)
    if device.type == "cuda":
        return _nvshmem.allocate(group, bytes_per_rank, timeout_s, device)
    return _posix.allocate(group, bytes_per_rank, timeout_s)
