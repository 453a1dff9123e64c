#!/usr/bin/env python3
"""Time that the host spends in an eager dispatch and combine: what a program pays that does not use graphs.

    python bench/host_time.py

One rank on the current GPU, and `torch.add_` beside it in the same run. Rows of JSON go to --out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, Run, write

sys.path.insert(0, str(ROOT))

import ep_a2a
from ep_a2a import quant, testing

BATCH = 20  # calls between two synchronisations, fewer than a stream's queue holds


def measure(calls: list[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Microseconds of each call, one behind the other, in every round but the first batch."""
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(-BATCH, rounds):
        if round_ % BATCH == 0:
            torch.cuda.synchronize()
        for call, found in zip(calls, times):
            start = time.perf_counter()
            call()
            if round_ >= 0:
                found.append(1e6 * (time.perf_counter() - start))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--commit", default="", help="of these sources, where git is not there to tell")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "host_time.json")
    wanted = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU: on a CPU a call is the work itself, see bench/a2a.py")
        return 1
    config = ep_a2a.Config(num_experts=64, top_k=8, hidden=2048, max_tokens=wanted.tokens)
    generator = torch.Generator().manual_seed(1)
    ids, weights = (t.cuda() for t in testing.ROUTINGS["uniform"](wanted.tokens, 64, 8, generator))
    x = torch.randn(wanted.tokens, 2048, device="cuda", dtype=torch.bfloat16)
    out, one = torch.empty_like(x), torch.zeros(1, device="cuda")
    run, rows = Run.here(on_gpu=True, commit=wanted.commit), []
    with ep_a2a.connect(config) as a2a:
        handles: list[Any] = []
        for given, name in ((x, "bf16 rows"), (quant.encode(x, config.payload), "encoded rows")):
            times = measure(
                [
                    lambda given=given: handles.append(ep_a2a.dispatch(a2a, given, ids, weights)[1]),
                    lambda: ep_a2a.combine(a2a, handles.pop(), out=out),
                    lambda: one.add_(1),
                    a2a.check,
                ],
                wanted.rounds,
            )
            for op, found in zip(("dispatch", "combine", "torch.add_", "check"), times):
                found.sort()
                ends = {"us": found[len(found) // 2], "us_min": found[0], "us_max": found[-1]}
                fields = {"op": op, "variant": "host time", "given": name, "tokens": wanted.tokens}
                rows.append(fields | {k: round(v, 2) for k, v in ends.items()} | vars(run))
                print(f"{op:12} {name:13} {ends['us']:7.1f} us (least {ends['us_min']:.1f})")
    write(rows, wanted.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
