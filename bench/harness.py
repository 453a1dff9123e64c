"""One way to measure for all benches: times of every rank, the floor of the same run, rows of JSON.

A row's `us` is the median over the iterations of the slowest rank's time; `bytes` counts what is read and written on
all ranks; `floor_us` is those bytes at the copy rate that the same run measured.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
COPY_BYTES = 1 << 26


@dataclass(frozen=True)
class Run:
    """What all rows of a run share."""

    run: str
    device: str
    commit: str

    @classmethod
    def here(cls, on_gpu: bool = False, commit: str = "") -> Run:
        """This machine, this second, and this commit (with `+` where files have changed) unless it is given."""
        device = torch.cuda.get_device_name() if on_gpu else _processor()
        return cls(time.strftime("%Y-%m-%dT%H:%M:%S"), device, commit or _commit())


def _processor() -> str:
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def copy_gbps() -> float:
    """Bytes read and written per second by a plain copy on one thread, in GB/s."""
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.empty(COPY_BYTES, dtype=torch.uint8)
    times = [timed(lambda: target.copy_(source)) for _ in range(7)]
    return 2 * COPY_BYTES / statistics.median(times) / 1e9


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def slowest_us(seconds_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """For each iteration the slowest rank's time, in microseconds."""
    return [1e6 * max(times) for times in zip(*seconds_by_rank)]


def result(run: Run, times_us: Sequence[float], num_bytes: int, gbps: float, **fields: Any) -> dict[str, Any]:
    """One row of a results file."""
    spread = {"us": statistics.median(times_us), "us_min": min(times_us), "us_max": max(times_us)}
    rounded = {name: round(value, 2) for name, value in spread.items()}
    return {**fields, **rounded, "bytes": num_bytes, "floor_us": round(num_bytes / gbps / 1e3, 2), **asdict(run)}


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a results file: a list, a row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
