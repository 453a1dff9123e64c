"""What a job of processes leaves on this machine: processes, names in /dev/shm, memory of GPUs.

    before = LeftBehind()
    spawn.outcomes(worker, 2, launcher="torchrun", env=before.env)
    before.expect_nothing()

Processes are known by a variable in `env`, which those see that a launcher executes; those that `spawn` forks it waits
for itself.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from tests.gpu_results import smi

_NAME = "EP_A2A_TEST_JOB"
_SPARE_MIB = 64  # what a GPU's memory may differ by for reasons of its own
_OF_MPI = ("mpich_shm_", "vader_segment.")  # MPI's own segments: whether these go is up to its launcher


class LeftBehind:
    """How the machine was when this was made."""

    def __init__(self) -> None:
        self.env = {_NAME: secrets.token_hex(8)}
        self._names, self._used_mib = _shm_names(), _used_mib()

    def now(self) -> set[str]:
        """What is there that was not."""
        mark = f"{_NAME}={self.env[_NAME]}".encode()
        found = _processes(mark) | {f"/dev/shm/{name}" for name in _shm_names() - self._names}
        for gpu, (old, new) in enumerate(zip(self._used_mib, _used_mib())):
            if new > old + _SPARE_MIB:
                found.add(f"memory of GPU {gpu}")
        return found

    def expect_nothing(self, within_s: float = 10.0) -> None:
        """Wait until all is as it was; AssertionError that says what is not. What was killed takes a while to go."""
        end = time.monotonic() + within_s
        found = self.now()
        while found and time.monotonic() < end:
            time.sleep(0.1)
            found &= self.now()  # what came later is not of the job
        assert not found, f"left behind: {sorted(found)}"


def _shm_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith(_OF_MPI)}


def _used_mib() -> list[int]:
    return [int(used.split()[0]) for (used,) in smi("memory.used")]


def _processes(mark: bytes) -> set[str]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found |= {f"{folder.name}: {command}"} if state != "Z" else set()
        except OSError:  # it has just ended, or is another user's
            continue
    return found
