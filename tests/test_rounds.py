"""Rounds of a local world: every shape, format, routing and count, bit for bit; what may overlap; what may be lost."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ep_a2a
from ep_a2a import BF16, FP16, FP32, NVFP4, InvalidCount
from ep_a2a.testing import ROUTINGS, assert_same_bits, destinations, reference_combine
from tests import bodies
from tests.bodies import PATIENCE_S, Case

ROOT = Path(__file__).resolve().parent.parent
COUNTS = ["none", "one", "odd", "full", "varied", "up_and_down", "one_rank_none", "some_ranks_none", "one_rank_one"]


def run(num_ranks, body, *args):
    return ep_a2a.local(num_ranks).run(body, *args)


# ---- the table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts",
    ["none", "one", "odd", "full", "varied", "up_and_down", "one_rank_none", "some_ranks_none", "one_rank_one"],
)
def test_token_counts(counts):
    run(4, bodies.rounds, Case(counts=counts, num_rounds=5))


@pytest.mark.parametrize("max_tokens", [1, 31, 32, 33, 65])
def test_max_tokens_around_the_words_of_the_bitmap(max_tokens):
    run(3, bodies.rounds, Case(max_tokens=max_tokens, counts="full", num_rounds=2))
    run(3, bodies.rounds, Case(max_tokens=max_tokens, counts="up_and_down", routing="holes", num_rounds=4))


@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 9, 16, 22, 31, 32])
@pytest.mark.parametrize("schedule", ["general", "phased"])
def test_top_k(top_k, schedule):
    run(4, bodies.rounds, Case(num_experts=40, top_k=top_k, schedule=schedule))


@pytest.mark.parametrize("routing", [*ROUTINGS, "mixed"])
@pytest.mark.parametrize("payload", [NVFP4, BF16])
def test_routings(routing, payload):
    run(4, bodies.rounds, Case(routing=routing, payload=payload, num_rounds=4))


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "top_k"),
    [(7, 3, 3), (5, 4, 2), (3, 4, 2), (1, 4, 1), (2, 8, 2), (33, 16, 6), (17, 1, 4), (16, 2, 16), (9, 5, 9)],
)
def test_experts_over_ranks(num_experts, num_ranks, top_k):
    case = Case(num_experts=num_experts, top_k=top_k, max_tokens=8, num_rounds=2)
    run(num_ranks, bodies.rounds, case)
    run(num_ranks, bodies.rounds, replace(case, routing="duplicates", payload=BF16))


@pytest.mark.parametrize("num_ranks", [31, 33, pytest.param(64, marks=pytest.mark.slow)])
def test_many_ranks(num_ranks):
    case = Case(num_experts=num_ranks + 5, top_k=3, hidden=64, max_tokens=2, num_rounds=2, counts="up_and_down")
    run(num_ranks, bodies.rounds, case)


@pytest.mark.parametrize("hidden", [16, 48, 512, 2048, 2880, 4096, 7168])
@pytest.mark.parametrize("payload", [NVFP4, BF16])
@pytest.mark.parametrize("schedule", ["general", "phased"])
def test_hidden(hidden, payload, schedule):
    run(2, bodies.rounds, Case(hidden=hidden, payload=payload, max_tokens=9, num_rounds=2, schedule=schedule))


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32", "packed", "packed_scalar", "packed_rows"])
@pytest.mark.parametrize("hidden", [512, 2880])
def test_how_rows_are_given_nvfp4(source, hidden):
    run(3, bodies.rounds, Case(source=source, hidden=hidden, num_rounds=2))


@pytest.mark.parametrize("combine", [BF16, FP16, FP32])
@pytest.mark.parametrize("how", ["outbox", "rows", "out", "release"])
def test_combine_formats_and_forms(combine, how):
    run(4, bodies.rounds, Case(combine=combine, how=how, num_rounds=4, num_experts=8, top_k=5))


@pytest.mark.parametrize("extra", [(1,), (3,), (4,), (36,), (100,), (16, 1), (1, 3, 4, 36), (100, 7, 2048, 33)])
@pytest.mark.parametrize("schedule", ["general", "phased"])
def test_extra_planes(extra, schedule):
    run(3, bodies.rounds, Case(extra_planes=extra, schedule=schedule, max_tokens=11, num_rounds=2))


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32", "packed_rows"])
@pytest.mark.parametrize("schedule", ["general", "phased"])
@pytest.mark.parametrize("unaligned", [False, True])
def test_inputs_on_any_address(source, schedule, unaligned):
    case = Case(source=source, schedule=schedule, unaligned=unaligned, extra_planes=(32, 36, 3), num_rounds=2)
    run(3, bodies.rounds, case)
    if source != "packed_rows":
        run(3, bodies.rounds, replace(case, payload=BF16, hidden=520))


@pytest.mark.parametrize("num_sms", [1, 2, 7])
def test_few_ctas(num_sms):
    run(3, bodies.rounds, Case(num_sms=num_sms, max_tokens=40, counts="full", num_rounds=2))


def test_the_planes_of_nemotron_and_of_deepseek():
    run(2, bodies.rounds, Case(num_experts=512, top_k=22, hidden=2048, max_tokens=33, num_rounds=2))
    run(2, bodies.rounds, Case(num_experts=256, top_k=8, hidden=7168, max_tokens=17, num_rounds=2, combine=FP32))


@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_counts_on_the_device(source):
    for counts in ("varied", "none", "up_and_down"):
        run(4, bodies.rounds, Case(device_counts=True, counts=counts, source=source, num_rounds=4, routing="holes"))


# ---- the same bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", [BF16, FP16, FP32])
def test_same_bits_every_run_and_in_both_schedules(combine):
    case = Case(combine=combine, num_experts=12, top_k=6, routing="mixed", num_rounds=4, hidden=1056)
    ways = [("general", None), ("phased", None), ("phased", None), ("general", 1), ("phased", 3)]
    digests = [run(4, bodies.rounds, replace(case, schedule=schedule, num_sms=n)) for schedule, n in ways]
    assert all(one == digests[0] for one in digests) and len(set(digests[0])) == 4


@pytest.mark.parametrize("combine", [BF16, FP16, FP32])
def test_the_results_of_experts_reveal_the_order(combine):
    case = Case(combine=combine)
    outboxes = [bodies.results(case, 0, r, 0).expand(4, -1, -1) for r in range(4)]
    masks = [torch.ones(case.max_tokens, 4, dtype=torch.bool), *[torch.zeros(0, 4, dtype=torch.bool)] * 3]
    sums = {reference_combine(order, masks)[0].float().numpy().tobytes() for order in itertools.permutations(outboxes)}
    assert len(sums) > 6


def test_the_schedule_is_one_of_two():
    def body(group):
        with ep_a2a.connect(Case().config(), group=group) as a2a:
            assert a2a.schedule in ("phased", "general")
            with pytest.raises(ValueError, match="phased"):
                a2a.schedule = "fast"
            bodies.one_round(a2a, Case(), 0)

    run(2, body)


# ---- counts on the device ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, 9, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("how", ["check", "dispatch"])
def test_a_count_out_of_range_is_clamped_and_told_once(wrong, how):
    def body(group):
        case = Case(max_tokens=16)
        with ep_a2a.connect(case.config(), group=group) as a2a:
            x, ids = torch.ones(8, 512).bfloat16(), torch.full((8, 4), 15, dtype=torch.int32)
            ids[:, 0] = 0
            count = torch.tensor([wrong if a2a.rank == 1 else 5], dtype=torch.int32)
            clamped = min(max(wrong, 0), 8)
            received, handle = ep_a2a.dispatch(a2a, x, ids, torch.ones(8, 4), count)
            assert received.num_tokens.tolist() == [5, clamped, 5]
            goes_here = a2a.rank in (0, 2)
            assert received.valid.sum(dim=1).tolist() == [5 * goes_here, clamped * goes_here, 5 * goes_here]
            a2a.outbox()[received.valid] = 3.0
            out = ep_a2a.combine(a2a, handle)
            own = clamped if a2a.rank == 1 else 5
            assert (out[:own] == 6).all() and (out[own:] == 0).all() and out.shape == (8, 512)
            if a2a.rank == 1:
                with pytest.raises(InvalidCount, match=rf"(?s)(?=.*{wrong}\b)(?=.*\b8\b)"):
                    a2a.check() if how == "check" else bodies.one_round(a2a, case, 0)
            a2a.check()
            group.barrier("told", PATIENCE_S)
            bodies.one_round(a2a, case, 1)
            a2a.check()

    run(3, body)


# ---- overlap, several objects, sub-groups ------------------------------------------------------------------------


def test_two_channels_overlap():
    run(4, bodies.two_channels, Case(num_rounds=7))


def test_channels_have_memory_of_their_own():
    def body(group):
        with ep_a2a.connect(Case(max_tokens=4, payload=BF16).config(channels=3), group=group) as a2a:
            ids, weights = torch.arange(16, dtype=torch.int32).reshape(4, 4), torch.ones(4, 4)
            rounds = []
            for channel in (2, 0, 1):
                x = torch.full((4, 512), 1.0 + 10 * channel + a2a.rank).bfloat16()
                rounds.append((channel, *ep_a2a.dispatch(a2a, x, ids, weights, channel=channel)))
                a2a.outbox(channel).fill_(10.0 * (channel + 1) + a2a.rank)
            for channel, received, handle in rounds:
                for source in range(a2a.num_ranks):
                    rows = received.rows[source][received.valid[source]]
                    assert rows.numel() and (rows == 1 + 10 * channel + source).all(), (channel, source, rows)
                out = ep_a2a.combine(a2a, handle)
                wanted = destinations(ids, 16, 2).float() @ torch.tensor([[1.0, 0], [1, 1]])
                assert_same_bits(out[:, 0].float(), wanted[:, 0] * 10 * (channel + 1) + wanted[:, 1])

    run(2, body)


def test_a_dispatch_that_is_abandoned():
    def body(group):
        case = Case()
        with ep_a2a.connect(case.config(), group=group) as a2a:
            for round_ in range(4):
                given, own = bodies.make_inputs(case, round_, a2a.rank, a2a.num_ranks)
                ep_a2a.dispatch_begin(a2a, given, own["ids"], own["weights"]).abandon()
                bodies.one_round(a2a, case, round_)

    run(3, body)


def test_rounds_in_begin_form_with_release():
    def body(group):
        case = Case()
        with ep_a2a.connect(case.config(), group=group) as a2a:
            for round_ in range(4):
                given, own = bodies.make_inputs(case, round_, a2a.rank, a2a.num_ranks)
                received, handle = ep_a2a.dispatch_begin(a2a, given, own["ids"], own["weights"]).wait()
                inputs = [bodies.make_inputs(case, round_, r, a2a.num_ranks)[1] for r in range(a2a.num_ranks)]
                bodies.assert_received(received, a2a.config, inputs, a2a.rank, None)
                assert ep_a2a.release_begin(a2a, handle).wait() is None
                bodies.one_round(a2a, case, round_)

    run(3, body)


def test_inputs_may_be_reused_after_dispatch_and_outbox_after_the_next_wait():
    def body(group):
        case = Case(payload=BF16, max_tokens=4, num_experts=4, top_k=1)
        with ep_a2a.connect(case.config(), group=group) as a2a:
            ids, weights = torch.arange(4, dtype=torch.int32)[:, None].flip(0).contiguous(), torch.ones(4, 1)
            x = torch.full((4, 512), 1.0 + a2a.rank).bfloat16()
            received, handle = ep_a2a.dispatch(a2a, x, ids, weights)
            x.zero_()
            ids.fill_(-1)  # combine goes by its own copy of where the rows went
            weights.zero_()
            assert [received.rows[s, 3 - a2a.rank, 0].item() for s in range(4)] == [1, 2, 3, 4]
            a2a.outbox().fill_(5.0 + a2a.rank)
            assert ep_a2a.combine(a2a, handle)[:, 0].tolist() == [8, 7, 6, 5]

    run(4, body)


def test_several_objects_with_other_configurations():
    cases = [Case(), Case(payload=BF16, hidden=1024, seed=2), Case(num_experts=6, top_k=2, combine=FP32, seed=3)]

    def body(group):
        objects = [ep_a2a.connect(case.config(), group=group) for case in cases]
        for round_ in range(4):
            for a2a, case in zip(objects, cases, strict=True):
                bodies.one_round(a2a, case, round_, round_ - 1 if round_ else None)
        objects[1].close()
        for a2a, case in zip(objects, cases, strict=True):
            if a2a is not objects[1]:
                bodies.one_round(a2a, case, 4, 3)
                a2a.close()

    run(3, body)


def test_open_rounds_of_two_objects():
    def body(group):
        one, two = Case(), Case(seed=2, payload=BF16)
        with ep_a2a.connect(one.config(), group=group) as first, ep_a2a.connect(two.config(), group=group) as second:
            given, own = bodies.make_inputs(one, 0, first.rank, first.num_ranks)
            pending = ep_a2a.dispatch_begin(first, given, own["ids"], own["weights"])
            bodies.one_round(second, two, 0)
            received, handle = pending.wait()
            bodies.fill_results(one, 0, received, first.outbox(), first.rank)
            bodies.one_round(second, two, 1, 0)
            out = ep_a2a.combine(first, handle)
            assert_same_bits(out, bodies.wanted_out(one, first.config, 0, first.rank, own["ids"], first.num_ranks))

    run(3, body)


def test_what_was_received_outlives_the_object():
    def body(group):
        a2a = ep_a2a.connect(Case(counts="full", payload=BF16).config(), group=group)
        given, own = bodies.make_inputs(Case(counts="full", payload=BF16), 0, a2a.rank, a2a.num_ranks)
        received, handle = ep_a2a.dispatch(a2a, given, own["ids"], own["weights"])
        ep_a2a.release(a2a, handle)
        outbox = a2a.outbox()
        a2a.close()
        del a2a, handle
        assert received.valid.any() and (outbox.fill_(2.0) == 2).all()  # memory that must still be mapped

    run(2, body)


# ---- waits -------------------------------------------------------------------------------------------------------


LATE_CASE = Case(num_rounds=4, num_experts=4, top_k=4, counts="full", max_tokens=3)
LATE_IN = pytest.mark.parametrize("late_in", ["dispatch", "combine", "release"])


@LATE_IN
def test_late_peers(late_in):
    run(4, bodies.late_peer, LATE_CASE, late_in)


LATE = """
import sys
import ep_a2a
from tests import bodies, test_rounds
ep_a2a.local(4).run(bodies.late_peer, test_rounds.LATE_CASE, sys.argv[1])
"""


@pytest.fixture(scope="module")
def library_that_does_not_wait(tmp_path_factory):
    """The folder of a library without its waits, built as CONTRIBUTING.md says."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not on PATH")
    build = str(tmp_path_factory.mktemp("build"))
    for step in (["-S", str(ROOT), "-B", build, "-DEP_A2A_FAULT=no_wait"], ["--build", build, "-t", "ep_a2a_host"]):
        found = subprocess.run(["cmake", *step], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
    return ROOT / "build" / "lib-fault-no_wait"


@pytest.mark.slow
@LATE_IN
def test_a_missing_wait_is_found(library_that_does_not_wait, late_in):
    env = {**os.environ, "EP_A2A_LIBRARY_DIR": str(library_that_does_not_wait), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LATE, late_in]
    found = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode != 0 and re.search("AssertionError: |RoundMismatch: ", found.stderr), found.stderr
    del env["EP_A2A_LIBRARY_DIR"]
    found = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
