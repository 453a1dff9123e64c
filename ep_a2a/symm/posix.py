"""Symmetric memory between processes of one host: a segment per rank in /dev/shm, mapped by all.

1. Ranks compare what they see: the same host, the same /dev/shm; leftovers of dead jobs go. When all are here, and
   with that all have given up what they held before, they look for room for all segments.
2. Each rank creates its segment, under a random name, and reserves its pages, so that a full /dev/shm is an error
   here and not a SIGBUS later.
3. Each rank maps the segments of all ranks, and when all have, or one has failed, removes its own name.

Ranks tell each other after each step how it went, so a failure on one is an error on all. A process that dies between
2 and 3 leaves a name. Its owner holds a lock on the segment for as long as it lives, so whoever gets that lock knows
that the owner is dead, and removes the name: the next job on the host does.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
from contextlib import suppress
from typing import Any

from ep_a2a.errors import SymmetricMemoryError
from ep_a2a.rendezvous import Group, one_line
from ep_a2a.symm.base import MappedMemory, mapped_bytes, tell

DIRECTORY = "/dev/shm"
PREFIX = "ep_a2a-"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"

_kept: list[object] = []  # mappings that stay until the process ends


class PosixMemory(MappedMemory):
    """The regions of processes on one host, as one of them sees them."""

    def close(self, keep: bool = False) -> None:
        if keep and self._tensors is not None:
            _kept.append(self._tensors)
        self._tensors = None


def allocate(group: Group, bytes_per_rank: int, timeout_s: float) -> PosixMemory:
    """Symmetric memory for processes on one host.

    Collective. `bytes_per_rank` is equal on all ranks; `timeout_s` is how long, in seconds, each step waits for them.
    Raises SymmetricMemoryError on all ranks where one of them gets none, and RendezvousTimeout; /dev/shm then holds
    nothing of it.
    """
    num_bytes = mapped_bytes(bytes_per_rank)
    seen = tell(group, "symmetric memory, host", timeout_s, lambda: _look(bytes_per_rank))
    _check_hosts(seen)
    _check_room(num_bytes, tell(group, "symmetric memory, room", timeout_s, _available))
    segment = _Segment()
    try:
        names = tell(group, "symmetric memory, create", timeout_s, lambda: segment.create(num_bytes, group.size))
        mappings: list[mmap.mmap] = []
        tell(group, "symmetric memory, map", timeout_s, lambda: mappings.extend(_map(n, num_bytes) for n in names))
    finally:
        segment.unlink()
    return PosixMemory(group.rank, bytes_per_rank, mappings)


def _look(bytes_per_rank: int) -> dict[str, Any]:
    """What this rank sees of the host, after removing leftovers."""
    remove_leftovers()
    with open(_BOOT_ID) as file:
        boot = file.read().strip()
    shm = os.stat(DIRECTORY)
    return {
        "bytes": bytes_per_rank,
        "boot": boot,
        "shm": [shm.st_dev, shm.st_ino],  # a container's own /dev/shm is another device, or another directory of it
        "host": os.uname().nodename,
    }


def _check_hosts(seen: list[dict[str, Any]]) -> None:
    first = seen[0]
    for rank, one in enumerate(seen):
        if one["bytes"] != first["bytes"]:
            raise SymmetricMemoryError(f"bytes_per_rank: {first['bytes']} on rank 0, {one['bytes']} on rank {rank}")
        if one["boot"] != first["boot"]:
            raise SymmetricMemoryError(
                f"ranks 0 and {rank} are on different hosts ({first['host']}, {one['host']}): shared memory reaches "
                f"processes of one host only"
            )
        if one["shm"] != first["shm"]:
            raise SymmetricMemoryError(
                f"ranks 0 and {rank} see different {DIRECTORY} directories, as containers do ({first['host']}, "
                f"{one['host']}): run them in one container or share it between them (docker: --ipc)"
            )


def _check_room(num_bytes: int, available: list[int | None]) -> None:
    least = min((one for one in available if one is not None), default=None)
    if least is not None and least < len(available) * num_bytes:
        raise _too_small(num_bytes, len(available), least)


def _available() -> int | None:
    """Free bytes of /dev/shm; None where its size has no limit."""
    found = os.statvfs(DIRECTORY)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _too_small(num_bytes: int, num_ranks: int, available: int | None) -> SymmetricMemoryError:
    return SymmetricMemoryError(
        f"{DIRECTORY} is too small: {num_ranks} ranks need {num_bytes} bytes each, {num_ranks * num_bytes} bytes in "
        f"all, {available} are available (docker: --shm-size; or fewer max_tokens or channels)"
    )


class _Segment:
    """This rank's segment as long as it has a name."""

    def __init__(self) -> None:
        self._path = ""
        self._fd = -1

    def create(self, num_bytes: int, num_ranks: int) -> str:
        """Make it, locked, with all its pages reserved. Returns its name."""
        while True:
            name = PREFIX + secrets.token_hex(16)
            self._path = f"{DIRECTORY}/{name}"
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(self._fd).st_nlink:
                    break
            self.unlink()  # between open and lock another job took it for a leftover
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise SymmetricMemoryError(f"{DIRECTORY}: reserving {num_bytes} bytes: {one_line(error)}") from error
            available = _available()  # before ours goes, so what the other ranks got counts as taken
            raise _too_small(num_bytes, num_ranks, available) from error
        return name

    def unlink(self) -> None:
        """Remove the name; the memory lives on in its mappings, which hold the lock as well."""
        if self._fd >= 0:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1


def _map(name: str, num_bytes: int) -> mmap.mmap:
    fd = os.open(f"{DIRECTORY}/{name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size != num_bytes:
            raise OSError(f"{name} has {os.fstat(fd).st_size} bytes instead of {num_bytes}")
        return mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)


def remove_leftovers() -> list[str]:
    """Remove segments whose owners are dead. Local. Returns their names; segments of other users are left alone."""
    removed = []
    for name in os.listdir(DIRECTORY):
        if not name.startswith(PREFIX):
            continue
        path = f"{DIRECTORY}/{name}"
        try:  # O_NONBLOCK: to open a FIFO waits for its writer
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                continue  # no segment, or another user's, which root could open
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            removed.append(name)
        except OSError:
            pass  # its owner lives, or somebody else has just removed it
        finally:
            os.close(fd)
    return removed
