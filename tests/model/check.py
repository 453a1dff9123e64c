"""Searches the model of the round with spin, every configuration to its end; prints one line of JSON.

    python tests/model/check.py [CONFIGURATION ...]

Each is built and run in build/model/NAME, with bounded time and memory. Exits with 1 if spin finds an error, if a
search is not complete, or if the model has a statement that none of all configurations reaches.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("round.pml")
MEMORY_MIB = 4000
SEARCH_S = 900
MAX_DEPTH = 100_000
DEFAULTS = "C=1 ROUTES=1 ENDS=1"


class Configuration(NamedTuple):
    """Macros of round.pml; those that are not named are as in DEFAULTS."""

    macros: str
    cycles: bool = False  # search for a cycle instead: the model always moves on


CONFIGURATIONS = {
    "rounds": Configuration("N=3 R=3 ROUTES=1"),
    "routes": Configuration("N=3 R=2 ROUTES=2"),
    "hear": Configuration("N=3 R=2 ROUTES=0 DEADLINE=2"),
    "death": Configuration("N=3 R=2 ROUTES=0 DEADLINE=2 DEATH"),
    "names": Configuration("N=3 R=2 ROUTES=0 DEADLINE=3 DEATH"),
    "mixed": Configuration("N=3 R=1 ROUTES=0 DEADLINE=2 ENDS=2"),
    "everything": Configuration("N=2 R=3 ROUTES=2 DEADLINE=1 ENDS=2 DEATH MISUSE"),
    "channels": Configuration("N=3 C=2 R=1 ROUTES=0"),
    "channels_rounds": Configuration("N=2 C=2 R=2 ROUTES=1"),
    "channels_hear": Configuration("N=2 C=2 R=2 ROUTES=0 DEADLINE=2"),
    "channels_death": Configuration("N=2 C=2 R=1 ROUTES=0 DEADLINE=2 DEATH"),
    "progress": Configuration("N=2 R=2 ROUTES=0 DEADLINE=1 ENDS=2 DEATH", cycles=True),
}

# One mistake each, in the smallest world that shows it.
MUTATIONS = {
    "M_FLAG_FIRST": "N=2 R=1",
    "M_NO_DISPATCH_WAIT": "N=2 R=1",
    "M_NO_END_WAIT": "N=2 R=2",
    "M_ONLY_HOLDERS": "N=3 R=2",
    "M_EMPTY_SKIPS": "N=3 R=2",
    "M_COUNT_IGNORED": "N=2 R=2",
    "M_END_FIRST": "N=2 R=1",
    "M_POISON_OUTBOX": "N=2 R=2",
    "M_POISON_PLANES": "N=2 R=2",
    "M_MIXED_ENDS": "N=2 R=1 ENDS=2 DEADLINE=2",
    "M_NO_ABORT_WORD": "N=2 R=1 DEADLINE=2",
    "M_DEAF_END": "N=2 R=1 DEADLINE=2",
    "M_SILENT_ADOPTION": "N=3 R=1 ROUTES=0 DEADLINE=2 DEATH",
    "M_NO_TELL": "N=3 R=1 ROUTES=0 DEADLINE=3 DEATH",
    "M_NO_LOOK": "N=3 R=1 ROUTES=0 DEADLINE=3 DEATH",
    "M_STICKY_IGNORED": "N=2 R=2 DEADLINE=1",
    "M_FREE_ORDER": "N=2 C=2 R=1 ROUTES=0",
}
HARMLESS = {"M_GREATER": "N=2 R=3"}  # a wait for >= n: no waiter ever sees another epoch than n-1 or n


def missing_tool() -> str | None:
    """The first program that a search needs and that is not installed; None if all are."""
    return next((tool for tool in ("spin", "cc") if shutil.which(tool) is None), None)


def search(name: str, configuration: Configuration) -> dict[str, Any]:
    """Build and run one exhaustive search; what it found as numbers and texts."""
    folder = ROOT / "build" / "model" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    named = dict(macro.partition("=")[::2] for macro in f"{DEFAULTS} {configuration.macros}".split())
    macros = [f"-D{macro}={value or 1}" for macro, value in named.items()]
    kind = ["-DNP"] if configuration.cycles else ["-DSAFETY"]
    build = ["cc", "-O2", "-w", "-DCOLLAPSE", "-DVECTORSZ=2048", f"-DMEMLIM={MEMORY_MIB}", *kind, "-o", "pan", "pan.c"]
    run = ["./pan", f"-m{MAX_DEPTH}", "-w24", *(["-l"] if configuration.cycles else [])]
    text = ""
    # -o3: statements are not merged, so that each one is counted as reached or not
    for command in (["spin", "-o3", *macros, "-a", str(SOURCE)], build, run):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SEARCH_S, check=False)
        text = done.stdout + done.stderr
        if done.returncode != 0:
            raise RuntimeError(f"{name}: {' '.join(command)} gave {done.returncode}:\n{text[-2000:]}")
    (folder / "out.txt").write_text(text)
    return {"name": name, "macros": configuration.macros, **read(text, configuration.cycles)}


def read(text: str, cycles: bool = False) -> dict[str, Any]:
    """The numbers in what pan prints."""
    states, errors = re.search(r"(\d+) states, stored", text), re.search(r"errors: (\d+)", text)
    if states is None or errors is None:
        raise RuntimeError(f"pan did not say what it found:\n{text[-2000:]}")
    if cycles and "non-progress cycles" not in text:
        raise RuntimeError(f"pan did not look for cycles:\n{text[:2000]}")
    found = re.search(r"^pan:\d+: (.*)$", text, re.MULTILINE)
    incomplete = re.search(r"max search depth too small|out of memory|Search not completed|hash-table full", text)
    return {
        "states": int(states[1]),
        "errors": int(errors[1]),
        "found": found[1] if found else "",
        "complete": incomplete is None,
        "unreached_lines": sorted({int(line) for line in re.findall(r"round\.pml:(\d+), state", text)}),
    }


def complaints(result: dict[str, Any]) -> list[str]:
    """What is wrong with a search that should be clean."""
    wrong = []
    if result["errors"]:
        wrong.append(f"{result['name']}: {result['errors']} errors, the first: {result['found']}")
    if not result["complete"]:
        wrong.append(f"{result['name']}: the search is not complete (depth {MAX_DEPTH}, {MEMORY_MIB} MiB)")
    return wrong


def never_reached(results: list[dict[str, Any]]) -> list[int]:
    """Lines of round.pml that each of these searches leaves out, or has no statement of."""
    compiled, reached = set(), set()
    for result in results:
        text = (ROOT / "build" / "model" / result["name"] / "pan.m").read_text()
        lines = {int(line) for line in re.findall(r"round\.pml:(\d+)", text)}
        compiled |= lines
        reached |= lines - set(result["unreached_lines"])
    return sorted(compiled - reached)


def main(names: list[str]) -> int:
    """Search the named configurations, or all."""
    unknown = sorted(set(names) - set(CONFIGURATIONS))
    if unknown:
        print(f"no configuration {unknown}; there are {sorted(CONFIGURATIONS)}", file=sys.stderr)
        return 2
    if tool := missing_tool():
        print(f"{tool} is not installed", file=sys.stderr)
        return 2
    wrong, results = [], []
    for name in names or CONFIGURATIONS:
        result = search(name, CONFIGURATIONS[name])
        results.append(result)
        wrong += complaints(result)
    if not names and (lines := never_reached(results)):
        wrong.append(f"lines {lines} of round.pml are reached in no configuration")
    totals = {key: sum(result[key] for result in results) for key in ("states", "errors")}
    print(json.dumps({**totals, "configurations": results}))
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
