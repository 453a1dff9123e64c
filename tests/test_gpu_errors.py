"""What a GPU refuses before any launch, and what it tells afterwards: by the next call, `check` or a watchdog."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch

import ep_a2a
from ep_a2a import ClosedError, EpError, PeerTimeout, RoundError
from tests import bodies
from tests.bodies import Case
from tests.replay import Rounds

pytestmark = pytest.mark.gpu
CASE = Case(num_experts=8, top_k=2, max_tokens=8, counts="full")


def dispatch_of(a2as, **changed):
    """What `world.dispatch` takes; `changed` holds for rank 1 what is to be exchanged."""
    entries = []
    for a2a in a2as:
        given, own = bodies.make_inputs(CASE, 0, a2a.rank, a2a.num_ranks)
        x, ids, weights = bodies.place((given, own["ids"], own["weights"]), a2a.device)
        fields = {"x": x, "ids": ids, "weights": weights, "count": None}
        entries.append((a2a, *(fields | (changed if a2a.rank == 1 else {})).values()))
    return entries


def good_round(world, a2as, round_=0):
    rounds = Rounds(a2as, CASE, world.dispatch, world.combine)
    rounds.load(round_)
    rounds.run()
    rounds.check(round_)


WRONG = {
    "x on the CPU": ({"x": torch.ones(8, 512).bfloat16()}, ValueError, "x is on cpu, wanted cuda"),
    "ids on the CPU": ({"ids": torch.zeros(8, 2, dtype=torch.int32)}, ValueError, "topk_ids is on cpu, wanted cuda"),
    "weights on the CPU": ({"weights": torch.ones(8, 2)}, ValueError, "topk_weights is on cpu, wanted cuda"),
    "count on the CPU": ({"count": torch.ones(1, dtype=torch.int32)}, ValueError, "num_tokens is on cpu, wanted cuda"),
    "count as a number": ({"count": 3}, TypeError, "num_tokens"),
    "dtype": ({"weights": torch.ones(8, 2).half()}, TypeError, "topk_weights.*float16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_one_rank_are_refused_before_any_launch(gpu_world, name):
    changed, error, text = WRONG[name]
    world = gpu_world(3)
    with ep_a2a.connect(CASE.config(), group=world) as a2as:
        with pytest.raises(error, match=text):
            world.dispatch(dispatch_of(a2as, **changed))
        good_round(world, a2as)  # rank 0 has sent nothing
        found = world.dispatch(dispatch_of(a2as))
        ends = [(a2a, handle) for a2a, (_, handle) in zip(a2as, found)]
        rows = torch.ones(3, 8, 512).bfloat16()  # on the CPU
        with pytest.raises(ValueError, match="rows is on cpu, wanted cuda"):
            world.combine([ends[0], (*ends[1], rows), ends[2]])
        with pytest.raises(ValueError, match="out is on cpu, wanted cuda"):
            world.combine([*ends[:2], (*ends[2], None, None, torch.ones(8, 512).bfloat16())])
        world.release(ends)
        good_round(world, a2as, 1)


def test_calls_that_are_not_of_all_ranks(gpu_world):
    world, other = gpu_world(3), gpu_world(3)
    with ep_a2a.connect(CASE.config(), group=world) as a2as, ep_a2a.connect(CASE.config(), group=other) as others:
        entries = dispatch_of(a2as)
        wrong = (entries[:2], [*entries[:2], entries[0]], [*entries[:2], dispatch_of(others)[2]], [])
        for given in wrong:
            with pytest.raises((ValueError, RoundError)):
                world.dispatch(given)
        found = world.dispatch(entries)
        ends = [(a2a, handle) for a2a, (_, handle) in zip(a2as, found)]
        for call in (world.combine, world.release):
            with pytest.raises((ValueError, RoundError)):
                call(ends[:2])
        with pytest.raises(RoundError, match="open"):
            world.dispatch(entries)
        world.combine(ends)
        with pytest.raises(RoundError, match="closed"):
            world.release(ends)
        good_round(world, a2as)
        good_round(other, others)


def test_another_current_device(gpu_world):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    world = gpu_world(2)
    with ep_a2a.connect(CASE.config(), group=world) as a2as:
        with torch.cuda.device(1), pytest.raises((EpError, ValueError), match=r"cuda:1"):
            world.dispatch(dispatch_of(a2as))
        good_round(world, a2as)


def test_too_many_local_ranks(monkeypatch):
    with pytest.raises(ValueError, match=r"33.*32"):
        ep_a2a.local(33, device="cuda")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "3")
    with pytest.raises(ValueError, match=r"(?s)(?=.*CUDA_DEVICE_MAX_CONNECTIONS)(?=.*\b3\b)(?=.*\b4\b)"):
        ep_a2a.local(4, device="cuda")


def test_the_cpu_is_there_too():
    with ep_a2a.connect(CASE.config(), group=ep_a2a.local(1).ranks[0], device="cpu") as a2a:
        assert a2a.device == torch.device("cpu")
        bodies.one_round(a2a, CASE, 0)


def test_what_is_closed(gpu_world):
    world = gpu_world(2)
    a2as = ep_a2a.connect(CASE.config(), group=world)
    good_round(world, a2as)
    a2as.close()
    a2as.close()
    for a2a in a2as:
        with pytest.raises(ClosedError):
            a2a.check()
    with pytest.raises(ClosedError):
        world.dispatch(dispatch_of(a2as))


@pytest.mark.parametrize("every_s", [0.02, 0.1])
def test_a_late_rank(gpu_world, every_s):
    """Rank 1 does not come: the others wait on the device alone, and are told in three ways."""
    world, told = gpu_world(3), []
    config = CASE.config(timeout_s=1.0)
    a2as = ep_a2a.connect(config, group=world)
    good_round(world, a2as)
    main = threading.get_ident()

    def on_error(error):
        told.append((error, time.monotonic(), threading.get_ident() == main, threading.current_thread().daemon))

    watches = [a2a.watch(on_error, every_s=every_s) for a2a in a2as]
    entries, streams = dispatch_of(a2as), [torch.cuda.Stream() for _ in a2as]
    for rank in (0, 2):
        streams[rank].wait_stream(torch.cuda.current_stream())
    started = time.monotonic()
    for rank in (0, 2):
        with torch.cuda.stream(streams[rank]):
            received, handle = ep_a2a.dispatch(*entries[rank])
            out = ep_a2a.combine(a2as[rank], handle)
        a2as[rank].check()
    assert time.monotonic() - started < 0.5, "the host waited"
    for rank in (0, 2):
        streams[rank].synchronize()
        assert 0.9 < time.monotonic() - started < 2.0
    assert out.isnan().all() and received.num_tokens.tolist() == [0, 0, 0]
    time.sleep(5 * every_s)
    for watch in watches:
        watch.stop()
    assert len(told) == 2 and all(not in_main and daemon for _, _, in_main, daemon in told)
    for error, when, _, _ in told:
        assert isinstance(error, PeerTimeout) and re.search("dispatch: peer 1 ", str(error)), error
        assert when - started < 2.0
    for rank in (0, 2):
        for call in (a2as[rank].check, a2as[rank].outbox, lambda: ep_a2a.dispatch(*entries[rank])):
            with pytest.raises(PeerTimeout, match=rf"rank {rank}, dispatch: peer 1 "):
                call()
    with pytest.raises(PeerTimeout, match="peer 1 "):
        world.dispatch(entries)
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    started = time.monotonic()
    a2as.close()
    assert time.monotonic() - started < 1
    with ep_a2a.connect(config, group=world) as a2as:
        good_round(world, a2as)


def leave(a2a):
    """Leave the `with` block of one rank by an exception."""
    a2a.__exit__(ZeroDivisionError, ZeroDivisionError("as planned"), None)


@pytest.mark.parametrize("leaver", [0, 1])
def test_leaving_by_an_exception_ends_waits_that_run(gpu_world, leaver):
    """Ranks 0 and 2 wait on the device for rank 1; then rank 1 leaves, or rank 0, whose own wait ends too."""
    world = gpu_world(3)
    a2as = ep_a2a.connect(CASE.config(timeout_s=30.0), group=world)
    good_round(world, a2as)
    entries, streams = dispatch_of(a2as), [torch.cuda.Stream() for _ in a2as]
    for rank in (0, 2):
        streams[rank].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[rank]):
            ep_a2a.dispatch(*entries[rank])
    time.sleep(0.2)
    started = time.monotonic()
    leave(a2as[leaver])
    for rank in (0, 2):
        streams[rank].synchronize()
    assert time.monotonic() - started < 5
    for rank in {0, 2} - {leaver}:
        with pytest.raises(ep_a2a.PeerLeft, match=rf"rank {rank}, dispatch: peer {leaver} left"):
            a2as[rank].check()
    if leaver == 0:
        ep_a2a.dispatch(*entries[1])
        torch.cuda.synchronize()
        with pytest.raises(ep_a2a.PeerLeft, match="rank 1, dispatch: peer 0 left"):
            a2as[1].check()
    a2as.close()


def test_a_watchdog_that_was_stopped_tells_nothing(gpu_world):
    world, told = gpu_world(2), []
    config = CASE.config(timeout_s=0.3)
    a2as = ep_a2a.connect(config, group=world)
    good_round(world, a2as)
    watch = a2as[0].watch(told.append, every_s=0.02)
    watch.stop()
    watch.stop()
    ep_a2a.dispatch(*dispatch_of(a2as)[0])
    torch.cuda.synchronize()
    time.sleep(0.2)
    assert not told
    with pytest.raises(PeerTimeout):
        a2as[0].check()
    a2as.close()
