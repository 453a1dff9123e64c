"""Ranks meet in the same step of the same connection or not at all, whoever skipped, failed, left or was cut off."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import ep_a2a
from ep_a2a import world
from ep_a2a.errors import EpError, PeerTimeout, RendezvousTimeout
from ep_a2a.rendezvous.store import StoreGroup
from tests import spawn

PATIENCE_S = 20.0
EVERYWHERE = pytest.mark.parametrize("kind", ["local", "env", "store", "mpirun"])
BOARDS = pytest.mark.parametrize("kind", ["local", "hash"])


def run(kind, num_ranks, body, *args):
    """Run `body(group, *args)` as threads or as processes: the results by rank."""
    if kind == "local":
        return ep_a2a.local(num_ranks).run(body, *args)
    return spawn.run(_worker, num_ranks, body.__name__, kind, *args, launcher=kind)


def _worker(name, kind, *args):
    group = spawn.process_group() if kind == "store" else None
    return globals()[name](group, *args)


def run_groups(kind, num_ranks, body):
    """Run `body(group)` in threads that meet in memory: of a local world, or at a store."""
    if kind == "local":
        return ep_a2a.local(num_ranks).run(body)
    store = dist.HashStore()
    groups = [StoreGroup(rank, num_ranks, "test", lambda timeout_s: store) for rank in range(num_ranks)]
    return ep_a2a.local(num_ranks).run(lambda rank: body(groups[rank.rank]))


def config(**fields):
    torch.set_num_threads(1)
    fields = {"timeout_s": 0.5, "first_timeout_s": PATIENCE_S} | fields
    return ep_a2a.Config(num_experts=4, top_k=1, hidden=32, max_tokens=8, **fields)


def dispatch(a2a):
    return ep_a2a.dispatch(a2a, torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1))


def error_of(call, *args):
    """What `call` raised, or "ok"."""
    try:
        call(*args)
    except (EpError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def connect_and_close(group, fails=False, **fields):
    with ep_a2a.connect(config(**fields), group) as a2a:
        if fails:
            raise KeyError("as planned", a2a.rank)


# ---- what ranks bring --------------------------------------------------------------------------------------------


def _bring_much(group):
    """Of each rank another length; a torch store takes no message of more than 8 MiB."""
    ranks = world.resolve(group)
    lengths = [0, 9 << 20, 4 << 20, (4 << 20) + 1]
    for _ in range(2):
        found = ranks.all_gather(bytes([ranks.rank]) * lengths[ranks.rank], "much", PATIENCE_S)
        assert [len(one) for one in found] == lengths[: ranks.size]
        assert all(set(one) <= {rank} for rank, one in enumerate(found))


@EVERYWHERE
def test_ranks_bring_more_than_a_message_holds(kind):
    run(kind, 4, _bring_much)


# ---- one rank closes alone ---------------------------------------------------------------------------------------


def _one_closes_alone(group):
    rank = world.resolve(group).rank
    started = time.monotonic()
    found = [error_of(connect_and_close, group, rank == 1)]
    seconds = time.monotonic() - started
    return [*found, *(error_of(connect_and_close, group) for _ in range(3))], seconds


@EVERYWHERE
def test_a_rank_that_closes_alone_shifts_nobody(kind):
    for rank, (found, seconds) in enumerate(run(kind, 2, _one_closes_alone)):
        if rank == 0:
            assert found[0].startswith("RendezvousTimeout: rank 0, close: no word from rank 1 after ")
            assert "rank 1 left" in found[0] or "peer 1 left" in found[0]
        else:
            assert found[0].startswith("KeyError: ")
        assert found[1:] == ["ok"] * 3
        assert seconds < PATIENCE_S / 2


def _late(group):
    ranks = world.resolve(group)
    rank = ranks.rank
    ranks.barrier("both have started", PATIENCE_S)  # a process may take longer than the deadline that follows
    a2a = ep_a2a.connect(config(first_timeout_s=2), group)
    if rank == 1:
        time.sleep(2.5)
    else:
        with pytest.raises(PeerTimeout):
            dispatch(a2a)
    started = time.monotonic()
    closed = error_of(a2a.close)
    seconds = time.monotonic() - started
    return closed, seconds, error_of(connect_and_close, group)


@pytest.mark.parametrize("kind", ["local", "env"])
def test_after_a_peer_timeout_ranks_connect_again(kind):
    (first, _, again), (late, seconds, late_again) = run(kind, 2, _late)
    assert (first, again, late_again) == ("ok", "ok", "ok")
    assert late.startswith("RendezvousTimeout: rank 1, close: no word from rank 0 after ")
    assert "PeerTimeout" in late
    assert seconds < 1.5


def _early_close(group):
    a2a = ep_a2a.connect(config(first_timeout_s=15), group)
    ep_a2a.release(a2a, dispatch(a2a)[1])
    started = time.monotonic()
    if a2a.rank == 0:
        return error_of(a2a.close), time.monotonic() - started
    with pytest.raises(PeerTimeout):
        dispatch(a2a)
    time.sleep(3.0)  # it has given up, and is far from its close
    return error_of(a2a.close), time.monotonic() - started


@pytest.mark.parametrize("kind", ["local", "env"])
def test_a_rank_that_closes_early_ends_when_the_peers_give_up(kind):
    (error, seconds), *others = run(kind, 3, _early_close)
    assert error.startswith("RendezvousTimeout: rank 0, close: no word from ranks 1 and 2 after ")
    assert "ended channel 0 for ever: PeerTimeout" in error
    assert seconds < 2.5
    assert [closed for closed, _ in others] == ["ok", "ok"]


# ---- one rank skips, fails or retries ----------------------------------------------------------------------------


def _one_skips(group):
    rank = world.resolve(group).rank
    if rank == 1:
        assert error_of(ep_a2a.connect, None, group).startswith("TypeError")
        time.sleep(0.9)  # rank 0 has given up
    found = [error_of(lambda: connect_and_close(group, first_timeout_s=0.5))] if rank == 0 else []
    return found + [error_of(connect_and_close, group) for _ in range(3)]


@EVERYWHERE
def test_a_rank_that_failed_to_connect_gets_back_in_step(kind):
    first, second = run(kind, 2, _one_skips)
    assert first[0].startswith("RendezvousTimeout: rank 0, connect: configurations: no word from rank 1 after 0.")
    assert first[1:] == second == ["ok"] * 3


@BOARDS
def test_ranks_follow_to_a_later_connection(kind):
    """Rank 1 waits patiently in the connection that rank 0 has given up; rank 2 comes last of all."""

    def body(group):
        if group.rank == 0:
            error = error_of(abandon, group.connection())
            assert "no word from rank 2" in error
        if group.rank == 2:
            time.sleep(1.6)  # rank 0 lingers a second at a store
        made = group.connection()
        return [made.all_gather(b"%d" % group.rank, "first", PATIENCE_S), made.all_gather(b"", "second", PATIENCE_S)]

    def abandon(made):
        try:
            made.barrier("first", 0.2)
        except RendezvousTimeout as error:
            made.leave(str(error))
            raise

    assert run_groups(kind, 3, body) == [[[b"0", b"1", b"2"], [b""] * 3]] * 3


@BOARDS
def test_who_left_is_said_at_once(kind):
    def body(group):
        made = group.connection()
        made.barrier("first", PATIENCE_S)
        if group.rank == 1:
            made.leave("as planned")
            return ""
        return error_of(made.barrier, "second", PATIENCE_S)

    started = time.monotonic()
    for rank, error in enumerate(run_groups(kind, 3, body)):
        if rank != 1:
            assert error.startswith(f"RendezvousTimeout: rank {rank}, second: no word from rank 1 after ")
            assert error.endswith("; rank 1 left with as planned")
    assert time.monotonic() - started < PATIENCE_S / 2


@BOARDS
def test_different_steps_are_named(kind):
    def body(group):
        return error_of(group.barrier, "north" if group.rank else "south", PATIENCE_S)

    found = run_groups(kind, 2, body)
    assert found[0].startswith("EpError: rank 0, south: rank 1 is elsewhere, in 'north' instead of 'south'")
    assert found[1].startswith("EpError: rank 1, north: rank 0 is elsewhere, in 'south' instead of 'north'")


@BOARDS
def test_the_caller_may_give_up(kind):
    def body(group):
        if group.rank == 1:
            return ""
        started = time.monotonic()
        return error_of(lambda: group.barrier("x", 5.0, lambda: "a bird" if time.monotonic() - started > 0.3 else None))

    assert run_groups(kind, 2, body)[0].endswith("; a bird")


def test_a_group_is_resolved_once(monkeypatch):
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(spawn.free_port())}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert world.resolve(None) is world.resolve(None)


# ---- a store that stops ------------------------------------------------------------------------------------------


def _stopped_store():
    group = world.resolve(None)
    pids = [int(pid) for pid in group.all_gather(b"%d" % os.getpid(), "pids", PATIENCE_S)]
    if group.rank == 0:
        time.sleep(1.0)  # stopped in here: it holds the store
        return None
    time.sleep(0.3)
    os.kill(pids[0], signal.SIGSTOP)
    started = time.monotonic()
    try:
        error = error_of(group.barrier, "next", 1.0)
        seconds = time.monotonic() - started
        made = group.connection()
        again = error_of(made.barrier, "connect", 0.3)
        made.leave("silence")
        return error, seconds, again, time.monotonic() - started
    finally:
        os.kill(pids[0], signal.SIGCONT)
        time.sleep(0.5)


def test_a_store_that_is_stopped_is_a_timeout():
    error, seconds, again, in_all = spawn.outcomes(_stopped_store, 2)[1].value
    for text in (error, again):
        assert text.startswith("RendezvousTimeout: rank 1, ")
        assert "the store of torchrun at 127.0.0.1:" in text
        assert " does not answer after " in text
    assert 1.0 <= seconds < 2.5
    assert in_all < 5


# ---- a run that is interrupted, or cannot start ------------------------------------------------------------------


def test_an_interrupted_run_is_cut_off():
    ranks = ep_a2a.local(2)
    met, old, ended = [threading.Event(), threading.Event()], [], threading.Barrier(3)

    def first(rank):
        rank.barrier("all are here", PATIENCE_S)
        met[rank.rank].set()
        time.sleep(1.0)
        old.append(error_of(rank.barrier, "late", PATIENCE_S))
        old.append(error_of(connect_and_close, rank))
        ended.wait(PATIENCE_S)

    def interrupt():
        for event in met:  # a rank that had yet to leave the barrier would be cut off there
            event.wait(PATIENCE_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ranks.run(first)
    until = time.monotonic() + 2.0

    def second(rank):
        while rank.all_gather(b"%d" % (time.monotonic() < until), "go on", PATIENCE_S)[0] == b"1":
            connect_and_close(rank)
        return "ok"

    assert ranks.run(second) == ["ok", "ok"]
    ended.wait(PATIENCE_S)
    assert len(old) == 4
    assert all("failed with KeyboardInterrupt, its ranks do not meet any more" in error for error in old)


def test_an_interrupted_run_ends_the_wait_of_its_ranks():
    ranks, found, ended = ep_a2a.local(2), [], threading.Event()

    def body(rank):
        if rank.rank == 0:
            started = time.monotonic()
            threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
            found.append(error_of(rank.barrier, "x", PATIENCE_S))
            found.append(time.monotonic() - started)
            ended.set()
        else:
            ended.wait(PATIENCE_S)

    with pytest.raises(KeyboardInterrupt):
        ranks.run(body)
    assert ended.wait(PATIENCE_S)
    assert found[0].endswith("; rank 1 failed with KeyboardInterrupt")
    assert found[1] < 5


def test_a_thread_that_does_not_start(monkeypatch):
    ranks, start = ep_a2a.local(3), threading.Thread.start

    def fail(thread):
        if thread.name == "rank 2":
            raise RuntimeError("can't start new thread")
        start(thread)

    started = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread") as info:
            ranks.run(lambda rank: rank.barrier("x", PATIENCE_S))
    assert time.monotonic() - started < PATIENCE_S / 2
    assert sum("no word from rank 2 after" in note for note in info.value.__notes__) == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert ranks.run(lambda rank: rank.all_gather(b"", "again", PATIENCE_S)) == [[b""] * 3] * 3


# ---- MPI ---------------------------------------------------------------------------------------------------------


def _many_communicators(num):
    from mpi4py import MPI

    for _ in range(num):
        comm = MPI.COMM_WORLD.Dup()
        group = world.resolve(comm)
        assert group.all_gather(b"%d" % group.rank, "x", PATIENCE_S) == [b"0", b"1"]
        assert group._board._own[0] != MPI.COMM_NULL
        comm.Free()
        assert group._board._own[0] == MPI.COMM_NULL
    return error_of(group.barrier, "freed", 1.0)


@pytest.mark.parametrize("num", [3, pytest.param(2100, marks=pytest.mark.slow)])  # MPICH has 2,048 of them
def test_a_freed_communicator_gives_back_what_it_took(num):
    for error in spawn.run(_many_communicators, 2, num, launcher="mpirun"):
        assert error.startswith("EpError: ") and error.endswith(" was freed")


def _all_leave_alone():
    return error_of(connect_and_close, None, True)


def test_mpi_ends_well_where_nobody_reads_the_last_words():
    for one in spawn.outcomes(_all_leave_alone, 3, launcher="mpirun"):
        assert one.value.startswith("KeyError"), one
        assert one.exit_code == 0, one.output
