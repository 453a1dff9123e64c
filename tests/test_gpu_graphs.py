"""CUDA graphs of rounds and layers, streams, and what calls do not do: wait for the device or allocate on it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

import ep_a2a
from ep_a2a import BF16, FP8, FP16, FP32, MXFP4, NVFP4, InvalidCount, InvalidRouting
from ep_a2a.testing import assert_same_bits
from tests import bodies, cases
from tests.bodies import Case
from tests.replay import CopyExperts, Layers, Rounds

pytestmark = pytest.mark.gpu
CASE = Case(num_experts=20, top_k=4, routing="mixed", counts="up_and_down")
SECOND = int(1.9e9)  # in cycles of `torch.cuda._sleep`, about


def replays(rounds, graph, num_rounds):
    """Replays with other tokens, ids and counts, now and then an eager round between them."""
    for round_ in range(1, num_rounds):
        rounds.load(round_)
        if round_ % 4 == 3:
            rounds_out = rounds.received, rounds.out
            rounds.run()
            rounds.check(round_)
            rounds.received, rounds.out = rounds_out
        else:
            graph.replay()
            rounds.check(round_)


def first(rounds):
    """The eager round before a capture."""
    rounds.load(0)
    rounds.run()
    rounds.check(0)
    return rounds


# ---- replays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("payload", [NVFP4, MXFP4, FP8, BF16])
def test_a_round(gpu_world, num_ranks, payload):
    world, case = gpu_world(num_ranks), replace(CASE, payload=payload)
    with ep_a2a.connect(case.config(), group=world) as a2as:
        rounds = first(Rounds(a2as, case, world.dispatch, world.combine))
        replays(rounds, rounds.capture(), 6)


@pytest.mark.parametrize("counts", cases.COUNTS)
def test_counts(gpu_world, counts):
    world, case = gpu_world(3), replace(CASE, counts=counts, combine=FP32)
    with ep_a2a.connect(case.config(), group=world) as a2as:
        rounds = first(Rounds(a2as, case, world.dispatch, world.combine))
        replays(rounds, rounds.capture(), 7)


@pytest.mark.parametrize("shape", [cases.NEMOTRON, cases.DEEPSEEK], ids=["Nemotron", "DeepSeek"])
def test_models(gpu_world, shape):
    world, case = gpu_world(8), replace(shape, max_tokens=9, routing="mixed", counts="up_and_down")
    with ep_a2a.connect(case.config(), group=world) as a2as:
        rounds = first(Rounds(a2as, case, world.dispatch, world.combine))
        replays(rounds, rounds.capture(), 4)


def test_several_configurations(gpu_world):
    """Graphs of several objects, replayed in turn, and one graph with a round of each."""
    world = gpu_world(4)
    several = [CASE, replace(CASE, payload=BF16, hidden=1024, combine=FP16, seed=2), replace(CASE, top_k=9, seed=3)]
    objects = [ep_a2a.connect(case.config(), group=world) for case in several]
    all_ = [first(Rounds(a2as, case, world.dispatch, world.combine)) for a2as, case in zip(objects, several)]
    graphs = [rounds.capture() for rounds in all_]
    for round_ in range(1, 5):
        for rounds in all_:
            rounds.load(round_)
        for graph in graphs:
            graph.replay()
        for rounds in all_:
            rounds.check(round_)
    both = torch.cuda.CUDAGraph()
    with torch.cuda.graph(both):
        for rounds in all_:
            rounds.run()
    for round_ in range(5, 8):
        for rounds in all_:
            rounds.load(round_)
        both.replay()
        for rounds in all_:
            rounds.check(round_)
    for a2as in objects:
        a2as.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_layer_whose_experts_copy(gpu_world, num_ranks):
    world, case = gpu_world(num_ranks), replace(CASE, payload=BF16)
    with ep_a2a.connect(case.config(), group=world) as a2as:
        streams = [torch.cuda.Stream() for _ in a2as]
        rounds = Layers(a2as, case, lambda a2a: CopyExperts(), streams)
        rounds.warm(world)
        first(rounds)
        replays(rounds, rounds.capture(), 6)


@pytest.mark.parametrize("payload", [NVFP4, BF16])
@pytest.mark.parametrize("combine", [BF16, FP8])
def test_a_layer(gpu_world, payload, combine):
    world, case = gpu_world(1), replace(CASE, payload=payload, combine=combine, hidden=256)
    with ep_a2a.connect(case.config(), group=world) as a2as:
        rounds = first(Layers(a2as, case))
        replays(rounds, rounds.capture(), 6)


def test_ids_and_counts_out_of_range(gpu_world):
    world, case = gpu_world(3), replace(CASE, counts="full", routing="uniform")
    with ep_a2a.connect(case.config(), group=world) as a2as:
        rounds = first(Rounds(a2as, case, world.dispatch, world.combine))
        graph = rounds.capture()
        for round_, wrong in enumerate((20, -2, 2**31 - 1), 1):
            rounds.load(round_)
            rounds.ids[1][5, 2] = wrong
            graph.replay()
            torch.cuda.synchronize()
            with pytest.raises(InvalidRouting, match=rf"rank 1.*token 5.*position 2.*{wrong}\b"):
                a2as[1].check()
            for a2a in a2as:
                a2a.check()
        for round_, wrong in enumerate((17, -3), 4):
            rounds.load(round_)
            rounds.counts[2].fill_(wrong)
            graph.replay()
            torch.cuda.synchronize()
            with pytest.raises(InvalidCount, match=rf"(?s)(?=.*{wrong}\b)(?=.*\b16\b)"):
                a2as[2].check()
            clamped = min(max(wrong, 0), 16)
            assert rounds.received[0].num_tokens.tolist() == [16, 16, clamped]
            assert bool(rounds.out[2].any()) == (clamped > 0)
        rounds.load(6)
        graph.replay()
        rounds.check(6)


# ---- streams, host and memory ------------------------------------------------------------------------------------


def test_begin_and_wait_on_other_streams(gpu_world):
    """`wait` makes its own stream wait for what `begin` launched, and `out` belongs to the stream that waited."""
    world, case = gpu_world(2), replace(CASE, counts="full", payload=BF16)
    with ep_a2a.connect(case.config(), group=world) as a2as:
        rounds = first(Rounds(a2as, case, world.dispatch, world.combine))
        torch.full_like(rounds.out[0], 9)
        begin, middle, end = ([torch.cuda.Stream() for _ in a2as] for _ in range(3))
        for round_ in range(1, 5):
            rounds.load(round_)
            torch.cuda.synchronize()
            outs, kept = [], []
            for rank, entry in enumerate(rounds.entries()):
                with torch.cuda.stream(begin[rank]):
                    torch.cuda._sleep(SECOND // 20)
                    kept.append(ep_a2a.dispatch_begin(*entry))
            for rank, pending in enumerate(kept):
                with torch.cuda.stream(middle[rank]):
                    _, handle = pending.wait()
                    a2as[rank].outbox().copy_(rounds.results[rank])
                    torch.cuda._sleep(SECOND // 20)
                    kept[rank] = ep_a2a.combine_begin(a2as[rank], handle)
            for rank in range(2):
                with torch.cuda.stream(end[rank]):
                    torch.cuda._sleep(SECOND // 20 * (1 + rank))
                    out = kept[rank].wait()
                    outs.append(out.clone())
            kept.clear()
            del pending, out
            noise = []
            for rank in range(2):  # memory that is free for the streams that began
                for stream in (begin[rank], middle[rank]):
                    with torch.cuda.stream(stream):
                        noise += [torch.full_like(outs[rank], 9) for _ in range(4)]
            torch.cuda.synchronize()
            rounds.out = outs
            assert all((one == 9).all() for one in noise)
            check_out(rounds, round_)


def check_out(rounds, round_):
    for i, a2a in enumerate(rounds.a2as):
        a2a.check()
        own = bodies.make_inputs(rounds.case, round_, a2a.rank, rounds.num_ranks)[1]
        wanted = bodies.wanted_out(rounds.case, a2a.config, round_, a2a.rank, own["ids"], rounds.num_ranks)
        assert_same_bits(rounds.out[i].cpu()[: wanted.shape[0]], wanted, f"rank {a2a.rank} out")


def test_a_late_stream_holds_nobody_but_those_that_wait(gpu_world):
    """One rank's stream is late by a tenth of a second: all rows are there when a wait has ended, none sooner."""
    world, case = gpu_world(4), replace(CASE, counts="full", routing="uniform", top_k=8)
    with ep_a2a.connect(case.config(), group=world) as a2as:
        rounds = first(Rounds(a2as, case, world.dispatch, world.combine))
        streams = [torch.cuda.Stream() for _ in a2as]
        torch.cuda._sleep(1)  # loads its kernel
        for round_ in range(1, 9):
            rounds.load(round_)
            torch.cuda.synchronize()
            rounds.received, rounds.out = [], []
            for rank, entry in enumerate(rounds.entries()):
                with torch.cuda.stream(streams[rank]):
                    if rank == round_ % 4:
                        torch.cuda._sleep(SECOND // 10)
                    _, handle = ep_a2a.dispatch(*entry)
                    a2as[rank].outbox().copy_(rounds.results[rank])
                    if rank == (round_ + 1) % 4:
                        torch.cuda._sleep(SECOND // 10)
                    rounds.out.append(ep_a2a.combine(a2as[rank], handle))
            torch.cuda.synchronize()
            check_out(rounds, round_)


@pytest.mark.parametrize("payload", [NVFP4, BF16])
def test_calls_do_not_wait_for_the_device(gpu_world, payload):
    world, case = gpu_world(8), replace(CASE, payload=payload, counts="full")
    with ep_a2a.connect(case.config(), group=world) as a2as:
        rounds = first(Rounds(a2as, case, world.dispatch, world.combine))
        torch.cuda.synchronize()
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            begun.record()
            torch.cuda._sleep(SECOND)
            done.record()
            started = time.monotonic()
            for _ in range(4):
                found = world.dispatch(rounds.entries())
                world.combine([(a2a, handle) for a2a, (_, handle) in zip(a2as, found)])
            found = world.dispatch(rounds.entries())
            world.release([(a2a, handle) for a2a, (_, handle) in zip(a2as, found)])
            host_s = time.monotonic() - started
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        device_s = begun.elapsed_time(done) / 1e3
        assert device_s > 0.3 and host_s < device_s / 2, (host_s, device_s)
        for a2a in a2as:
            a2a.check()


@pytest.mark.parametrize("combine", [BF16, FP8])
def test_calls_allocate_nothing_but_results(gpu_world, combine):
    """With rows in the payload's planes and `out` given there is no result to allocate."""
    world, case = gpu_world(4), Case(counts="full", source="planes", combine=combine)
    with ep_a2a.connect(case.config(), group=world) as a2as:
        entries, outs, rows = [], [], []
        for a2a in a2as:
            given, own = bodies.make_inputs(case, 0, a2a.rank, 4)
            entries.append((a2a, *bodies.place((given, own["ids"], own["weights"]), a2a.device)))
            outs.append(torch.empty(own["ids"].shape[0], case.hidden, dtype=torch.bfloat16, device=a2a.device))
            rows.append(a2a.scratch() if combine.is_encoded else None)

        def one():
            found = world.dispatch(entries)
            ends = zip(a2as, found, rows, outs)
            world.combine([(a2a, handle, box, None, out) for a2a, (_, handle), box, out in ends])

        one()
        torch.cuda.synchronize()
        before, free = torch.cuda.memory_stats(), torch.cuda.mem_get_info()[0]
        for _ in range(50):
            one()
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        for name in ("allocation.all.allocated", "num_device_alloc"):
            assert after.get(name) == before.get(name), name
        assert torch.cuda.mem_get_info()[0] >= free


# ---- ranks that miss a replay ------------------------------------------------------------------------------------

LATE = Case(num_experts=4, top_k=4, hidden=64, max_tokens=8, payload=BF16, counts="full")


class Lone:
    """Each rank's dispatch and combine as graphs of their own, on a stream of its own."""

    def __init__(self, a2as):
        self.streams = [torch.cuda.Stream() for _ in a2as]
        self.graphs = {"dispatch": [], "combine": []}
        self.outs, self.received, ends = [], [], []
        x = torch.ones(8, 64, dtype=torch.bfloat16, device="cuda")
        ids = torch.arange(4, dtype=torch.int32, device="cuda").repeat(8, 1)
        weights = torch.ones(8, 4, device="cuda")
        for a2a in a2as:
            a2a.outbox().fill_(5.0)
            ends.append([a2a, *self._capture("dispatch", lambda: ep_a2a.dispatch(a2a, x, ids, weights))])
        for a2a, received, handle in ends:
            self.outs.append(torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda"))
            self.received.append(received)
            self._capture("combine", lambda: ep_a2a.combine(a2a, handle, out=self.outs[-1]))
        torch.cuda.synchronize()

    def _capture(self, kind, call):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.streams[len(self.graphs[kind])], capture_error_mode="thread_local"):
            found = call()
        self.graphs[kind].append(graph)
        return found

    def replay(self, kind, ranks):
        """Launch the graphs of some ranks; no host waits."""
        for rank in ranks:
            with torch.cuda.stream(self.streams[rank]):
                self.graphs[kind][rank].replay()

    def round(self, ranks):
        """Both graphs of some ranks, to their end."""
        self.replay("dispatch", ranks)
        self.replay("combine", ranks)
        for rank in ranks:
            self.streams[rank].synchronize()


@pytest.fixture
def late_world(gpu_world):
    """Four ranks with a short deadline and graphs of their own, after three good rounds, each rank watched."""
    world, told = gpu_world(4), []
    a2as = ep_a2a.connect(LATE.config(timeout_s=1.0), group=world)
    watches = [a2a.watch(lambda error, r=a2a.rank: told.append((r, str(error))), every_s=0.05) for a2a in a2as]
    lone = Lone(a2as)
    for _ in range(3):
        lone.round(range(4))
        assert all((out == 20).all() for out in lone.outs)
    for a2a in a2as:
        a2a.check()
    yield a2as, lone, told
    for watch in watches:
        watch.stop()
    started = time.monotonic()
    a2as.close()
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("when", ["dispatch", "combine"])
def test_a_rank_that_misses_a_replay(late_world, when, late):
    a2as, lone, told = late_world
    others = [rank for rank in range(4) if rank != late]
    if when == "combine":
        lone.replay("dispatch", range(4))
        torch.cuda.synchronize()
    started = time.monotonic()
    if when == "dispatch":
        lone.replay("dispatch", others)
    lone.replay("combine", others)
    for rank in others:
        lone.streams[rank].synchronize()
        assert 0.9 < time.monotonic() - started < 2.0
        assert lone.outs[rank].isnan().all()
        assert when == "combine" or not lone.received[rank].num_tokens.any()
    seconds = []
    for _ in range(100):
        started = time.monotonic()
        lone.round(others)
        seconds.append(time.monotonic() - started)
        for rank in others:
            with pytest.raises(ep_a2a.PeerTimeout, match=rf"rank {rank}, {when}: peer {late} "):
                a2as[rank].check()
    assert max(seconds) < 0.1 and sum(seconds) < 2, (max(seconds), sum(seconds))
    assert all(lone.outs[rank].isnan().all() for rank in others)
    started = time.monotonic()
    if when == "dispatch":
        lone.replay("dispatch", [late])
    lone.replay("combine", [late])  # it is told at once
    lone.streams[late].synchronize()
    assert time.monotonic() - started < 0.5 and lone.outs[late].isnan().all()
    with pytest.raises(ep_a2a.PeerTimeout, match=rf"rank {late}, {when}: .*gave up"):
        a2as[late].check()
    time.sleep(0.3)
    assert sorted(rank for rank, _ in told) == [0, 1, 2, 3], "each watchdog calls once"
    assert all(f"peer {late} " in text or rank == late for rank, text in told), told
    assert torch.ones(1000, device="cuda").sum().item() == 1000


def test_a_graph_that_dispatches_twice(late_world):
    """What the host cannot see: all ranks end, and name the one that opened its channel twice."""
    a2as, lone, told = late_world
    lone.replay("dispatch", range(4))
    torch.cuda.synchronize()
    lone.replay("dispatch", [1])
    lone.streams[1].synchronize()
    started = time.monotonic()
    lone.replay("combine", [0, 2, 3])
    torch.cuda.synchronize()
    assert time.monotonic() - started < 0.5
    for rank, a2a in enumerate(a2as):
        who = "this rank" if rank == 1 else "peer 1"
        with pytest.raises(ep_a2a.ChannelMisuse, match=f"{who} dispatched on an open channel"):
            a2a.check()
        assert rank == 1 or lone.outs[rank].isnan().all()
    time.sleep(0.3)
    assert sorted(rank for rank, _ in told) == [0, 1, 2, 3]


def test_another_object_goes_on_beside_one_that_has_ended(gpu_world, late_world):
    a2as, lone, _ = late_world
    lone.replay("dispatch", [0, 1, 3])
    torch.cuda.synchronize()
    with pytest.raises(ep_a2a.PeerTimeout):
        a2as[0].check()
    other = gpu_world(4)
    with ep_a2a.connect(CASE.config(), group=other) as objects:
        rounds = first(Rounds(objects, CASE, other.dispatch, other.combine))
        replays(rounds, rounds.capture(), 4)
