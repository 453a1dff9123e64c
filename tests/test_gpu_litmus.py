"""The ordering contracts of cuda/sync.cuh on a GPU: tests/native/litmus.cu counts what is wrong in many rounds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "build/bin/litmus"
ROUNDS = 20_000
CONTRACTS = (
    "dispatch_flag.chain",
    "windows.planes",
    "end_flag.chain",
    "windows.outbox",
    "acquire.each_cta",
    "bulk.store",
    "bulk.load",
    "bulk.store_and_load",
    "parts.store",
    "parts.bulk",
    "abort_word.rows",
    "abort_word.record",
    "record.status",
    "record.input",
)
CONTROLS = (
    "flag_first",
    "relaxed",
    "parts.of_others",
    "acquire.missing",
    "end_flag.early",
    "end_flag.relaxed",
    "bulk.store_not_waited_for",
    "bulk.store_not_fenced",
    "bulk.load_not_fenced",
    "record.status_first",
    "record.input_first",
)
Line = dict[str, Any]
Record = Callable[[str, object], None]

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda ranks: f"{ranks}ranks")
def lines(request: pytest.FixtureRequest) -> dict[str, Line]:
    """What the program printed, by name; its exit code agrees with it."""
    if not PROGRAM.is_file():
        pytest.skip("build/bin/litmus is not built (launch/test_gpu.sh builds it)")
    done = subprocess.run([PROGRAM, str(ROUNDS), str(request.param)], capture_output=True, text=True, timeout=100)
    assert done.returncode in (0, 1), f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    found = {line["litmus"]: line for line in map(json.loads, done.stdout.splitlines())}
    broken = [n for n in found if found[n]["late"] or found[n]["unseen"] or (n in CONTRACTS and found[n]["wrong"])]
    assert done.returncode == int(bool(broken) or not found["flag_first"]["wrong"]), (broken, done.stdout)
    return found


def keep(line: Line, record_property: Record) -> None:
    for name in ("litmus", "rounds", "wrong", "control", "ranks", "gpus"):
        record_property(name, line[name])


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_holds(lines: dict[str, Line], name: str, record_property: Record) -> None:
    line = lines[name]
    keep(line, record_property)
    assert not line["control"] and line["rounds"] >= ROUNDS
    assert line["seen"] > 0 and (line["unseen"], line["late"]) == (0, 0), line
    assert line["wrong"] == 0, line


@pytest.mark.parametrize("name", CONTROLS)
def test_a_weaker_order_is_tried(lines: dict[str, Line], name: str, record_property: Record) -> None:
    line = lines[name]
    keep(line, record_property)
    assert line["control"] and (line["unseen"], line["late"]) == (0, 0), line
    assert line["wrong"] > 0 or name != "flag_first", "rows that come after their flag are not seen to be missing"


def test_nothing_else_was_printed(lines: dict[str, Line]) -> None:
    assert lines.keys() == {*CONTRACTS, *CONTROLS}
