#!/usr/bin/env python3
"""Time of dispatch and combine, on this machine's CPU or, with --device cuda, on its GPUs.

    python bench/a2a.py                                  4 ranks as threads of this process
    mpirun -n 4 python bench/a2a.py                      ranks as processes; torchrun alike
    python bench/a2a.py --device cuda --ranks 8 16       ranks as streams of one GPU, other libraries beside them
    torchrun --nproc-per-node 2 bench/a2a.py --device cuda

Every case is checked before it is timed and after. On a GPU rounds are CUDA graphs; variants take turns, A B B A. Rows
go to a JSON file (--out; by default build/bench/a2a.json, which each run replaces), tables to the screen.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

ROOT = Path(__file__).resolve().parent.parent
if "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:  # there processes share the queues
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # read when CUDA starts: one for each local rank
try:
    import ep_a2a
except ModuleNotFoundError:  # run from a checkout without an installed package
    sys.path.insert(0, str(ROOT))
    import ep_a2a
sys.path.append(str(ROOT))

from bench import cases, harness, table  # noqa: E402
from bench.cases import OPERATIONS, PAYLOADS, Case  # noqa: E402
from bench.variants import Alone, Empty, Memset, Ours, Ranks, Rival, Stream, Together, Variant  # noqa: E402
from ep_a2a import layout, testing, world  # noqa: E402

Row = dict[str, Any]
SCHEDULES = ("auto", *get_args(layout.Schedule))
VARIANTS = ("ours", "ours-bf16", "ours-general", "peers", "copy", "memset", "stream", "empty")
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"ranks": [4], "tokens": [1, 8, 64], "schedule": ["phased", "general"], "variants": ["ours", "copy"]},
    "cuda": {"ranks": [8], "tokens": [2**i for i in (0, *range(2, 14))], "schedule": ["auto"], "variants": [*VARIANTS]},
}
NO_CASE = ("ranks", "tokens", "hidden", "top_k", "payload", "routing", "num_sms")
FAILURES = (AssertionError, ep_a2a.EpError, RuntimeError, ValueError)  # of one case: the next may do better


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several: dict[str, Any] = {"nargs": "+", "metavar": "N", "type": int}
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--world", choices=["local", "processes"], help="by default what the launcher says")
    parser.add_argument("--ranks", help="of local worlds; a launcher's ranks go before", **several)
    parser.add_argument("--tokens", **several)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--top-k", type=int, default=22)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--payload", choices=sorted(PAYLOADS), nargs="+", default=["nvfp4"])
    parser.add_argument("--routing", choices=sorted(testing.ROUTINGS), nargs="+", default=["uniform"])
    parser.add_argument("--schedule", choices=SCHEDULES, nargs="+", help="of the variant `ours`")
    parser.add_argument("--num-sms", type=int, help="upper bound on the CTAs of a kernel")
    parser.add_argument("--ops", choices=OPERATIONS, nargs="+", default=list(OPERATIONS))
    parser.add_argument("--variants", choices=VARIANTS, nargs="+")
    parser.add_argument("--peers", nargs="+", help="only these of bench/peers")
    parser.add_argument("--iterations", type=int, default=30, help="samples of a variant, at least")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no new case after that")
    parser.add_argument("--commit", default="", help="of these sources, where git is not there to tell")
    parser.add_argument("--append", action="store_true", help="keep the rows that are in the file")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "a2a.json")
    wanted = parser.parse_args(words)
    for name, value in DEFAULTS[wanted.device].items():
        if getattr(wanted, name) is None:
            setattr(wanted, name, value)
    return wanted


def cases_of(wanted: argparse.Namespace, num_ranks: int) -> list[Case]:
    """All of one world, the shape that a plot joins together."""
    return [
        Case(num_ranks, tokens, wanted.hidden, wanted.top_k, wanted.experts, payload, routing, wanted.num_sms)
        for payload, routing, tokens in itertools.product(wanted.payload, wanted.routing, wanted.tokens)
    ]


# ---- measuring ---------------------------------------------------------------------------------------------------


class Bench:
    """A run in one process or thread: its ranks, its clock, and the rows so far, which the first process has."""

    def __init__(self, ranks: Ranks, wanted: argparse.Namespace, run: harness.Run, progress: table.Progress) -> None:
        self._ranks, self._wanted, self._run, self._progress = ranks, wanted, run, progress
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        self._rivals = self._make_rivals()
        self._clock = harness.GraphClock() if wanted.device == "cuda" else harness.HostClock()
        self._gbps = self._measure_copy()

    def _make_rivals(self) -> list[Rival]:
        """The other libraries that can be measured here; they use the same clock."""
        if self._wanted.device == "cpu" or "peers" not in self._wanted.variants or self._ranks.world != "local":
            return []
        try:
            from bench import peers
        except ImportError as error:
            self._tell(f"no peers: {error}")
            return []
        chosen = self._wanted.peers or peers.NAMES
        reasons = {name: peers.available(name) for name in chosen}
        for name, reason in reasons.items():
            if reason:
                self._tell(f"{name}: {reason}")
        return [Rival(name, peers.Peer, self._tell) for name in chosen if not reasons[name]]

    def _measure_copy(self) -> float:
        """GB/s, read and written, of all devices together. Collective."""
        places = {tuple(place) for place in self._ranks.gather(harness.place(self._clock.device))}
        times = harness.copy_times_us(self._clock, self._wanted.iterations) if self._ranks.is_first else [1.0]
        times = self._ranks.gather(times)[0]
        num_bytes = 2 * harness.COPY_BYTES[self._clock.device]
        gbps = num_bytes / harness.median(times) / 1e3
        if "copy" in self._wanted.variants:
            self._add(("copy", "copy", None, None), dict.fromkeys(NO_CASE), times, num_bytes, gbps)
        return gbps * len(places)

    def _tell(self, text: str) -> None:
        if self._ranks.is_first:
            self._progress.tell(text)

    def run(self, all_cases: Sequence[Case], until: float, save: Callable[[list[Row]], None]) -> None:
        """Measure the cases until it is that late; `save` gets the rows after each. Collective."""
        for case in all_cases:
            self._progress.begin(str(case))
            if any(self._ranks.gather(time.monotonic() > until)):
                self.left_out.append(str(case))
            elif isinstance(self._ranks, Together):
                try:
                    self._measure(case)
                except FAILURES as error:
                    self.left_out.append(f"{case}: {type(error).__name__}: {error}")
                    self._tell(self.left_out[-1])
            else:  # where one rank fails the others wait for it: all end
                self._measure(case)
            if self._ranks.is_first:
                save(self.rows)
            self._progress.end()

    def _measure(self, case: Case) -> None:
        inputs = cases.make(case, self._clock.device)
        moved = cases.traffic(case, inputs.goes)
        with self._ranks.connect(case) as a2as:
            cases.fill_outboxes(a2as)
            ours = self._make_ours(case, a2as, inputs)
            for one in ours:
                one.check()
            variants = [*ours, *self._make_others(case, inputs, moved)]
            for op in self._wanted.ops:
                self._measure_op(case, op, [one for one in variants if op in one.ops], moved[op], inputs)
            for one in ours:
                one.check()
        del ours, variants
        if self._clock.device == "cuda":
            torch.cuda.empty_cache()  # other processes on this GPU need it for the next case

    def _make_ours(self, case: Case, a2as: Sequence[ep_a2a.A2A], inputs: cases.Inputs) -> list[Ours]:
        chosen = [("ours", name) for name in self._wanted.schedule if "ours" in self._wanted.variants]
        if "ours-bf16" in self._wanted.variants and case.format.is_encoded:
            chosen.insert(0, ("ours-bf16", "auto"))  # before a schedule is forced
        if "ours-general" in self._wanted.variants:
            chosen.append(("ours-general", "general"))
        return [Ours(self._ranks, self._clock, a2as, inputs, name, schedule) for name, schedule in chosen]

    def _make_others(self, case: Case, inputs: cases.Inputs, moved: dict[str, cases.Traffic]) -> list[Variant]:
        found: list[Variant] = []
        for rival in self._rivals if case.payload == "nvfp4" else ():
            rival.prepare(self._wanted.ops, case, inputs.planes["ids"].cpu())
            found.append(rival)
        num_processes = len(self._ranks.gather(0))
        if "memset" in self._wanted.variants:
            share = {op: moved[op].written // num_processes for op in self._wanted.ops}
            found.append(Memset(self._ranks, self._clock, share))
        if "stream" in self._wanted.variants and self._clock.device == "cuda":
            read, written = (n // num_processes for n in (moved["dispatch"].read, moved["dispatch"].written))
            try:
                found.append(Stream(self._ranks, self._clock, read, written))
            except ImportError as error:
                self._tell(f"stream: {error}")
        if "empty" in self._wanted.variants:
            found.append(Empty(self._ranks, self._clock, self._wanted.ops))
        return found

    def _measure_op(
        self, case: Case, op: str, variants: Sequence[Variant], moved: cases.Traffic, inputs: cases.Inputs
    ) -> None:
        calls = [lambda num, one=one: one.times_us(op, num) for one in variants]
        by_rank = self._ranks.gather(harness.turns(calls, self._wanted.iterations))
        more = 0 if op == "combine" else inputs.encoding_bytes()
        own_bytes = {"memset": moved.written, "empty": 0, "ours-bf16": moved.total + more}
        for i, one in enumerate(variants):
            slowest = harness.slowest([found[i] for found in by_rank])
            if op not in one.ops:  # it has failed on the way
                continue
            num_bytes = own_bytes.get(one.name, moved.total)
            what = op, one.name, one.schedule_of(op), one.choice
            self._add(what, case.fields(), slowest, num_bytes, self._gbps)

    def _add(self, what: tuple[Any, ...], case: Row, times: Sequence[float], num_bytes: int, gbps: float) -> None:
        head = dict(zip(("op", "variant", "schedule", "choice"), what), world=self._ranks.world)
        self.rows.append(harness.result(self._run, times, num_bytes, gbps, **head, **case))

    def close(self) -> None:
        """End the other libraries' processes, and tell of samples that were not as they should be."""
        if isinstance(self._clock, harness.GraphClock) and self._clock.num_late:
            late, samples = self._clock.num_late, self._clock.num_samples
            self._tell(f"in {late} of {samples} samples the host was slower than the lead: {harness.LEAD_US:g} us")
        for rival in self._rivals:
            rival.close()


# ---- the program -------------------------------------------------------------------------------------------------


def worlds(wanted: argparse.Namespace, size: int) -> list[int]:
    """Numbers of ranks of the local worlds to measure; none where ranks are the `size` processes of a launcher."""
    kind = wanted.world or ("processes" if size > 1 else "local")
    if kind == "local" and size > 1:
        raise SystemExit(f"--world local, but a launcher started {size} ranks")
    return wanted.ranks if kind == "local" else []


def measure_rank(
    group: Any, kind: str, wanted: argparse.Namespace, run: harness.Run, progress: table.Progress, save: Any
) -> Bench:
    """One rank's part of a world of processes or threads. Collective."""
    if wanted.device == "cpu":
        torch.set_num_threads(1)
    own = progress if group.rank == 0 else table.Progress(0)
    return measured(Alone(group, kind, wanted.device), wanted, run, own, save)


def measured(ranks: Ranks, wanted: argparse.Namespace, run: harness.Run, progress: table.Progress, save: Any) -> Bench:
    """A bench that has run."""
    bench = Bench(ranks, wanted, run, progress)
    try:
        bench.run(cases_of(wanted, ranks.num_ranks), wanted.until, save)
    finally:
        bench.close()
    return bench


def main(words: Sequence[str] | None = None) -> int:
    wanted = options(words)
    wanted.until = time.monotonic() + wanted.seconds
    group = world.resolve(None)
    local = worlds(wanted, group.size)
    is_first, on_gpu = group.rank == 0, wanted.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch can use no GPU here")
    if on_gpu:
        ep_a2a.set_device(group)
    run = harness.Run.here(on_gpu, wanted.commit)
    kept: list[Row] = harness.read(wanted.out) if wanted.append else []
    num_cases = len(cases_of(wanted, 1)) * max(1, len(local))
    rows: list[Row] = []
    left_out: list[str] = []

    def save(found: list[Row]) -> None:
        harness.write([*kept, *rows, *found], wanted.out)

    with table.Progress(num_cases if is_first else 0) as progress:
        for num_ranks in local or [group.size]:
            if not local:
                bench = measure_rank(group, "processes", wanted, run, progress, save)
            elif on_gpu:
                ranks = Together(ep_a2a.local(num_ranks, "cuda"))
                bench = measured(ranks, wanted, run, progress, save)
            else:
                bench = ep_a2a.local(num_ranks).run(measure_rank, "local", wanted, run, progress, save)[0]
            rows += bench.rows
            left_out += bench.left_out
    if is_first:
        table.show(rows)
        print("".join(f"left out: {one}\n" for one in left_out) + f"{len(rows)} rows in {wanted.out}")
    return 1 if left_out or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
