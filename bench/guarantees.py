"""What the protocol withstands: planted faults that are found, hostile schedules that find none, the model's states.

    python bench/guarantees.py [--seeds 1000] [--rounds 50] [--out bench/results/guarantees.json]

Rows of kind `planted`: each fault in a build of its own, run until a seed finds it; that seed alone must then fail in
the same way (`replayed`). Rows of kind `schedule`: the protocol as it is. A row of kind `model`: what
`tests/model/check.py` prints.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import harness  # noqa: E402
from ep_a2a.config import Config  # noqa: E402
from ep_a2a.layout import BF16, FP32  # noqa: E402
from tests.test_native import build, write_plan  # noqa: E402

FAULTS = {
    "no_cta_release": "no release of a CTA before the counter",
    "no_release": "no release at system scope before the flag",
    "no_bulk_wait": "no wait for bulk stores before the release",
    "no_acquire": "no acquire in a second CTA of the kernel that waits",
    "flag_first": "the flag before the rows",
    "all_parts": "flags of rows that other CTAs send",
    "no_end_wait": "round n+1 sent before the peer's end of round n",
    "partial_waits": "no dispatch wait without rows, an end wait for the owners of rows alone",
    "unbounded_scan": "the bitmap read past the count",
    "early_poison": "the outbox poisoned outside its window",
    "ignore_sticky": "the sticky word ignored",
}
PLANTED_SEEDS, PLANTED_ROUNDS = 300, 20
NUM_PROCESSES = 2
KINDS = {"lost": "lost", "stale": "stale", "hangs": "hang"}  # column: what the program says
Row = dict[str, Any]


def plans(folder: Path) -> list[Path]:
    """Layouts of two and three ranks, small enough that a round is some thousand steps."""
    made = []
    for num_ranks, max_tokens in ((2, 10), (3, 5)):  # two tiles, so that a rank has flags of two CTAs, and one
        config = Config(
            num_experts=2 * num_ranks - 1, top_k=2, hidden=16, max_tokens=max_tokens, payload=BF16, combine=FP32
        )
        made.append(write_plan(folder / f"plan{num_ranks}", config, num_ranks))
    return made


def hostile_program(fault: str = "") -> Path:
    """The program of tests/native/hostile.cpp, built with that fault or none."""
    return build(f"hostile{'-' if fault else ''}{fault}", fault=fault, hostile=True) / "hostile"


def run_seeds(program: Path, plan_files: Sequence[Path], rounds: int, first: int, count: int) -> Row:
    """What the program prints: totals, or the first seed that fails, with `kind`, `what`, `steps` and `schedule`."""
    words = [str(program), str(rounds), str(first), str(count), *map(str, plan_files)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30 + rounds * count)
    found: Row = json.loads(done.stdout) if done.returncode in (0, 1) and done.stdout else {}
    if not found or found.get("kind", "lost") not in KINDS.values():
        raise RuntimeError(f"{words}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found


def outcomes(program: Path, plan_files: Sequence[Path], rounds: int, first: int, count: int) -> list[Row]:
    """All seeds of [first, first + count) that fail, and the totals of those behind the last of them."""
    rows, last = [], first + count
    while first < last:
        rows.append(run_seeds(program, plan_files, rounds, first, last - first))
        first = rows[-1].get("seed", last) + 1
    return rows


def schedule(plan_files: Sequence[Path], seeds: int, rounds: int) -> Row:
    """One row: the protocol as it is under `seeds` schedules, in two processes at a time.

    `aborts` counts ranks that were stopped, `misnamed` ranks that blamed one which only waited for the stopped one.
    """
    program, chunk = hostile_program(), 25
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        jobs = [
            pool.submit(outcomes, program, plan_files, rounds, first, min(chunk, seeds - first))
            for first in range(0, seeds, chunk)
        ]
        rows = [row for job in jobs for row in job.result()]
    for row in rows:
        if "kind" in row:
            print(f"seed {row['seed']}: {row['kind']}: {row['what']}")
    counts = {name: sum(row.get("kind") == kind for row in rows) for name, kind in KINDS.items()}
    more = {name: sum(row.get(name, 0) for row in rows) for name in ("aborts", "misnamed")}
    return {"kind": "schedule", "seeds": seeds, "rounds": rounds, **counts, **more}


def planted(fault: str, plan_files: Sequence[Path]) -> Row:
    """One row: the first seed that finds the fault (`seeds`: how many were tried), and whether it fails again alike."""
    program = hostile_program(fault)
    found = run_seeds(program, plan_files, PLANTED_ROUNDS, 0, PLANTED_SEEDS)
    row: Row = {"kind": "planted", "fault": fault, "found": False, "replayed": False, "seeds": PLANTED_SEEDS}
    if "kind" in found:
        again = run_seeds(program, plan_files, PLANTED_ROUNDS, found["seed"], 1)
        row |= {"found": True, "replayed": again == found, "seeds": found["seed"] + 1, "what": found["what"]}
    return row


def model() -> list[Row]:
    """The model checker's states and errors, where there is one."""
    checker = ROOT / "tests/model/check.py"
    if not checker.is_file():
        return []
    done = subprocess.run([sys.executable, str(checker)], capture_output=True, text=True, timeout=1800, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return [{"kind": "model", "states": found["states"], "errors": found["errors"]}]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/guarantees.json")
    chosen = parser.parse_args()
    run = asdict(harness.Run.here())
    with tempfile.TemporaryDirectory() as folder:
        files = plans(Path(folder))
        rows = [planted(fault, files) for fault in FAULTS]
        rows += [schedule(files, chosen.seeds, chosen.rounds), *model()]
    for row in rows:
        print(json.dumps(row))
    harness.write([{**row, **run} for row in rows], chosen.out)
    good = {"planted": lambda r: r["replayed"], "model": lambda r: not r["errors"]}
    good["schedule"] = lambda r: not any(r[name] for name in KINDS)
    return int(not all(good[row["kind"]](row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
