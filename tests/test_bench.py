"""The benches of rounds: what they check, which rows they write, what their tables and figures say. No GPU."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ep_a2a
from bench import a2a, cases, harness, plot, table
from bench.variants import Ours, Rival, Together

ROOT = Path(__file__).resolve().parent.parent
FIELDS = [
    *("op", "variant", "schedule", "choice", "world", "ranks", "tokens", "hidden", "top_k", "payload", "routing"),
    *("num_sms", "us", "us_min", "us_max", "bytes", "floor_us", "run", "device", "commit"),
]
CASE = cases.Case(3, 5, 64, 4, 12, "nvfp4", "holes")
SMALL = ["--hidden", "64", "--top-k", "4", "--experts", "12", "--iterations", "4"]


class CapturingClock(harness.HostClock):
    """As on a GPU, a capture goes through the calls of the work once, in a stage of the channels that allows them."""

    def capture(self, work: harness.Work) -> harness.Work:
        work()
        return work


def run_together(words: Sequence[str], monkeypatch: pytest.MonkeyPatch, num_ranks: int = 3) -> a2a.Bench:
    """The way of a GPU's local world, on a CPU."""
    monkeypatch.setattr(harness, "HostClock", CapturingClock)
    monkeypatch.setattr(harness, "COPY_BYTES", {"cpu": 1 << 16})
    wanted = a2a.options([*SMALL, *words])
    bench = a2a.Bench(Together(ep_a2a.local(num_ranks)), wanted, harness.Run("now", "a CPU", "abc"), table.Progress(0))
    bench.run(a2a.cases_of(wanted, num_ranks), float("inf"), lambda rows: None)
    bench.close()
    return bench


# ---- rows --------------------------------------------------------------------------------------------------------


def test_all_variants_of_a_local_world_have_complete_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = ["ours", "ours-bf16", "ours-general", "copy", "memset", "empty"]
    words = ["--variants", *variants, "--schedule", "auto", "--tokens", "1", "5", "--routing", "uniform", "holes"]
    bench = run_together([*words, "--payload", "nvfp4", "bf16"], monkeypatch)
    assert bench.left_out == []
    assert all(list(row) == FIELDS for row in bench.rows)
    assert [row["op"] for row in bench.rows].count("copy") == 1
    of_cases = [row for row in bench.rows if row["op"] != "copy"]
    assert len(of_cases) == 2 * 2 * (2 * 3 * 4 + 2)
    found = {(row["variant"], row["schedule"], row["choice"]) for row in of_cases}
    own = {("ours", "phased", "auto"), ("ours-bf16", "phased", "auto"), ("ours-general", "general", "forced")}
    assert found == own | {("memset", None, None), ("empty", None, None)}
    assert all(row["us_min"] <= row["us"] <= row["us_max"] for row in bench.rows)
    assert all(row["bytes"] == 0 for row in of_cases if row["variant"] == "empty")


@pytest.mark.parametrize("routing", ["uniform", "zipf", "all_to_one", "holes", "nothing"])
def test_bytes_are_those_of_the_layout(routing: str) -> None:
    case = cases.Case(4, 6, 64, 2, 16, "nvfp4", routing)
    inputs = cases.make(case, "cpu")
    moved, pairs = cases.traffic(case, inputs.goes), int(inputs.goes.sum())
    assert moved["dispatch"].written == pairs * case.config().bytes(4).row_bytes
    assert moved["dispatch"].read == 4 * 6 * (32 + 4 + 4 * 2 + 4 + 4 * 2)
    assert (moved["combine"].read, moved["combine"].written) == (pairs * 128, 24 * 128)
    assert moved["pair"].total == moved["dispatch"].total + moved["combine"].total
    assert torch.equal(cases.make(case, "cpu").planes["ids"], inputs.planes["ids"])


def test_a_run_writes_rows_and_keeps_those_that_were_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a2a.json"
    words = [*SMALL, "--ranks", "2", "--tokens", "1", "--out", str(out), "--commit", "abc"]
    assert a2a.main(words) == 0
    rows = harness.read(out)
    assert len(rows) == 1 + 3 * 2 and all(list(row) == FIELDS for row in rows)
    assert {row["commit"] for row in rows} == {"abc"} and {row["world"] for row in rows} == {"local"}
    assert a2a.main([*words, "--append", "--variants", "ours", "--ops", "pair"]) == 0
    assert harness.read(out)[:7] == rows and len(harness.read(out)) == 9
    assert "2 rows in" in capsys.readouterr().out


def test_cases_that_are_too_late_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--ranks", "2", "--tokens", "1", "4", "--out", str(tmp_path / "rows.json"), "--seconds", "0"]
    assert a2a.main(words) == 1
    said = capsys.readouterr().out
    assert "left out: EP2, 1 tokens, uniform" in said and "left out: EP2, 4 tokens, uniform" in said


def test_options() -> None:
    on_cpu, on_gpu = a2a.options([]), a2a.options(["--device", "cuda"])
    assert (on_cpu.device, on_cpu.ranks, on_cpu.tokens, on_cpu.schedule) == (
        "cpu",
        [4],
        [1, 8, 64],
        ["phased", "general"],
    )
    assert on_gpu.tokens == [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert (on_gpu.schedule, on_gpu.variants) == (["auto"], list(a2a.VARIANTS))
    assert a2a.worlds(a2a.options(["--ranks", "8", "16"]), 1) == [8, 16]
    assert a2a.worlds(on_cpu, 4) == [] and a2a.worlds(a2a.options(["--world", "processes"]), 1) == []
    with pytest.raises(SystemExit, match="4 ranks"):
        a2a.worlds(a2a.options(["--world", "local"]), 4)


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    for number, start in enumerate((["mpirun", "-n", "2"], ["torchrun", "--nproc-per-node", "2"])):
        words = [*SMALL, "--tokens", "2", "--out", str(tmp_path / f"{number}.json")]
        subprocess.run([*start, str(ROOT / "bench/a2a.py"), *words], check=True, timeout=120, capture_output=True)
        rows = harness.read(tmp_path / f"{number}.json")
        assert {(row["world"], row["ranks"]) for row in rows if row["op"] != "copy"} == {("processes", 2)}


# ---- checks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", sorted(cases.PAYLOADS))
def test_checks_find_what_is_wrong(payload: str) -> None:
    case = cases.Case(3, 5, 128, 4, 12, payload, "holes")
    inputs = cases.make(case, "cpu")
    ranks, clock = Together(ep_a2a.local(3)), CapturingClock()
    with ranks.connect(case) as a2as:
        cases.fill_outboxes(a2as)
        ours = Ours(ranks, clock, a2as, inputs, "ours", "auto")
        ours.check()
        received, here = a2as[1]._channels[0].received, inputs.goes[..., 1]
        cases.check_received(received, inputs, 1)
        source, token = here.nonzero()[-1].tolist()
        for name in inputs.planes:
            row = cases.bits(getattr(received, name), inputs.planes[name])[0][source, token]
            before = row.clone()
            row.view(-1)[-1] ^= 1
            with pytest.raises(AssertionError, match=f"rank 1: rows of plane {name} .*: 1"):
                cases.check_received(received, inputs, 1)
            row.copy_(before)
        inputs.goes[source, token, 1] = False
        with pytest.raises(AssertionError, match=r"rank 1: rows are valid .*: 1"):
            cases.check_received(received, inputs, 1)
        with pytest.raises(AssertionError, match=r"rows of the combined result differ: 1"):
            cases.check_out(ours._outs[source], inputs, source)


def test_what_an_earlier_round_left_is_not_taken_for_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, clock, inputs = Together(ep_a2a.local(3)), CapturingClock(), cases.make(CASE, "cpu")
    with ranks.connect(CASE) as a2as:
        cases.fill_outboxes(a2as)
        ours = Ours(ranks, clock, a2as, inputs, "ours", "auto")
        ours._dispatched = ours._combined = ours._paired = lambda: None
        with pytest.raises(AssertionError, match="differ"):
            ours.check()


def test_a_case_that_fails_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Ours.check

    def failing(self: Ours) -> None:
        check(self)
        if self._inputs.goes.shape[1] == 2:
            raise AssertionError("planted")

    monkeypatch.setattr(Ours, "check", failing)
    bench = run_together(["--tokens", "1", "2", "3", "--variants", "ours", "--ops", "dispatch"], monkeypatch)
    assert [row["tokens"] for row in bench.rows] == [1, 1, 3, 3]
    assert bench.left_out == ["EP3, 2 tokens, uniform: AssertionError: planted"]


# ---- time --------------------------------------------------------------------------------------------------------


def test_variants_take_turns() -> None:
    seen: list[str] = []

    def one(name: str) -> Any:
        return lambda num: seen.extend([name] * num) or [float(len(seen))] * num

    times = harness.turns([one("a"), one("b")], 7)
    assert "".join(seen) == "aabbbbaa" * 2 and [len(found) for found in times] == [8, 8]


def test_a_sample_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of what is launched, on a made-up GPU."""
    said: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 0.5

    class Within:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    graph = SimpleNamespace(replay=lambda: said.append("replay"))
    fakes = {"Event": Event, "Stream": object, "stream": Within, "graph": Within, "CUDAGraph": lambda: graph}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append("lead"), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    clock = harness.GraphClock()
    replay = clock.capture(lambda: said.append("captured"))
    sample = harness.Sample(replay, (lambda: said.append("before"),), (lambda: said.append("after"),))
    assert clock.times_us(sample, 2, 1, lambda: said.append("level")) == [500.0, 500.0]
    once = ["level", "lead", "before", "event", "replay", "event", "wait", "after", "wait"]
    assert said == ["captured", "wait", *once * 3] and (clock.num_samples, clock.num_late) == (3, 0)


# ---- other libraries ---------------------------------------------------------------------------------------------


class FakePeer:
    """Combines nothing; dies at the second case."""

    note = "dispatch PDL on, pair PDL off"

    def __init__(self, name: str) -> None:
        self.cases = 0

    def prepare(self, ops: Sequence[str], ids: torch.Tensor, hidden: int, num_experts: int) -> None:
        assert ids.dtype == torch.int32 and ids.shape == (3, *ids.shape[1:]) and (hidden, num_experts) == (64, 12)
        if "combine" in ops:
            raise RuntimeError("combine hangs")
        self.cases += 1

    def times_us(self, op: str, num: int) -> list[float]:
        if self.cases == 2:
            raise RuntimeError("died")
        return [2.0] * num

    def close(self) -> None: ...


def test_peers_cost_their_own_rows_only() -> None:
    said: list[str] = []
    rival = Rival("fake", FakePeer, said.append)
    ids = cases.make(CASE, "cpu").planes["ids"]
    rival.prepare(cases.OPERATIONS, CASE, ids)
    assert rival.ops == ("dispatch",) and rival.schedule_of("dispatch") == "PDL on"
    assert rival.times_us("dispatch", 4) == [2.0] * 4 and rival.times_us("pair", 4) == []
    rival.prepare(("dispatch",), CASE, ids)
    assert rival.times_us("dispatch", 4) == [] and rival.ops == ()
    rival.prepare(("pair",), CASE, ids)
    rival.close()
    assert said == ["fake, EP3, 5 tokens, holes, dispatch, combine, pair: combine hangs", "fake, dispatch: died"]


def test_peers_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2a.Bench, "_make_rivals", lambda self: [Rival("fake", FakePeer, lambda text: None)])
    bench = run_together(["--tokens", "1", "2", "--variants", "ours", "--schedule", "auto"], monkeypatch)
    assert [(row["op"], row["tokens"], row["us"]) for row in bench.rows if row["variant"] == "fake"] == [
        ("dispatch", 1, 2.0)
    ]


def test_peers_that_cannot_run_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench

    fake = SimpleNamespace(NAMES=("a", "b"), Peer=FakePeer, available=lambda name: "broken" * (name == "b"))
    monkeypatch.setitem(sys.modules, "bench.peers", fake)
    monkeypatch.setattr(bench, "peers", fake, raising=False)
    this: Any = SimpleNamespace(_wanted=a2a.options(["--device", "cuda"]), _ranks=SimpleNamespace(world="local"))
    said: list[str] = []
    this._tell = said.append
    assert [one.name for one in a2a.Bench._make_rivals(this)] == ["a"] and said == ["b: broken"]


# ---- tables and figures ------------------------------------------------------------------------------------------


def row(variant: str, us: float, tokens: int = 8, ranks: int = 8, run: str = "1", **more: Any) -> dict[str, Any]:
    about = dict.fromkeys(FIELDS) | {"op": "dispatch", "world": "local", "device": "NVIDIA H200", "commit": "abc"}
    about |= {"hidden": 2048, "top_k": 22, "payload": "nvfp4", "routing": "uniform", "bytes": tokens * 100000}
    about |= {"variant": variant, "us": us, "us_min": us, "us_max": us, "tokens": tokens, "ranks": ranks, "run": run}
    return about | {"floor_us": tokens / 40, "choice": "auto" if variant == "ours" else None} | more


def test_ratios() -> None:
    rows = [row("ours", 6.0, schedule="phased"), row("flashinfer-0.7.4", 12.0), row("empty", 3.0)]
    cells = table.ratio_cells(rows[0], rows, ["flashinfer-0.7.4", "nccl"])
    assert cells == ["8", "phased", "6.00", "0.03", "3.00", "12.0", "0.500", "0.333", "", "", ""]
    assert table.less_empty(6.0, 12.0, 5.0) is None and table.less_empty(6.0, 12.0, None) is None
    (found,) = table.ratios([*rows, row("ours", 60.0, 1024), row("empty", 3.0, 1024)])
    assert found.row_count == 2 and len(found.columns) == 8
    assert table.ratio_cells(row("ours", 60.0, 1024), [row("nccl", 120.0, 1024)], ["nccl"])[-2:] == ["0.500", ""]


def test_figures_are_written_and_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "DPI", 40)
    rows = [
        row(variant, us * tokens**0.5, tokens)
        for tokens in (1, 64, 1024)
        for variant, us in [("ours", 3), ("ours-general", 4), ("flashinfer-0.7.4", 6), ("empty", 1), ("memset", 2)]
    ]
    too_few = [row("ours", us, tokens, routing="zipf") for us, tokens in ((3, 1), (9, 1024))]
    harness.write([*rows, *too_few], tmp_path / "rows.json")
    out = tmp_path / "figures"
    assert plot.main([str(tmp_path / "rows.json"), "--out", str(out), "--traffic-ranks", "2"]) == 0
    name = "h200_dispatch_h2048_k22_nvfp4_uniform"
    names = {f"{stem}.{end}" for stem in ("traffic", name, f"{name}_speedup") for end in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == names
    text = (out / f"{name}.svg").read_text()
    for word in ("NVIDIA H200", "hidden 2048", "8 ranks (EP8)", "ep_a2a", "FlashInfer 0.7.4", "floor", "GB/s"):
        assert word in text, word
    with plot.plt.rc_context(plot.STYLE):
        plot.save(plot.speedup_figure(rows), tmp_path / "again")
    for end in ("png", "svg"):
        assert (tmp_path / f"again.{end}").read_bytes() == (out / f"{name}_speedup.{end}").read_bytes()


def test_a_speedup_is_of_one_run() -> None:
    rows = [row("ours", 4.0), row("nccl", 12.0), row("flashinfer-0.7.4", 8.0), row("ours", 2.0, run="2")]
    assert plot.speedups(rows, 8) == {8: (2.0, "flashinfer-0.7.4")}
    assert plot.speedup_figure([row("ours", 4.0)]) is None


def test_traffic_is_what_the_routing_says() -> None:
    config = ep_a2a.Config(num_experts=32, top_k=4, hidden=64, max_tokens=50)
    row_bytes = config.bytes(4).row_bytes
    to_one = plot.traffic("all_to_one", config, 4)
    assert sorted(to_one.sum(dim=0).tolist()) == [0, 0, 0, 200 * row_bytes]
    uniform = plot.traffic("uniform", config, 4)
    assert uniform.shape == (4, 4) and uniform.min() > 0 and uniform.max() <= 50 * row_bytes


def test_labels_keep_apart() -> None:
    found = plot.spread([0.5, 0.5, 0.51, 0.9], 0.1)
    assert all(b - a > 0.099 for a, b in itertools.pairwise(found)) and found[3] == 0.9
