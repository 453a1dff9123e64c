"""Local worlds whose ranks are driven together by one thread: the same bits as threads give, and errors in time."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import ep_a2a
from ep_a2a import BF16, FP8, NVFP4, InvalidRouting, PeerLeft, RoundError, lockstep, native
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
        with pytest.raises(TypeError, match="the call of rank 1: missing a required argument: 'topk_weights'"):
            world.dispatch([good[0], good[1][:3]])
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
        ((2, "gpu"), ValueError, "device='gpu': must be 'cpu' or 'cuda'"),
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


@pytest.mark.parametrize("how", ["close", "with"])
def test_when_one_rank_has_ended_all_close(how):
    case, world = Case(), ep_a2a.local(3)
    a2as = ep_a2a.connect(case.config(timeout_s=0.2, first_timeout_s=0.2), group=world)
    with pytest.raises(ep_a2a.PeerTimeout):
        ep_a2a.dispatch(*calls_of(a2as, case, 0)[1])
    started = time.monotonic()
    a2as.close() if how == "close" else a2as.__exit__(None, None, None)
    a2as.close()
    assert time.monotonic() - started < 5


def test_leaving_by_an_exception_ends_every_rank():
    case, world = Case(), ep_a2a.local(2)
    with pytest.raises(ZeroDivisionError), ep_a2a.connect(case.config(), group=world) as a2as:
        raise ZeroDivisionError
    for a2a in a2as:
        with pytest.raises(ep_a2a.ClosedError):
            a2a.check()


def test_leaving_where_the_device_does_not_answer():
    """The error of the block comes out, not that of telling the peers."""
    a2a = ep_a2a.connect(Case().config(), device="cpu")

    def fail(*_):
        raise ep_a2a.EpError("ep_a2a_leave: an illegal memory access was encountered (error 700)")

    a2a._channels[0]._library = SimpleNamespace(leave=fail)
    with pytest.raises(ZeroDivisionError), a2a:
        raise ZeroDivisionError
    with pytest.raises(ep_a2a.ClosedError):
        a2a.check()


def test_streams_join_after_an_exception(monkeypatch):
    """What the current stream lent is in use until the ranks' streams have ended."""
    world, joined = ep_a2a.local(2), []

    class Stream:
        device = None

        def __init__(self, name):
            self.name = name

        def record_event(self):
            return self.name

        def wait_event(self, event):
            joined.append((event, self.name))

        def wait_stream(self, other):
            joined.append((other.name, self.name))

    class Pending:
        def wait(self):
            raise KeyboardInterrupt

    with ep_a2a.connect(Case().config(), group=world) as a2as, monkeypatch.context() as patched:
        patched.setattr(world, "streams", [Stream(0), Stream(1)])
        patched.setattr(torch.cuda, "current_stream", lambda _: Stream("current"))
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patched.setattr(lockstep._device, "on", lambda _: nullcontext())
        with pytest.raises(KeyboardInterrupt):
            world._together(lambda a2a: lambda and_wait: Pending(), [(a2a,) for a2a in a2as])
    assert joined == [("current", 0), ("current", 1), (0, "current"), (1, "current")]


def test_a_wait_that_was_interrupted_is_not_repeated():
    """Ctrl-C is raised as the kernel returns: the round has ended, and the next one can follow."""
    with ep_a2a.connect(Case().config(timeout_s=1.0), device="cpu") as a2a:
        x, own = bodies.make_inputs(Case(), 0, 0, 1)
        channel, library = a2a._channels[0], a2a.library

        def wait(*args):
            library.end(*args)
            raise KeyboardInterrupt

        _, handle = ep_a2a.dispatch(a2a, x, own["ids"], own["weights"])
        pending = ep_a2a.release_begin(a2a, handle)
        channel._library = SimpleNamespace(end=wait)
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
        channel._library = library
        with pytest.raises(RoundError, match="was waited for already"):
            pending.wait()
        ep_a2a.release(a2a, ep_a2a.dispatch(a2a, x, own["ids"], own["weights"])[1])
        a2a.check()


def test_scratch_is_ordinary_memory():
    """Whatever mode it is first asked for in, and whatever was written into it."""
    with ep_a2a.connect(Case(combine=FP8).config(), device="cpu") as a2a:
        with torch.inference_mode():
            a2a.scratch()
        a2a.scratch()[0] = torch.ones(1, requires_grad=True)
        assert not a2a.scratch().requires_grad


def test_extra_planes_are_a_tuple_or_a_list():
    with ep_a2a.connect(Case().config(), device="cpu") as a2a:
        x, own = bodies.make_inputs(Case(), 0, 0, 1)
        with pytest.raises(TypeError, match="extra must be a tuple or list of tensors, not Tensor"):
            ep_a2a.dispatch(a2a, x, own["ids"], own["weights"], extra=torch.zeros(3, 4, dtype=torch.uint8))


def test_an_input_record_is_read_before_it_is_cleared():
    order = []

    class Record:
        def __getattr__(self, name):
            order.append(("read", name))
            return 1

        def __setattr__(self, name, value):
            order.append(("written", name))

    for found in range(3):
        order.clear()
        native.take_input_error(0, [SimpleNamespace(present=0)] * found + [Record()])
        assert order[0] == ("read", "present") and order[-1] == ("written", "present")


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
