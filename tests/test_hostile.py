"""The protocol under a scheduler and a memory that do their worst, and faults that this must find and replay.

tests/native/hostile.cpp runs the ranks; bench/guarantees.py keeps what a full run finds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import guarantees

Row = guarantees.Row


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return guarantees.plans(tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module")
def program() -> Path:
    return guarantees.hostile_program()


@pytest.fixture(scope="module")
def outcome(program: Path, plans: list[Path]) -> Row:
    return guarantees.run_seeds(program, plans, 20, 0, 20)


def test_nothing_is_lost_or_stale_and_all_learn_of_aborts(outcome: Row) -> None:
    assert "kind" not in outcome, outcome
    assert (outcome["seeds"], outcome["rounds"]) == (20, 400)


def test_the_run_is_hostile(outcome: Row) -> None:
    assert outcome["stale_loads"] > 1000 and outcome["aborts"] > 2 and outcome["steps"] > 1_000_000, outcome


def test_a_seed_replays(program: Path, plans: list[Path], outcome: Row) -> None:
    assert guarantees.run_seeds(program, plans, 20, 0, 20) == outcome
    alone = [guarantees.run_seeds(program, plans, 5, seed, 1) for seed in (2, 3, 4)]
    assert len({one["schedule"] for one in alone}) == 3
    assert guarantees.run_seeds(program, plans, 5, 4, 1) == alone[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_seeds(plans: list[Path]) -> None:
    row = guarantees.schedule(plans, 1000, 50)
    assert (row["lost"], row["stale"], row["hangs"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", guarantees.FAULTS)
def test_a_planted_fault_is_found_and_replayed(plans: list[Path], fault: str) -> None:
    row = guarantees.planted(fault, plans)
    assert row["found"], row
    assert row["replayed"], row
