"""Start ranks as processes, collect what they return or raise, and never hang.

    from tests import spawn

    def worker(scale):                       # at the top level of a test file
        group = world.resolve(None)
        return group.rank * scale

    assert spawn.run(worker, 3, 10, launcher="torchrun") == [0, 10, 20]

`run` returns the results by rank and fails with every rank's traceback where one failed; `outcomes` returns what
happened to each rank (`Outcome`: value, or error and traceback, exit code and output), for tests in which ranks are
meant to fail or to die. Arguments and results travel by pickle.

Launchers:

"env"       RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; rank 0 holds the store. `resolve(None)` works.
"store"     the test process holds a TCPStore; in the worker `spawn.process_group()` makes the default ProcessGroup on
            it (gloo), and `spawn.store()` is the bare store.
"bare"      nothing but what `env` says.
"torchrun"  python -m torch.distributed.run --standalone
"mpirun"    the mpirun beside this Python (PyPI's mpich) or on PATH, else the test is skipped.

`env` adds variables: a dict, or a function of the rank (not for torchrun and mpirun). Workers see no GPU without
`gpus=True`. `spawn.rank()` and
`spawn.size()` are this worker's, whatever started it. The first three start quickly, as they fork from a process that
has imported torch.

A worker that raises exits with 0, so that a launcher does not end its peers: the error is in its outcome. After
`deadline_s` seconds a worker prints the stacks of its threads and ends itself, and a little later the test process
kills whatever is left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

_ROOT = Path(__file__).resolve().parent.parent
_GRACE_S = 3.0
_RANKS = (("EP_SPAWN_RANK", "EP_SPAWN_SIZE"), ("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
_RANKS += (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),)
Env = Mapping[str, str] | Callable[[int], Mapping[str, str]] | None


@dataclass
class Outcome:
    """What became of a rank.

    `error` is `ValueError: text`, empty where it returned; `output` is its stdout and stderr, of all ranks together
    under torchrun and mpirun.
    """

    rank: int
    value: Any = None
    error: str = ""
    traceback: str = ""
    exit_code: int | None = None
    output: str = field(default="", repr=False)


def run(
    worker: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    launcher: str = "env",
    env: Env = None,
    deadline_s: float = 60.0,
    gpus: bool = False,
) -> list[Any]:
    """Run `worker(*args)` as `num_ranks` processes. Returns the results by rank; AssertionError where a rank failed."""
    found = outcomes(worker, num_ranks, *args, launcher=launcher, env=env, deadline_s=deadline_s, gpus=gpus)
    failed = [one for one in found if one.error]
    if failed:
        text = "\n".join(f"--- rank {one.rank}: {one.error}\n{one.traceback or one.output[-4000:]}" for one in failed)
        raise AssertionError(f"{len(failed)} of {num_ranks} ranks failed under {launcher}\n{text}")
    return [one.value for one in found]


def outcomes(
    worker: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    launcher: str = "env",
    env: Env = None,
    deadline_s: float = 60.0,
    gpus: bool = False,
) -> list[Outcome]:
    """Run `worker(*args)` as `num_ranks` processes. Returns what became of each, by rank."""
    with tempfile.TemporaryDirectory(prefix="spawn-") as folder:
        code = worker.__code__.co_filename, worker.__qualname__
        Path(folder, "job").write_bytes(pickle.dumps((code, args, deadline_s)))
        start = _fork if launcher in ("env", "store", "bare") else _launch
        env = env if gpus else _without_gpus(env)
        exit_codes = start(Path(folder), launcher, num_ranks, env, deadline_s + _GRACE_S)
        return [_read(Path(folder), rank, exit_codes[rank]) for rank in range(num_ranks)]


def rank() -> int:
    """The rank of this worker."""
    return next(int(os.environ[name]) for name, _ in _RANKS if name in os.environ)


def size() -> int:
    """The number of workers."""
    return next(int(os.environ[name]) for _, name in _RANKS if name in os.environ)


def store() -> Any:
    """In a worker of launcher "store": the store that the test process holds."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", int(os.environ["EP_SPAWN_PORT"]), None, False, wait_for_workers=False)


def process_group() -> Any:
    """In a worker of launcher "store": make the default ProcessGroup, over gloo."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=store(), rank=rank(), world_size=size())
    return dist.group.WORLD


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# ---- in the test process -----------------------------------------------------------------------------------------


def _without_gpus(env: Env) -> Env:
    none = {"CUDA_VISIBLE_DEVICES": ""}
    if callable(env):
        return lambda one: {**none, **env(one)}
    return {**none, **(env or {})}


def _fork(folder: Path, launcher: str, num_ranks: int, env: Env, deadline_s: float) -> list[int | None]:
    from torch.distributed import TCPStore

    base = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "SLURM_", "MASTER_"))}
    base |= {"EP_SPAWN_SIZE": str(num_ranks)}
    if launcher == "store":
        server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        base |= {"EP_SPAWN_PORT": str(server.port)}
    if launcher == "env":
        base |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest", "tests.spawn"])
    processes = []
    for one in range(num_ranks):
        own = base | {"EP_SPAWN_RANK": str(one)} | ({"RANK": str(one)} if launcher == "env" else {})
        own |= env(one) if callable(env) else env or {}
        processes.append(context.Process(target=_forked, args=(str(folder), own), daemon=True))
    end = time.monotonic() + deadline_s
    try:
        with patch.dict(sys.modules, __main__=ModuleType("__main__")):  # else each rank imports pytest's
            for process in processes:
                process.start()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [process.exitcode for process in processes]


def _launch(folder: Path, launcher: str, num_ranks: int, env: Env, deadline_s: float) -> list[int | None]:
    worker = [str(Path(__file__).resolve()), str(folder)]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    elif launcher == "mpirun":
        beside = Path(sys.executable).parent / "mpirun"
        mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
        if mpirun is None or importlib.util.find_spec("mpi4py") is None:
            import pytest

            pytest.skip("mpirun: PyPI's mpich and mpi4py are not installed")
        command = [mpirun, "-n", str(num_ranks), sys.executable]
    else:
        raise ValueError(f"launcher={launcher!r}")
    if callable(env):
        raise TypeError(f"{launcher}: env must be the same on all ranks")
    with Path(folder, "output").open("wb") as output:
        process = subprocess.Popen(
            command + worker,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_tree(process.pid)
            process.wait()
    return [process.returncode] * num_ranks


def _kill_tree(pid: int) -> None:
    """Kill a process and its descendants; launchers start ranks in sessions of their own."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    doomed = [pid]
    for one in doomed:
        doomed += children.get(one, [])
    for one in doomed[1:] + doomed[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _read(folder: Path, rank: int, exit_code: int | None) -> Outcome:
    found = Outcome(rank, error=f"no result, exit code {exit_code}")
    with contextlib.suppress(FileNotFoundError):
        found = pickle.loads(Path(folder, f"result{rank}").read_bytes())
    for name in (f"output{rank}", "output"):
        with contextlib.suppress(FileNotFoundError):
            found.output = Path(folder, name).read_text(errors="replace")
    found.exit_code = exit_code
    return found


# ---- in a worker -------------------------------------------------------------------------------------------------


def _forked(folder: str, env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    output = os.open(f"{folder}/output{rank()}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), line_buffering=True)
    _work(folder)
    if "mpi4py.MPI" in sys.modules:  # it would do so at exit, but multiprocessing exits another way
        sys.modules["mpi4py.MPI"].Finalize()


def _work(folder: str) -> None:
    (path, name), args, deadline_s = pickle.loads(Path(folder, "job").read_bytes())
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    found = Outcome(rank())
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        spec.loader.exec_module(module)
        found.value = getattr(module, name)(*args)
        pickle.dumps(found)
    except BaseException as error:
        found.value, found.error = None, f"{type(error).__name__}: {error}"
        found.traceback = traceback.format_exc()
    part = Path(folder, f"part{rank()}")
    part.write_bytes(pickle.dumps(found))
    part.rename(Path(folder, f"result{rank()}"))


if __name__ == "__main__":
    sys.path.insert(0, str(_ROOT))
    from tests import spawn  # so that results are of a class that the test process knows

    spawn._work(sys.argv[1])
