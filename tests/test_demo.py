"""The demo under both launchers: its tables, its exit code, and that a wrong result fails it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ep_a2a import demo

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--layer", "Nemotron-like", "--rounds", "1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, timeout=240)


def mpirun() -> list[str]:
    pytest.importorskip("mpi4py")
    found = [folder / "mpirun" for folder in (Path(sys.executable).parent, *map(Path, os.get_exec_path()))]
    return [str(next((path for path in found if path.exists()), None) or pytest.skip("no mpirun")), "-n", "3"]


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_demo_shows_a_layer(launcher):
    start = [*TORCHRUN, "-m", "ep_a2a"] if launcher == "torchrun" else [*mpirun(), sys.executable, "-m", "ep_a2a"]
    shown = run([*start, "demo", *SMALL])
    assert shown.returncode == 0, shown.stderr[-2000:]
    for text in ("Nemotron-like", "hidden 2048, top-22", "rows in", "combine", "dispatch traffic", "within the bound"):
        assert text in shown.stdout


@pytest.mark.slow
def test_the_whole_demo_as_the_script_starts_it():
    shown = run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "ep_a2a",
                 "demo"])  # fmt: skip
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert "Nemotron-like" in shown.stdout and "DeepSeek-like" in shown.stdout
    assert "within the bound" in shown.stdout


def test_one_rank_without_a_launcher():
    assert run([sys.executable, "-m", "ep_a2a", "demo", *SMALL]).returncode == 0


def test_unknown_command_prints_usage():
    shown = run([sys.executable, "-m", "ep_a2a", "dance"])
    assert shown.returncode == 2
    assert "usage" in shown.stderr


@pytest.mark.slow
def test_a_lost_contribution_fails_the_demo(monkeypatch):
    combine = demo.ep_a2a.combine

    def lossy(a2a, handle, **arguments):
        a2a.outbox()[0, 0] = 0  # token 0 of rank 0 loses what its experts computed
        return combine(a2a, handle, **arguments)

    monkeypatch.setattr(demo.ep_a2a, "combine", lossy)
    assert demo.main(SMALL) == 1
