"""Late and dead peers: who is named, by whom and how soon, what stays as it was, and what may be called afterwards.

Every body runs as threads and as processes. A first round passes with a long deadline; the next one has a short one.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch

import ep_a2a
from ep_a2a import BF16, ClosedError, PeerTimeout, RendezvousTimeout, RoundMismatch, world
from tests import bodies, spawn
from tests.bodies import PATIENCE_S, Case
from tests.left_behind import LeftBehind

TIMEOUT_S = 1.0
MARGIN_S = 1.0
MEET_S = 20.0
CASE = Case(num_experts=4, top_k=4, hidden=64, max_tokens=8, payload=BF16, counts="full")
EVERYWHERE = pytest.mark.parametrize("kind", ["local", "processes"])


def run(kind, num_ranks, body, *args):
    if kind == "local":
        return ep_a2a.local(num_ranks).run(body, *args)
    return spawn.run(_worker, num_ranks, body.__name__, *args)


def _worker(name, *args):
    return globals()[name](world.resolve(None), *args)


def rows():
    return torch.ones(8, 64).bfloat16(), torch.arange(4, dtype=torch.int32).repeat(8, 1), torch.ones(8, 4)


def connect(group, **more):
    """An object whose first round has passed, and what was received in it, poisoned; the outbox holds fives."""
    torch.set_num_threads(1)
    fields = {"timeout_s": TIMEOUT_S, "first_timeout_s": PATIENCE_S} | more
    a2a = ep_a2a.connect(CASE.config(**fields), group=group)
    received = None
    for channel in range(a2a.config.channels):
        received, handle = ep_a2a.dispatch(a2a, *rows(), channel=channel)
        a2a.outbox(channel).fill_(5.0)
        bodies.poison(received, 0)
        assert (ep_a2a.combine(a2a, handle) == 5 * a2a.num_ranks).all()
    group.barrier("the first round has passed", MEET_S)
    return a2a, received


def expect(error, text, call):
    """The seconds after which `call` raised what it must."""
    started = time.monotonic()
    with pytest.raises(error, match=text):
        call()
    return time.monotonic() - started


def in_time(seconds):
    assert TIMEOUT_S * 0.9 < seconds < TIMEOUT_S + MARGIN_S, seconds


def finish(a2a, error, *handles):
    """After a sticky error every call raises it again, but close(), which then asks no peer."""
    for call in (ep_a2a.dispatch, ep_a2a.dispatch_begin):
        expect(error, f"rank {a2a.rank}", lambda: call(a2a, *rows()))
    for handle in handles:
        for end in (ep_a2a.combine, ep_a2a.release, ep_a2a.combine_begin, ep_a2a.release_begin):
            expect(error, f"rank {a2a.rank}", lambda: end(a2a, handle))
    for _ in range(2):
        expect(error, f"rank {a2a.rank}", a2a.check)
    started = time.monotonic()
    a2a.close()
    a2a.close()
    assert time.monotonic() - started < 1
    expect(ClosedError, "closed", a2a.check)


# ---- one late rank -----------------------------------------------------------------------------------------------


def _late_in_dispatch(group, late):
    a2a, received = connect(group)
    outbox = a2a.outbox()
    if a2a.rank == late:
        group.barrier("the others gave up", MEET_S)
        assert expect(PeerTimeout, rf"rank {late}, dispatch: .*gave up", lambda: ep_a2a.dispatch(a2a, *rows())) < 0.5
    else:
        text = rf"rank {a2a.rank}, dispatch: peer {late} "
        in_time(expect(PeerTimeout, text, lambda: ep_a2a.dispatch(a2a, *rows())))
        assert (outbox == 5).all()
        for plane in bodies.received_planes(received).values():
            assert (bodies.as_bits(plane)[late] == bodies.pattern(plane, 0)).all()
        group.barrier("the others gave up", MEET_S)
    assert received.num_tokens.tolist() == [0] * a2a.num_ranks
    group.barrier("all have been told", MEET_S)
    finish(a2a, PeerTimeout)


@EVERYWHERE
@pytest.mark.parametrize("late", [0, 2])
def test_a_peer_that_is_late_in_dispatch(kind, late):
    run(kind, 4, _late_in_dispatch, late)


def _late_in_the_end(group, late, how):
    a2a, _ = connect(group)
    received, handle = ep_a2a.dispatch(a2a, *rows())
    outbox = a2a.outbox().fill_(6.0)
    kept = {name: plane.clone() for name, plane in bodies.received_planes(received).items()}
    out = torch.ones(8, 64).bfloat16()

    def end():
        return ep_a2a.combine(a2a, handle, out=out) if how == "combine" else ep_a2a.release(a2a, handle)

    if a2a.rank == late:
        group.barrier("the others gave up", MEET_S)
        assert expect(PeerTimeout, rf"rank {late}, {how}: .*gave up", end) < 0.5
    else:
        in_time(expect(PeerTimeout, rf"rank {a2a.rank}, {how}: peer {late} ", end))
        group.barrier("the others gave up", MEET_S)
    assert out.isnan().all() if how == "combine" else (out == 1).all()
    assert (outbox == 6).all()
    for name, plane in bodies.received_planes(received).items():
        assert torch.equal(plane, kept[name])
    group.barrier("all have been told", MEET_S)
    finish(a2a, PeerTimeout, handle)


@EVERYWHERE
@pytest.mark.parametrize("how", ["combine", "release"])
def test_a_peer_that_is_late_in_the_end_of_a_round(kind, how):
    run(kind, 4, _late_in_the_end, 1, how)


def _the_numbers(group):
    a2a, _ = connect(group)
    _, handle = ep_a2a.dispatch(a2a, *rows())
    if a2a.rank == 0:
        text = r"rank 0, combine: peer 1 at epoch (\d+), wanted (\d+), after (\d+\.\d+) s"
        with pytest.raises(PeerTimeout, match=text) as found:
            ep_a2a.combine(a2a, handle)
        at, wanted, after = found.value.args[0].split("epoch ")[1].replace("wanted ", "").split(", ")
        assert int(wanted) == int(at) + 1 and TIMEOUT_S <= float(after.split()[1]) < TIMEOUT_S + MARGIN_S
    group.barrier("told", MEET_S)


def test_the_message_has_both_epochs_and_the_time():
    run("local", 2, _the_numbers)


def _late_with_the_pending(group):
    a2a, _ = connect(group)
    pending = ep_a2a.dispatch_begin(a2a, *rows()) if a2a.rank != 1 else None
    if pending is not None:
        in_time(expect(PeerTimeout, "peer 1 ", pending.wait if a2a.rank else pending.abandon))
        finish(a2a, PeerTimeout)
    group.barrier("told", MEET_S)


def test_pending_calls_tell_too():
    run("local", 3, _late_with_the_pending)


def _outbox_after_a_timeout(group):
    a2a, _ = connect(group)
    if a2a.rank == 0:
        expect(PeerTimeout, "peer 1 ", lambda: ep_a2a.dispatch(a2a, *rows()))
        expect(PeerTimeout, "peer 1 ", a2a.outbox)
    group.barrier("told", MEET_S)


def test_outbox_raises_again():
    run("local", 2, _outbox_after_a_timeout)


def _two_late(group):
    a2a, _ = connect(group)
    if a2a.rank in (0, 1):
        in_time(expect(PeerTimeout, rf"rank {a2a.rank}, dispatch: peer [23] ", lambda: ep_a2a.dispatch(a2a, *rows())))
    group.barrier("two gave up", MEET_S)
    if a2a.rank == 3:  # it finds the abort of two ranks and need not wait for the deadline; rank 2 never comes
        seconds = expect(PeerTimeout, r"rank 3, dispatch: (peer 2 |.*gave up)", lambda: ep_a2a.dispatch(a2a, *rows()))
        assert seconds < TIMEOUT_S * 0.8, seconds
    group.barrier("told", MEET_S)


@EVERYWHERE
def test_two_late_peers(kind):
    run(kind, 4, _two_late)


# ---- a dead rank -------------------------------------------------------------------------------------------------


def _die(when, victim):
    group = world.resolve(None)
    a2a, _ = connect(group)
    handle = ep_a2a.dispatch(a2a, *rows())[1] if when == "combine" else None
    if a2a.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    call = (lambda: ep_a2a.dispatch(a2a, *rows())) if handle is None else (lambda: ep_a2a.combine(a2a, handle))
    seconds = expect(PeerTimeout, rf"rank {a2a.rank}, {when}: peer {victim} ", call)
    in_time(seconds)
    finish(a2a, PeerTimeout, *([handle] if handle else []))
    return "told"


def _one_round():
    return bodies.rounds(world.resolve(None), Case(num_rounds=1))


@pytest.mark.parametrize(("when", "victim"), [("dispatch", 2), ("combine", 2), ("combine", 0)])
def test_a_dead_peer(when, victim):
    found = spawn.outcomes(_die, 4, when, victim)
    assert found[victim].exit_code == -signal.SIGKILL
    for rank in {0, 1, 2, 3} - {victim}:
        assert found[rank].value == "told", found[rank]
    spawn.run(_one_round, 4)  # the next job is not stopped by what the dead one left


def names_the_dead(output, launcher, rank):
    """Does a launcher's output end with which rank was killed? MPICH's says the process alone."""
    end = output[-1500:]
    named = {"torchrun": rf"Root Cause[\s\S]*rank +: {rank} [\s\S]*SIGKILL", "mpirun": rf"rank {rank} [\s\S]*signal 9"}
    by_process = "BAD TERMINATION" in end and re.search(r"PID \d+ RUNNING[\s\S]*Killed \(signal 9\)", end)
    assert re.search(named[launcher], end) or (launcher == "mpirun" and by_process), output[-4000:]


@pytest.mark.parametrize(("launcher", "when"), [("torchrun", "combine"), ("mpirun", "dispatch")])
def test_a_launcher_names_a_dead_rank(launcher, when):
    before = LeftBehind()
    found = spawn.outcomes(_die, 2, when, 1, launcher=launcher, env=before.env)
    assert found[0].exit_code not in (0, None)
    names_the_dead(found[0].output, launcher, 1)
    before.expect_nothing()


# ---- the first round, connect, close -----------------------------------------------------------------------------


def _late_in_the_first_round(group):
    a2a = ep_a2a.connect(CASE.config(timeout_s=PATIENCE_S, first_timeout_s=2.0), group=group)
    if a2a.rank == 0:
        seconds = expect(PeerTimeout, "rank 0, dispatch: peer 1 ", lambda: ep_a2a.dispatch(a2a, *rows()))
        assert 1.9 < seconds < 2 + MARGIN_S, seconds
    group.barrier("told", MEET_S)
    a2a.close() if a2a.rank == 0 else None


def test_the_first_round_has_its_own_deadline():
    run("local", 2, _late_in_the_first_round)


def _missing_in_connect(group):
    config = CASE.config(first_timeout_s=2.0)
    if group.rank == 0:
        seconds = expect(RendezvousTimeout, r"rank 0.*rank 1\b", lambda: ep_a2a.connect(config, group=group))
        assert 1.9 < seconds < 2 + MARGIN_S, seconds


@EVERYWHERE
def test_a_rank_that_does_not_connect(kind):
    run(kind, 2, _missing_in_connect)


def _missing_in_close(group):
    a2a = ep_a2a.connect(CASE.config(first_timeout_s=2.0), group=group)
    bodies.one_round(a2a, CASE, 0)
    if a2a.rank == 0:
        seconds = expect(RendezvousTimeout, r"rank 0.*rank 1\b", a2a.close)
        assert 1.9 < seconds < 2 + MARGIN_S, seconds
        a2a.close()
        expect(ClosedError, "closed", a2a.check)


@EVERYWHERE
def test_a_rank_that_does_not_close(kind):
    run(kind, 2, _missing_in_close)


# ---- mixed kinds -------------------------------------------------------------------------------------------------


def _mixed(group, releasing):
    a2a, _ = connect(group, timeout_s=PATIENCE_S)
    _, handle = ep_a2a.dispatch(a2a, *rows())
    out = torch.ones(8, 64).bfloat16()
    end, more = (ep_a2a.release, {}) if a2a.rank in releasing else (ep_a2a.combine, {"out": out})
    with pytest.raises(RoundMismatch) as found:
        end(a2a, handle, **more)
    text = str(found.value)
    named = {int(rank) for rank in re.findall(r"(?:rank|peer) (\d+)", text)}
    assert named & set(releasing) and named - set(releasing), text  # one of each kind
    assert "release" in text and "combine" in text and f"peer {a2a.rank} " not in text, text
    assert (out == 1).all() if a2a.rank in releasing else out.isnan().all()
    group.barrier("all have been told", MEET_S)
    finish(a2a, RoundMismatch, handle)


@EVERYWHERE
@pytest.mark.parametrize("releasing", [(0,), (2,), (1, 3)])
def test_combine_and_release_mixed(kind, releasing):
    run(kind, 4, _mixed, releasing)


# ---- channels and objects ----------------------------------------------------------------------------------------


def _abort_on_one_channel(group):
    a2a, _ = connect(group, channels=2)
    other = ep_a2a.connect(Case().config(), group=group)
    _, handle = ep_a2a.dispatch(a2a, *rows(), channel=0)
    group.barrier("channel 0 is open", MEET_S)
    if a2a.rank != 1:
        in_time(expect(PeerTimeout, "peer 1 ", lambda: ep_a2a.dispatch(a2a, *rows(), channel=1)))
        expect(PeerTimeout, "peer 1 ", lambda: ep_a2a.combine(a2a, handle))
    group.barrier("the others gave up", MEET_S)
    for round_ in range(3):  # another object of the same ranks goes on
        bodies.one_round(other, Case(), round_)
    if a2a.rank != 1:
        finish(a2a, PeerTimeout, handle)
    other.close()


@EVERYWHERE
def test_an_abort_on_one_channel_ends_the_object_and_no_other(kind):
    run(kind, 3, _abort_on_one_channel)


def _routing_and_timeout(group):
    a2a, _ = connect(group)
    if a2a.rank == 0:
        x, _, weights = rows()
        seconds = expect(
            PeerTimeout, "peer 1 ", lambda: ep_a2a.dispatch(a2a, x, torch.full((8, 4), 99, dtype=torch.int32), weights)
        )
        in_time(seconds)
        finish(a2a, PeerTimeout)
    group.barrier("told", MEET_S)


def test_bad_ids_do_not_hide_a_timeout():
    run("local", 2, _routing_and_timeout)
