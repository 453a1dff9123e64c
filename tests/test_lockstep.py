"""Local worlds whose ranks are driven together by one thread: the same bits as threads give, and errors in time."""

from __future__ import annotations

import time

import pytest
import torch

import ep_a2a
from ep_a2a import BF16, FP8, NVFP4, InvalidRouting, PeerLeft, RoundError
from ep_a2a.testing import assert_same_bits
from tests import bodies
from tests.bodies import Case


def calls_of(a2as, case, round_):
    """What `dispatch` of every rank takes."""
    given = [bodies.make_inputs(case, round_, a2a.rank, len(a2as)) for a2a in a2as]
    return [(a2a, x, planes["ids"], planes["weights"]) for a2a, (x, planes) in zip(a2as, given)]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("payload", [NVFP4, BF16])
def test_rounds(num_ranks, payload):
    case = Case(payload=payload, num_rounds=4)
    world = ep_a2a.local(num_ranks)
    with ep_a2a.connect(case.config(), group=world) as a2as:
        assert [a2a.rank for a2a in a2as] == list(range(num_ranks))
        for round_ in range(case.num_rounds):
            found = world.dispatch(calls_of(a2as, case, round_))
            planes = [bodies.make_inputs(case, round_, rank, num_ranks)[1] for rank in range(num_ranks)]
            for a2a, (received, _) in zip(a2as, found):
                bodies.assert_received(received, a2a.config, planes, a2a.rank, None)
                bodies.fill_results(case, round_, received, a2a.outbox(), a2a.rank)
            ends = [(a2a, handle) for a2a, (_, handle) in zip(a2as, found)]
            if round_ == 2:
                assert world.release(ends) is None
                continue
            for a2a, out in zip(a2as, world.combine(ends)):
                ids = planes[a2a.rank]["ids"]
                assert_same_bits(out, bodies.wanted_out(case, a2a.config, round_, a2a.rank, ids, num_ranks))
    for a2a in a2as:
        with pytest.raises(ep_a2a.ClosedError):
            a2a.check()


def test_encoded_results_and_other_channels():
    case, world = Case(combine=FP8, num_rounds=1), ep_a2a.local(3)
    with ep_a2a.connect(case.config(channels=2), group=world) as a2as:
        found = world.dispatch(calls_of(a2as, case, 0), channel=1)
        ends = []
        for a2a, (received, handle) in zip(a2as, found):
            assert handle.channel == 1
            bodies.fill_results(case, 0, received, a2a.scratch(1), a2a.rank)
            ends.append((a2a, handle, a2a.scratch(1)))
        outs = world.combine(ends)
        for a2a, out in zip(a2as, outs):
            ids = bodies.make_inputs(case, 0, a2a.rank, 3)[1]["ids"]
            assert_same_bits(out, bodies.wanted_out(case, a2a.config, 0, a2a.rank, ids, 3))


def test_a_wrong_argument_of_one_rank_launches_nothing():
    case, world = Case(), ep_a2a.local(3)
    with ep_a2a.connect(case.config(), group=world) as a2as:
        good = calls_of(a2as, case, 0)
        wrong = [*good[:2], (*good[2][:3], good[2][3].double())]
        for _ in range(2):
            with pytest.raises(TypeError, match=r"topk_weights is .*float64"):
                world.dispatch(wrong)
        found = world.dispatch(good)
        ends = [(a2a, handle) for a2a, (_, handle) in zip(a2as, found)]
        with pytest.raises(TypeError, match=r"rows is .*int32"):
            world.combine([*ends[:2], (*ends[2], torch.zeros(3, dtype=torch.int32))])
        world.release(ends)
        with pytest.raises(RoundError):
            world.release(ends)


def test_calls_come_by_rank():
    case, world = Case(), ep_a2a.local(2)
    with ep_a2a.connect(case.config(), group=world) as a2as:
        good = calls_of(a2as, case, 0)
        with pytest.raises(ValueError, match="1 calls for 2 ranks"):
            world.dispatch(good[:1])
        with pytest.raises(ValueError, match=r"the calls are of ranks \[1, 0\]"):
            world.dispatch(good[::-1])
        with pytest.raises(ValueError, match=r"the calls are of ranks \[0, None\]"):
            world.dispatch([good[0], ("a2a",)])
        other = ep_a2a.local(2)
        with ep_a2a.connect(case.config(), group=world) as again, ep_a2a.connect(case.config(), group=other) as others:
            for mixed in ([good[0], calls_of(again, case, 0)[1]], calls_of(others, case, 0)):
                with pytest.raises(ValueError, match="not of one connection of this world"):
                    world.dispatch(mixed)


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((33, "cuda"), ValueError, "num_ranks=33: must be 1 to 32 on 'cuda'"),
        ((2, "meta"), ValueError, "device='meta': must be 'cpu' or 'cuda'"),
    ],
)
def test_worlds_that_cannot_be(args, error, text):
    with pytest.raises(error, match=text):
        ep_a2a.local(*args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    with pytest.raises(ep_a2a.EpError, match=r"torch can use no GPU here: .+; device='cpu' runs on the CPU"):
        ep_a2a.local(2, "cuda")
    with pytest.raises(ep_a2a.EpError, match="connect: rank 0 cannot run: torch can use no GPU here"):
        ep_a2a.connect(Case().config(), device="cuda")
    with ep_a2a.connect(Case().config(), device="cpu") as a2a:
        assert a2a.device == torch.device("cpu")
    assert ep_a2a.set_device() == torch.device("cpu")
    ep_a2a.reserve(1 << 30)


def test_bad_routing_is_told_by_the_rank_that_had_it():
    case, world = Case(), ep_a2a.local(2)
    with ep_a2a.connect(case.config(), group=world) as a2as:
        calls = calls_of(a2as, case, 0)
        x, ids, weights = calls[1][1:]
        ids = ids.clone()
        ids[0, 0] = 99
        found = world.dispatch([calls[0], (a2as[1], x, ids, weights)])
        world.release([(a2a, handle) for a2a, (_, handle) in zip(a2as, found)])
        a2as[0].check()
        with pytest.raises(InvalidRouting, match="rank 1: token 0, position 0: expert 99"):
            a2as[1].check()


def test_when_one_rank_has_ended_all_close():
    case, world = Case(), ep_a2a.local(3)
    a2as = ep_a2a.connect(case.config(timeout_s=0.2, first_timeout_s=0.2), group=world)
    with pytest.raises(ep_a2a.PeerTimeout):
        ep_a2a.dispatch(*calls_of(a2as, case, 0)[1])
    started = time.monotonic()
    a2as.close()
    a2as.close()
    assert time.monotonic() - started < 5


def test_leaving_by_an_exception_ends_every_rank():
    case, world = Case(), ep_a2a.local(2)
    with pytest.raises(ZeroDivisionError), ep_a2a.connect(case.config(), group=world) as a2as:
        raise ZeroDivisionError
    for a2a in a2as:
        with pytest.raises(ep_a2a.ClosedError):
            a2a.check()


def test_a_watch_tells_once():
    case, world, told = Case(), ep_a2a.local(2), []
    a2as = ep_a2a.connect(case.config(), group=world)
    watches = [a2a.watch(told.append, every_s=0.01) for a2a in a2as]
    idle = a2as[0].watch(told.append, every_s=0.01)
    idle.stop()
    a2as[1].__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    with pytest.raises(PeerLeft):
        ep_a2a.dispatch(*calls_of(a2as, case, 0)[0])
    for watch in watches:
        watch._thread.join(5)
        assert not watch._thread.is_alive()
    assert [type(error) for error in told] == [PeerLeft]
    a2as[0].close()
