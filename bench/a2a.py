#!/usr/bin/env python3
"""Time of dispatch and combine, on this machine's CPU.

    python bench/a2a.py                        4 ranks as threads of this process
    mpirun -n 4 python bench/a2a.py            ranks as processes; torchrun alike

Every case is checked against the reference before it is timed. A table goes to the screen, rows to a JSON file
(--out; by default build/bench/a2a.json, which each run replaces).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
try:
    import ep_a2a
except ModuleNotFoundError:  # run from a checkout without an installed package
    sys.path.insert(0, str(ROOT))
    import ep_a2a

from harness import Run, copy_gbps, result, slowest_us, timed, write  # noqa: E402

from ep_a2a import layout, quant, testing, world  # noqa: E402

OPERATIONS = ("dispatch", "combine", "pair")
PAYLOADS = {fmt.name.lower(): fmt for fmt in layout.PAYLOAD_FORMATS}


@dataclass(frozen=True)
class Case:
    """One line of the table, before it is measured."""

    tokens: int
    hidden: int
    top_k: int
    num_experts: int
    payload: str
    routing: str
    schedule: str


@dataclass(frozen=True)
class Inputs:
    """What a rank dispatches."""

    rows: Any
    ids: torch.Tensor
    weights: torch.Tensor


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="of the local world; a launcher's ranks go before")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--top-k", type=int, default=22)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--payload", choices=sorted(PAYLOADS), default="nvfp4")
    parser.add_argument("--routing", choices=sorted(testing.ROUTINGS), nargs="+", default=["uniform"])
    parser.add_argument("--schedule", choices=["auto", "general", "phased"], nargs="+", default=["phased", "general"])
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "a2a.json")
    return parser.parse_args()


def inputs(case: Case, rank: int) -> Inputs:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(case.tokens, case.hidden, generator=generator).bfloat16()
    routing = testing.ROUTINGS[case.routing]
    ids, weights = routing(case.tokens, case.num_experts, case.top_k, generator)
    payload = PAYLOADS[case.payload]
    return Inputs(quant.encode(x, payload) if payload.is_encoded else x, ids, weights)


def measure(group: world.Group, cases: list[Case], iterations: int) -> list[dict[str, list[float]]]:
    """Seconds of each operation and iteration on this rank, for every case. Collective."""
    torch.set_num_threads(1)
    found = []
    for case in cases:
        config = ep_a2a.Config(
            num_experts=case.num_experts,
            top_k=case.top_k,
            hidden=case.hidden,
            max_tokens=case.tokens,
            payload=PAYLOADS[case.payload],
        )
        with ep_a2a.connect(config, group, "cpu") as a2a:
            if case.schedule != "auto":
                a2a.schedule = case.schedule
            found.append(measure_case(a2a, case, iterations))
    return found


def measure_case(a2a: ep_a2a.A2A, case: Case, iterations: int) -> dict[str, list[float]]:
    mine = inputs(case, a2a.rank)
    times: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
    out = torch.empty(case.tokens, case.hidden, dtype=torch.bfloat16)
    for iteration in range(-2, iterations):
        a2a.group.barrier("bench: iteration", 60.0)
        round_: list[Any] = []
        sent = timed(lambda: round_.extend(ep_a2a.dispatch(a2a, mine.rows, mine.ids, mine.weights)))
        received, handle = round_
        if iteration == -2:
            check(a2a, case, received)
            a2a.outbox().fill_(1.0)
        back = timed(lambda: ep_a2a.combine(a2a, handle, out=out))
        if iteration == -2:
            assert torch.equal(out.float(), destinations(case, a2a.rank, a2a.num_ranks).sum(1, keepdim=True) + 0 * out)
        if iteration >= 0:
            for operation, seconds in zip(OPERATIONS, (sent, back, sent + back)):
                times[operation].append(seconds)
    return times


def destinations(case: Case, rank: int, num_ranks: int) -> torch.Tensor:
    return testing.destinations(inputs(case, rank).ids, case.num_experts, num_ranks)


def check(a2a: ep_a2a.A2A, case: Case, received: ep_a2a.Received) -> None:
    """Rows, ids and weights are, bit for bit, those of their sources."""
    for source in range(a2a.num_ranks):
        theirs = inputs(case, source)
        here = destinations(case, source, a2a.num_ranks)[:, a2a.rank]
        assert torch.equal(received.valid[source], here), f"rows from rank {source}"
        rows = theirs.rows[0] if isinstance(theirs.rows, tuple) else theirs.rows
        for got, want in ((received.rows, rows), (received.ids, theirs.ids), (received.weights, theirs.weights)):
            testing.assert_same_bits(got[source][here], want[here], f"from rank {source}")


def moved_bytes(case: Case, num_ranks: int) -> dict[str, int]:
    """Bytes read and written by all ranks."""
    config_planes = layout.planes(PAYLOADS[case.payload], case.hidden, case.top_k)
    row_read = sum(plane.source_bytes + plane.tail_bytes for plane in config_planes)
    row_written = sum(plane.row_bytes for plane in config_planes)
    pairs = sum(int(destinations(case, rank, num_ranks).sum()) for rank in range(num_ranks))
    tokens = num_ranks * case.tokens
    dispatched = tokens * row_read + pairs * row_written
    combined = (pairs + tokens) * 2 * case.hidden
    return {"dispatch": dispatched, "combine": combined, "pair": dispatched + combined}


def main() -> int:
    wanted = options()
    group = world.resolve(None)
    cases = [
        Case(tokens, wanted.hidden, wanted.top_k, wanted.experts, wanted.payload, routing, schedule)
        for routing in wanted.routing
        for tokens in wanted.tokens
        for schedule in wanted.schedule
    ]
    gbps = copy_gbps()
    if group.size > 1:
        kind, num_ranks = "processes", group.size
        own = json.dumps(measure(group, cases, wanted.iterations)).encode()
        by_rank = [json.loads(text) for text in group.all_gather(own, "bench: times", 60.0)]
    else:
        kind, num_ranks = "local", wanted.ranks
        by_rank = ep_a2a.local(num_ranks).run(measure, cases, wanted.iterations)
    if group.rank != 0:
        return 0
    run, rows = Run.here(), []
    for i, case in enumerate(cases):
        num_bytes = moved_bytes(case, num_ranks)
        for operation in OPERATIONS:
            times = slowest_us([rank[i][operation] for rank in by_rank])
            fields = {"op": operation, "variant": "ours", "schedule": case.schedule, "world": kind, "ranks": num_ranks}
            fields |= {"choice": "auto" if case.schedule == "auto" else "forced", "tokens": case.tokens}
            fields |= {"hidden": case.hidden, "top_k": case.top_k, "payload": case.payload, "routing": case.routing}
            rows.append(result(run, times, num_bytes[operation], gbps, num_sms=None, **fields))
    show(rows, gbps)
    write(rows, wanted.out)
    print(f"{len(rows)} rows in {wanted.out}")
    return 0


def show(rows: list[dict[str, Any]], gbps: float) -> None:
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    title = (
        f"{first['ranks']} ranks ({first['world']}), hidden {first['hidden']}, top-{first['top_k']}, {first['payload']}"
    )
    table = Table(title=f"{title}; copy {gbps:.1f} GB/s")
    for heading in ("op", "schedule", "routing", "tokens", "us", "min", "max", "MB", "GB/s", "floor us"):
        table.add_column(heading, justify="left" if heading in ("op", "schedule", "routing") else "right")
    for row in rows:
        cells = [row["op"], row["schedule"], row["routing"], row["tokens"]]
        cells += [f"{row[name]:.0f}" for name in ("us", "us_min", "us_max")]
        cells += [f"{row['bytes'] / 1e6:.2f}", f"{row['bytes'] / row['us'] / 1e3:.3f}", f"{row['floor_us']:.0f}"]
        table.add_row(*map(str, cells), end_section=row["op"] == "pair")
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    console.print(
        "pair = dispatch + combine; MB = read + written on all ranks; floor = MB at the copy rate of this run"
    )


if __name__ == "__main__":
    sys.exit(main())
