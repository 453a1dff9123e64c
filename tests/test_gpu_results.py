"""The rows that a run of the GPU tests leaves behind, from made-up reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import gpu_results

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest">
<testcase classname="tests.test_x" name="test_a" time="1.5"><properties>
  <property name="world" value="processes"/><property name="ranks" value="8"/></properties></testcase>
<testcase classname="tests.test_x" name="test_b" time="0.5"><properties>
  <property name="world" value="processes"/><property name="ranks" value="8"/></properties>
  <failure message="no">first line
AssertionError: rank 3</failure></testcase>
<testcase classname="tests.test_x" name="test_c" time="0.1"><skipped message="no mpirun"/></testcase>
<testcase classname="tests.test_x" name="test_d[memcheck]" time="2"><properties>
  <property name="tool" value="memcheck"/><property name="errors" value="0"/></properties></testcase>
<testcase classname="tests.test_x" name="test_e" time="2"><properties>
  <property name="rounds" value="20000"/><property name="wrong" value="3"/><property name="control" value="True"/>
  </properties></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "local.xml").write_text(REPORT)
    (tmp_path / "local.status").write_text("1 12\n")
    return tmp_path


def run(folder: Path, *words: str, suites: tuple[str, ...] = ("local",)) -> tuple[int, list[gpu_results.Row]]:
    out = folder / "out.json"
    code = gpu_results.main([str(folder), *suites, "--out", str(out), *words])
    return code, json.loads(out.read_text())


def test_rows_by_world_and_ranks(folder: Path) -> None:
    rows = gpu_results.rows_of(gpu_results.read_suite(folder, "local"))
    assert rows[:2] == [
        {"suite": "local", "world": "processes", "ranks": 8, "passed": 1, "failed": 1, "skipped": 0, "seconds": 2.0},
        {"suite": "local", "world": "local", "ranks": None, "passed": 2, "failed": 0, "skipped": 1, "seconds": 4.1},
    ]


def test_rows_of_their_own(folder: Path) -> None:
    rows = gpu_results.rows_of(gpu_results.read_suite(folder, "local"))[2:]
    place = {"suite": "local", "world": "local", "ranks": None, "outcome": "passed", "seconds": 2.0}
    assert rows == [
        {**place, "test": "test_x::test_d[memcheck]", "tool": "memcheck", "errors": 0},
        {**place, "test": "test_x::test_e", "rounds": 20000, "wrong": 3, "control": True},
    ]


def test_every_row_says_where_it_ran(folder: Path) -> None:
    code, rows = run(folder, "--commit", "abc")
    assert code == 1 and len(rows) == 4
    assert all(row["commit"] == "abc" and row["run"] and row["device"] for row in rows)
    assert all(row["versions"].keys() == {"torch", "cuda", "nvshmem", "driver"} for row in rows)


def test_rows_of_other_commits_go_and_quick_adds(folder: Path) -> None:
    assert len(run(folder, "--commit", "old")[1]) == 4
    quick = run(folder, "--commit", "new", "--quick")[1]
    assert [(row["commit"], row.get("quick", False)) for row in quick] == [("old", False)] * 4 + [("new", True)] * 4
    full = run(folder, "--commit", "new")[1]
    assert [(row["commit"], row.get("quick", False)) for row in full] == [("new", True)] * 4 + [("new", False)] * 4
    (folder / "soak.status").write_text("1 3")
    assert [row["suite"] for row in run(folder, "--commit", "new", suites=("soak",))[1]] == ["local"] * 8 + ["soak"]


@pytest.mark.parametrize(
    ("status", "report", "says"),
    [
        ("124 300", None, "ended at its time limit, after 300 s"),
        ("137 300", REPORT, "ended at its time limit, after 300 s"),
        ("4 2", None, "no report, exit code 4"),
        ("1 2", "<testsuites", "cannot be read"),
        ("4 2", "<testsuites/>", "exit code 4"),
        ("5 2", "<testsuites/>", "exit code 5"),
    ],
)
def test_a_suite_without_a_report_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str, report: str | None, says: str
) -> None:
    (tmp_path / "soak.status").write_text(status)
    (tmp_path / "soak.log").write_text("its last line\n")
    if report is not None:
        (tmp_path / "soak.xml").write_text(report)
    code, rows = run(tmp_path, suites=("soak",))
    assert code == 1
    assert [row["failed"] for row in rows if says in row.get("error", "")] == [1]
    shown = capsys.readouterr().out
    assert "failed: soak" in shown and ("its last line" in shown or report == REPORT)


def test_failures_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder)[0] == 1
    shown = capsys.readouterr().out
    assert "--- local: test_x::test_b\nfirst line\nAssertionError: rank 3" in shown
    assert "processes" in shown and "seconds" in shown


def test_a_quick_run_may_leave_all_tests_out(tmp_path: Path) -> None:
    (tmp_path / "soak.status").write_text("5 1")
    (tmp_path / "soak.xml").write_text("<testsuites/>")
    assert run(tmp_path, "--quick", suites=("soak",)) == (0, [])
