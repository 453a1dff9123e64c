"""What launch/test_gpu.sh found, as rows of JSON and as a table on the screen.

    python tests/gpu_results.py FOLDER SUITE... [--out bench/results/h200_tests.json] [--commit HASH] [--quick]
                                [--ranks-per-gpu N]

FOLDER holds for each suite SUITE.status ("exit code, seconds"), SUITE.xml (pytest's JUnit report; none if the suite was
ended) and SUITE.log. A row for each suite, world and number of ranks counts its tests; a test says by
`record_property` which world and ranks it had. A test that records `tool`, `errors`, `rounds`, `wrong` or
`told_after_s` has a row of its own besides, with all that it recorded.

A run replaces the rows of other commits and those of its own suites with as many ranks a GPU; with --quick it adds to
what is there. Ends with 1 unless every suite passed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import harness  # noqa: E402

OWN_ROW = ("tool", "errors", "rounds", "wrong", "told_after_s")
TESTS_FAILED, NO_TESTS = 1, 5  # pytest's exit codes
ENDED = (124, 137)  # those of `timeout`
SHOWN_FAILURES, SHOWN_LINES = 3, 30
Row = dict[str, Any]


@dataclass(frozen=True)
class Test:
    """A test case of a report."""

    name: str
    outcome: str  # "passed", "failed" or "skipped"
    seconds: float
    properties: dict[str, Any]
    text: str  # of a failure or a skip


@dataclass
class Suite:
    """What became of a suite. `error` says why there is no report."""

    name: str
    exit_code: int
    seconds: float
    tests: list[Test] = field(default_factory=list)
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and self.exit_code != TESTS_FAILED


def value(text: str) -> Any:
    """A recorded property as a number, true, false or null where it reads as one."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else "null" if text == "None" else text)
    except ValueError:
        return text


def read_report(path: Path) -> list[Test]:
    """The test cases of a JUnit report."""
    tests = []
    for case in ElementTree.parse(path).iter("testcase"):
        found = {tag: case.find(tag) for tag in ("failure", "error", "skipped")}
        bad = next((found[tag] for tag in ("failure", "error") if found[tag] is not None), None)
        outcome = "failed" if bad is not None else "passed" if found["skipped"] is None else "skipped"
        said = bad if bad is not None else found["skipped"]
        text = "" if said is None else said.text or said.get("message", "")
        properties = {p.get("name", ""): value(p.get("value", "")) for p in case.iter("property")}
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        tests.append(Test(name, outcome, float(case.get("time", 0)), properties, text))
    return tests


def read_suite(folder: Path, name: str, may_be_empty: bool = False) -> Suite:
    """A suite's status and report; only of a quick run may all tests be left out."""
    exit_code, seconds = (folder / f"{name}.status").read_text().split()
    suite = Suite(name, int(exit_code), float(seconds))
    report = folder / f"{name}.xml"
    if suite.exit_code in ENDED:
        suite.error = f"ended at its time limit, after {seconds} s"
    elif not report.is_file():
        suite.error = f"no report, exit code {exit_code}"
    elif suite.exit_code not in (0, TESTS_FAILED, NO_TESTS) or (suite.exit_code == NO_TESTS and not may_be_empty):
        suite.error = f"pytest ended with exit code {exit_code}"
    if report.is_file() and report.stat().st_size:
        try:
            suite.tests = read_report(report)
        except ElementTree.ParseError as error:
            suite.error = suite.error or f"a report that cannot be read: {error}"
    return suite


def rows_of(suite: Suite) -> list[Row]:
    """A row for each world and number of ranks, then one for each test that has its own."""
    groups: dict[tuple[Any, Any], list[Test]] = {}
    for test in suite.tests:
        groups.setdefault((test.properties.get("world", "local"), test.properties.get("ranks")), []).append(test)
    rows: list[Row] = []
    for (world, ranks), tests in groups.items():
        counts = {outcome: sum(t.outcome == outcome for t in tests) for outcome in ("passed", "failed", "skipped")}
        seconds = round(sum(t.seconds for t in tests), 2)
        rows.append({"suite": suite.name, "world": world, "ranks": ranks, **counts, "seconds": seconds})
    if suite.error:
        counts = {"passed": 0, "failed": 1, "skipped": 0}
        rows.append({"suite": suite.name, "world": "local", "ranks": None, **counts, "seconds": suite.seconds,
                     "error": suite.error})  # fmt: skip
    for test in suite.tests:
        if any(name in test.properties for name in OWN_ROW):
            place = {"world": test.properties.get("world", "local"), "ranks": test.properties.get("ranks")}
            own = {"suite": suite.name, **place, "test": test.name, "outcome": test.outcome} | test.properties
            rows.append({**own, "seconds": round(test.seconds, 2)})
    return rows


def merged(old: Sequence[Row], new: Sequence[Row], commit: str, quick: bool) -> list[Row]:
    """The rows of the file after this run."""
    if quick:
        return [*old, *({**row, "quick": True} for row in new)]

    def what(row: Row) -> tuple[str, int | None]:
        return row["suite"], row.get("ranks_per_gpu")

    again = set(map(what, new))
    kept = [row for row in old if row.get("commit") == commit and (row.get("quick") or what(row) not in again)]
    return [*kept, *new]


# ---- where it ran ------------------------------------------------------------------------------------------------


def smi(field_names: str) -> list[list[str]]:
    """What nvidia-smi answers, a list of fields for each GPU; empty without one."""
    words = ["nvidia-smi", f"--query-gpu={field_names}", "--format=csv,noheader"]
    try:
        shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[part.strip() for part in line.split(",")] for line in shown.splitlines() if line.strip()]


def place() -> Row:
    """`device` and `versions` of all rows of this run."""
    import torch

    gpus = smi("name,driver_version")
    names = sorted({name for name, _ in gpus})
    driver = gpus[0][1] if gpus else None
    try:
        nvshmem = importlib.metadata.version("nvidia-nvshmem-cu13")
    except importlib.metadata.PackageNotFoundError:
        nvshmem = None
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "nvshmem": nvshmem, "driver": driver}
    device = f"{len(gpus)} x {' and '.join(names)}, driver {driver}" if gpus else "no GPU"
    return {"device": device, "versions": versions}


# ---- on the screen -----------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> None:
    """The counts of every row that has some."""
    heads = ("suite", "world", "ranks", "passed", "failed", "skipped", "seconds")
    lines = [["" if row[h] is None else str(row[h]) for h in heads] for row in rows if "passed" in row]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in [list(heads), *lines]) for i in range(len(heads))]
        for line in [list(heads), *lines]:
            print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())
        return
    shown = Table(*heads)
    for line in lines:
        shown.add_row(*line, style="red" if line[4] != "0" else None)
    Console().print(shown)


def tails(suites: Sequence[Suite], folder: Path) -> None:
    """The ends of the first failures, and of the log of a suite that has no report."""
    left = SHOWN_FAILURES
    for suite in suites:
        log = folder / f"{suite.name}.log"
        texts = [(test.name, test.text) for test in suite.tests if test.outcome == "failed"]
        if not suite.passed and not texts:
            texts.append((suite.error or f"exit code {suite.exit_code}", log.read_text() if log.is_file() else ""))
        for name, text in texts[:left]:
            print(f"\n--- {suite.name}: {name}", *text.splitlines()[-SHOWN_LINES:], sep="\n")
        left -= len(texts[:left])


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("suites", nargs="+")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/h200_tests.json")
    parser.add_argument("--commit", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ranks-per-gpu", type=int, help="of the suite `processes`, where it was not its own choice")
    given = parser.parse_args(words)
    run = asdict(harness.Run.here())
    about = run | place() | ({"commit": given.commit} if given.commit else {})
    if given.ranks_per_gpu:
        about["ranks_per_gpu"] = given.ranks_per_gpu
    suites = [read_suite(given.folder, name, given.quick) for name in given.suites]
    rows = [row | about for suite in suites for row in rows_of(suite)]
    old = json.loads(given.out.read_text()) if given.out.is_file() else []
    harness.write(merged(old, rows, about["commit"], given.quick), given.out)
    table(rows)
    tails(suites, given.folder)
    failed = [suite.name for suite in suites if not suite.passed]
    print(f"\n{given.out}: {len(rows)} rows; " + (f"failed: {', '.join(failed)}" if failed else "all suites passed"))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
