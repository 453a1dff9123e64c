"""The model of the round: tags and constants as in the sources; spin finds no error in it, and each mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.model import check

ROOT = Path(__file__).resolve().parent.parent
MODEL = (ROOT / "tests" / "model" / "round.pml").read_text()
SYNC = (ROOT / "cuda" / "sync.cuh").read_text()
ABI = (ROOT / "cuda" / "abi.h").read_text()


def tags(text: str) -> set[str]:
    return set(re.findall(r"\[([a-z]+(?:_[a-z]+)*\.[a-z_]+)\]", text))


def model_constant(name: str) -> int:
    found = re.search(rf"^#define {name} (\d+)$", MODEL, re.MULTILINE)
    assert found, f"round.pml defines no {name}"
    return int(found[1])


def test_every_contract_is_a_step_of_the_model():
    contracts, steps = tags(SYNC), tags(MODEL)
    assert len(contracts) >= 20
    assert contracts == steps, (
        f"only in sync.cuh: {sorted(contracts - steps)}; only in round.pml: {sorted(steps - contracts)}"
    )


def test_words_have_the_layout_of_the_kernels():
    names = ("EPOCH", "PHASE", "CULPRIT", "REPORTER")
    epoch, phase, culprit, reporter = (model_constant(f"{name}_SHIFT") for name in names)
    kernels = SYNC + "".join((ROOT / "cuda" / name).read_text() for name in ("dispatch.cu", "combine.cu"))
    for text in (
        f"epoch_of(uint64_t word) {{ return word >> {epoch}; }}",
        f"return why.epoch_wanted << {epoch} | why.late_in << {phase} | why.culprit << {culprit} | "
        f"why.reporter << {reporter} | why.failure;",
        f"flag = state.epoch() << {epoch} | counts.sent;",
        f"publish_warp(c, c.end_flags_offset, epoch << {epoch} | phase);",
        f"//   dispatch_flag[source, part]   epoch << {epoch} | token count ",
        f"//   end_flag[source]        epoch << {epoch} | phase (combine or release) ",
        f"//   abort_word[source]      epoch << {epoch} | phase << {phase} | culprit << {culprit} | "
        f"reporter << {reporter} | failure ",
    ):
        assert text in kernels, f"the model's words differ from the kernels': {text!r} is nowhere"


def test_phases_and_failures_have_the_numbers_of_abi_h():
    enums = dict(re.findall(r"\bk(\w+) = (\d+)", "".join(re.findall(r"enum (?:Phase|Failure) .*", ABI))))
    names = (
        "PhaseDispatch",
        "PhaseCombine",
        "PhaseRelease",
        "PeerTimeout",
        "ChannelMisuse",
        "RoundMismatch",
        "PeerLeft",
    )
    model = {name: re.sub(r"(?<!^)([A-Z])", r"_\1", name.removeprefix("Phase")).upper() for name in names}
    assert {name: int(enums[name]) for name in names} == {n: model_constant(m) for n, m in model.items()}
    assert set(enums) - set(names) == {"Healthy"}, "round.pml does not know all phases and failures"


def test_every_mistake_of_the_model_has_its_search():
    assert set(re.findall(r"\bM_[A-Z_]+\b", MODEL)) == {*check.MUTATIONS, *check.HARMLESS}


def test_check_reads_what_pan_prints():
    clean = 'State-vector 9 byte, depth reached 3, errors: 0\n  12 states, stored\n\tround.pml:7, state 2, "x"\n'
    found = check.read(clean)
    assert (found["states"], found["errors"], found["complete"], found["unreached_lines"]) == (12, 0, True, [7])
    assert not check.complaints({"name": "clean", **found})
    for text in (
        "error: max search depth too small\n" + clean,
        "pan: reached -DMEMLIM bound\nWarning: Search not completed\n" + clean,
        "pan:1: invalid end state (at depth 3)\n" + clean.replace("errors: 0", "errors: 1"),
    ):
        assert check.complaints({"name": "broken", **check.read(text)})


@pytest.fixture(scope="module")
def spin() -> None:
    if tool := check.missing_tool():
        pytest.skip(f"{tool} is not installed (Debian's package spin, and a C compiler)")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_configuration_is_searched_to_its_end_without_an_error(spin, capsys):
    assert check.main([]) == 0, capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("mutation", check.MUTATIONS)
def test_spin_finds_the_mistake(spin, mutation):
    result = check.search(mutation, check.Configuration(f"{check.MUTATIONS[mutation]} {mutation}"))
    assert result["errors"] == 1
    assert re.match(r"assertion violated|invalid end state", result["found"]), result
    sound = check.search(f"{mutation}-sound", check.Configuration(check.MUTATIONS[mutation]))
    assert not check.complaints(sound), "the error is not the mistake's"


@pytest.mark.slow
@pytest.mark.parametrize("change", check.HARMLESS)
def test_a_wait_for_at_least_the_epoch_sees_nothing_else(spin, change):
    results = [
        check.search(f"{change}{m}", check.Configuration(f"{check.HARMLESS[change]}{m}")) for m in ("", f" {change}")
    ]
    assert [check.complaints(result) for result in results] == [[], []]
    assert results[0]["states"] == results[1]["states"]
