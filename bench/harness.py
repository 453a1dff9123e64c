"""One way to measure for all benches: a clock, the floor of the same run, rows of JSON.

A row's `us` is the median over the samples of the slowest rank's time; `bytes` counts what is read and written on all
ranks; `floor_us` is those bytes at the copy rate that the same run measured.

A sample is one replay of a CUDA graph between two events, the device idle before it. While a short kernel keeps the
stream busy the host puts all of the sample behind it, so that its own pace is not in the time. On a CPU a sample is a
call between two readings of the clock.
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
from typing import Any, Protocol

import torch

ROOT = Path(__file__).resolve().parent.parent
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
LEAD_US = 200.0  # longer than a host needs to launch a sample
CYCLES_PER_US = 1900  # of an H200, about

Work = Callable[[], Any]


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


# ---- clocks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What runs before the work that is timed, that work, and what runs after it; each made by `Clock.capture`."""

    timed: Work
    before: tuple[Work, ...] = ()
    after: tuple[Work, ...] = ()


class Clock(Protocol):
    """How work on a device is repeated and timed."""

    @property
    def device(self) -> str: ...
    def capture(self, work: Work) -> Work:
        """Something that runs `work` as often as it is called."""

    def wait(self) -> None:
        """Until the device has done all it was given."""

    def times_us(self, sample: Sample, num: int, num_warm: int = 0, level: Work | None = None) -> list[float]:
        """Times of `num` samples; `level` brings all ranks together before each."""


class HostClock:
    """Work on the CPU: a call has run when it returns."""

    device = "cpu"

    def capture(self, work: Work) -> Work:
        return work

    def wait(self) -> None:
        pass

    def times_us(self, sample: Sample, num: int, num_warm: int = 0, level: Work | None = None) -> list[float]:
        found = []
        for _ in range(num_warm + num):
            if level is not None:
                level()
            for work in sample.before:
                work()
            found.append(1e6 * timed(sample.timed))
            for work in sample.after:
                work()
        return found[num_warm:]


class GraphClock:
    """Work on torch's current GPU: CUDA graphs, replayed on a stream of this clock and timed by events.

    num_samples, num_late  samples so far, and those for whose launches the host took longer than `LEAD_US`
    """

    device = "cuda"

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self.num_samples = self.num_late = 0

    def capture(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()

        def replay() -> None:
            with torch.cuda.stream(self._stream):
                graph.replay()

        return replay

    def wait(self) -> None:
        torch.cuda.synchronize()

    def times_us(self, sample: Sample, num: int, num_warm: int = 0, level: Work | None = None) -> list[float]:
        found = []
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(num_warm + num):
                if level is None:
                    for work in sample.before:
                        work()
                    torch.cuda.synchronize()  # graphs that are queued beside it slow it
                else:
                    level()
                torch.cuda._sleep(int(LEAD_US * CYCLES_PER_US))
                started = time.perf_counter()
                for work in sample.before if level is not None else ():  # it makes the ranks of processes even
                    work()
                begin.record()
                sample.timed()
                end.record()
                self.num_samples += 1
                self.num_late += time.perf_counter() - started > LEAD_US / 1e6
                torch.cuda.synchronize()
                for work in sample.after:
                    work()
                torch.cuda.synchronize()
                found.append(1e3 * begin.elapsed_time(end))
        return found[num_warm:]


def place(device: str) -> list[str]:
    """What tells the memory that `device` means here from that of others."""
    if device == "cpu":
        return [platform.node(), "cpu"]
    return [platform.node(), str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)]


def timed(work: Work) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median(times: Sequence[float]) -> float:
    return statistics.median(times)


def copy_times_us(clock: Clock, num: int) -> list[float]:
    """Times of a plain copy of `COPY_BYTES` on the clock's device: by a call, as a graph's copies are slower."""
    source = torch.ones(COPY_BYTES[clock.device], dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return clock.times_us(Sample(lambda: target.copy_(source)), num, num_warm=2)


def turns(calls: Sequence[Callable[[int], list[float]]], num: int, passes: int = 4) -> list[list[float]]:
    """Call each with its share of `num`, in turn and back again: A B B A A B B A. Returns what each gave in all."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(passes):
        order = range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls)))
        for i in order:
            found[i] += calls[i](-(-num // passes))
    return found


# ---- rows --------------------------------------------------------------------------------------------------------


def slowest(times_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """For each sample the slowest rank's time."""
    return [max(times) for times in zip(*times_by_rank)]


def result(run: Run, times_us: Sequence[float], num_bytes: int, gbps: float, **fields: Any) -> dict[str, Any]:
    """One row of a results file."""
    spread = {"us": statistics.median(times_us), "us_min": min(times_us), "us_max": max(times_us)}
    rounded = {name: round(value, 2) for name, value in spread.items()}
    return {**fields, **rounded, "bytes": num_bytes, "floor_us": round(num_bytes / gbps / 1e3, 2), **asdict(run)}


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a results file: a list, a row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file; none where there is no such file."""
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found
