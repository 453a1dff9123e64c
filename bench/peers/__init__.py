"""Other libraries' all-to-alls, each measured in a live process of its own, beside ours and with the same ids.

`Peer` starts `bench/peers/worker.py` and gives it commands over a pipe, one at a time. A worker that dies, or that says
nothing before a deadline, costs the case at hand; the next case starts another one. Nothing here is needed by the
library. FlashInfer's modules come from `bench/peers/build.py`; EP_A2A_PEERS names their folder, else it is build/peers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent.parent
WORKERS = {  # the class that a worker makes; see worker.py
    "flashinfer-0.7.4": "bench.peers.flashinfer.FlashInfer074",
    "flashinfer-0.7.0-generic": "bench.peers.flashinfer.FlashInfer070Generic",
    "flashinfer-0.7.0-phased": "bench.peers.flashinfer.FlashInfer070Phased",
    "nccl": "bench.peers.nccl.Nccl",
}
NAMES = tuple(WORKERS)
DEADLINES_S = {"start": 90.0, "prepare": 60.0, "times_us": 30.0}


class PeerError(Exception):
    """What a peer does not do, or how it failed, in words."""


class PeerDied(PeerError):
    """The worker has ended, or was ended because it was late."""


def module_path(name: str) -> Path:
    """Where `build.py` puts a FlashInfer version: `flashinfer-0.7.0-phased` is in `flashinfer-0.7.0.so`."""
    folder = Path(os.environ.get("EP_A2A_PEERS") or ROOT / "build/peers")
    return folder / ("-".join(name.split("-")[:2]) + ".so")


def available(name: str, num_ranks: int = 2) -> str:
    """Why a peer cannot run here, or an empty string."""
    if name.startswith("flashinfer"):
        if not module_path(name).is_file():
            return f"no {module_path(name)}: bench/peers/build.py builds it"
        if importlib.util.find_spec("tvm_ffi") is None:
            return "no Python package apache-tvm-ffi"
    import torch

    wanted, found = num_ranks if name == "nccl" else 1, torch.cuda.device_count()
    return "" if found >= wanted else f"needs {wanted} GPU{'s' * (wanted > 1)}, found {found}"


class Peer:
    """A live worker; it is idle, and its GPU synchronised, whenever a method has returned."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.note = ""  # of the last `prepare`: which options counted
        self._careful = False
        self._worker: subprocess.Popen[bytes] | None = None
        self._start()

    def prepare(self, ops: Sequence[str], ids: torch.Tensor, hidden: int, num_experts: int) -> None:
        """Set up `ops`, of `dispatch`, `combine` and `pair`, for NVFP4 rows and check what arrives.

        ids         [ranks, tokens, top_k] int32 on the CPU; -1 is no expert
        Raises      PeerError if the peer cannot do this case, or its worker dies and, tried again carefully, again
        """
        self.note = ""
        args = (tuple(ops), ids.numpy(), hidden, num_experts)
        try:
            self.note = self._ask("prepare", *args, self._careful)
        except PeerDied as first:
            if self._careful:
                raise
            self.note = f"{self._ask('prepare', *args, True)}, careful after: {first}"
            self._careful = True  # it helped

    def times_us(self, op: str, num: int) -> list[float]:
        """Times of `num` rounds of `op`, each one graph between two events."""
        if self._worker is None:
            raise PeerError(f"{self.name}: nothing is prepared")
        return self._ask("times_us", op, num)

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._link.close()  # the worker ends when it reads on
            try:
                self._worker.wait(10)
            except subprocess.TimeoutExpired:
                self._worker.kill()
                self._worker.wait()
            self._forget()

    def _start(self) -> None:
        self._link, theirs = Pipe()
        self._log = tempfile.TemporaryFile()
        env = dict(
            os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        )
        if "CUDA_MPS_PIPE_DIRECTORY" not in env:
            env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue for each rank's stream
        command = [sys.executable, "-m", "bench.peers.worker", str(theirs.fileno()), WORKERS[self.name]]
        with theirs:
            self._worker = subprocess.Popen(
                command, env=env, pass_fds=[theirs.fileno()], stdout=self._log, stderr=subprocess.STDOUT
            )
        self._answer("start")

    def _ask(self, command: str, *args: object) -> Any:
        if self._worker is None:
            self._start()
        with contextlib.suppress(OSError):  # if it has died, the answer says how
            self._link.send((command, args))
        return self._answer(command)

    def _answer(self, command: str) -> Any:
        assert self._worker is not None
        try:
            if not self._link.poll(DEADLINES_S[command]):
                self._end(f"no answer to {command} in {DEADLINES_S[command]:g} s")
            kind, value = self._link.recv()
        except (EOFError, OSError):
            self._end("")
        if kind == "refused":
            raise PeerError(f"{self.name}: {value}")
        return value

    def _end(self, late: str) -> None:
        """Raise PeerDied with how the worker ended and the end of what it printed."""
        assert self._worker is not None
        if late:
            self._worker.kill()
        try:
            status = self._worker.wait(20)
        except subprocess.TimeoutExpired:
            status = 0
        how = late or (f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}")
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = "; ".join(line.strip() for line in lines if line.strip())[-300:]
        self._forget()
        raise PeerDied(f"{self.name}: {how}" + f": {last}" * bool(last))

    def _forget(self) -> None:
        self._worker = None
        self._link.close()
        self._log.close()
