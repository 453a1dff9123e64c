"""What lies between two GPUs of a host: runs the program of bench/links.cu and writes its rows.

    python bench/links.py PROGRAM [--seconds N] [--commit HASH] [--out bench/results/h200x2_links.json]

A row has `op`, `direction`, `ctas`, `threads`, `row_bytes` (0: one contiguous piece), `bytes` each way, `gbps` each way
and `us`, the median of the slower GPU. Every variant compared what arrived; `wrong` counts vectors that differed.
Ends with 1 where something did, or where not all variants came.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import harness  # noqa: E402

Row = dict[str, Any]


def read(text: str) -> tuple[list[Row], Row]:
    """The rows that the program printed, and what else it said: `device`, `left_out`."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    other: Row = {"device": "", "left_out": 0}
    for line in lines:
        if "op" not in line:
            other |= line
    return [line for line in lines if "op" in line], other


def best(rows: Sequence[Row]) -> list[str]:
    """The fastest variant of each operation and direction, and what the smallest things take, as lines."""
    lines = []
    large = [row for row in rows if row["repeats"] == 1]
    for op, direction in dict.fromkeys((row["op"], row["direction"]) for row in large):
        row = max((r for r in large if (r["op"], r["direction"]) == (op, direction)), key=lambda r: r["gbps"])
        where = f"{row['ctas']} CTAs of {row['threads']}, rows of {row['row_bytes']} bytes"
        lines.append(f"{op:16} {direction:10} {row['gbps']:7.1f} GB/s  {where}")
    small = [row for row in rows if row["repeats"] > 1]
    return lines + [f"{r['op']:16} {r['bytes']:9} bytes {r['us']:9.2f} us, {r['ctas']} CTAs" for r in small]


def main(words: Sequence[str]) -> int:
    """Run the program, write and show what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/h200x2_links.json")
    given = parser.parse_args(words)
    done = subprocess.run([given.program, str(given.seconds)], stdout=subprocess.PIPE, text=True)
    rows, other = read(done.stdout)
    if not rows:
        print(f"{given.program}: no rows, exit code {done.returncode}")
        return 1
    run = dataclasses.replace(harness.Run.here(commit=given.commit), device=other["device"])
    about = dataclasses.asdict(run)
    harness.write([row | about for row in rows], given.out)
    print("\n".join(best(rows)))
    wrong = [row for row in rows if row["wrong"]]
    print(
        f"{given.out}: {len(rows)} rows; {len(wrong)} wrong, {other['left_out']} left out, exit code {done.returncode}"
    )
    return int(bool(wrong or other["left_out"] or done.returncode))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
