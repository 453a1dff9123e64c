"""Groups: who is there, by every launcher, and what is said when somebody is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ep_a2a
from ep_a2a import world
from ep_a2a.errors import EpError, RendezvousTimeout
from ep_a2a.rendezvous.store import StoreGroup
from tests import spawn

# ---- local world -------------------------------------------------------------------------------------------------


def test_local_gathers_in_rank_order_many_times():
    def work(rank, factor):
        return [rank.all_gather(bytes([rank.rank] * (rank.rank + i * factor)), "x", 10) for i in range(20)]

    for found in ep_a2a.local(7).run(work, 3):
        assert found == [[bytes([r] * (r + 3 * i)) for r in range(7)] for i in range(20)]


def test_local_64_ranks():
    ranks = ep_a2a.local(64).run(lambda rank: (rank.rank, rank.size, len(rank.all_gather(b"", "x", 20))))
    assert ranks == [(r, 64, 64) for r in range(64)]


def test_local_keeps_nothing_after_a_call():
    ranks = ep_a2a.local(4)
    ranks.run(lambda rank: [rank.barrier("x", 10) for _ in range(5)])
    assert not ranks._meeting.words


def test_local_barrier_waits_for_the_last():
    arrived = []

    def work(rank):
        if rank.rank == 2:
            time.sleep(0.2)
        arrived.append(rank.rank)
        rank.barrier("x", 10)
        return len(arrived)

    assert ep_a2a.local(4).run(work) == [4, 4, 4, 4]


def test_local_deadline_names_the_missing():
    def work(rank):
        if rank.rank not in (2, 5):
            rank.barrier("connect", 0.2)

    with pytest.raises(RendezvousTimeout) as info:
        ep_a2a.local(6).run(work)
    assert re.fullmatch(r"rank \d, connect: no word from ranks 2 and 5 after 0\.2 s", info.value.args[0])
    assert len(info.value.__notes__) == 4  # who raised it, and the three others


def test_local_first_error_wins_and_ends_the_wait_of_others():
    ranks = ep_a2a.local(4)

    def work(rank):
        if rank.rank == 3:
            raise KeyError("lost")
        rank.barrier("connect", 60)

    started = time.monotonic()
    with pytest.raises(KeyError, match="lost") as info:
        ranks.run(work)
    assert time.monotonic() - started < 10
    assert info.value.__notes__[0] == "raised by rank 3 of a local world"
    assert sum("no word from rank 3 after" in note and "lost" in note for note in info.value.__notes__) == 3
    assert ranks.run(lambda rank: rank.all_gather(bytes([rank.rank]), "again", 10)[3]) == [b"\x03"] * 4


def test_local_all_threads_end_before_the_error():
    def work(rank):
        if rank.rank == 0:
            raise ValueError("early")
        time.sleep(0.2)

    before = threading.active_count()
    with pytest.raises(ValueError, match="early"):
        ep_a2a.local(3).run(work)
    assert threading.active_count() == before


def test_local_is_run_by_one_at_a_time():
    ranks = ep_a2a.local(1)
    with pytest.raises(EpError, match="one `run` at a time"):
        ranks.run(lambda rank: ranks.run(lambda again: None))


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((0,), ValueError, "num_ranks=0: must be 1 to 128"),
        ((129,), ValueError, "num_ranks=129"),
        ((True,), TypeError, "num_ranks must be an int, not bool"),
        ((2.0,), TypeError, "num_ranks must be an int, not float"),
    ],
)
def test_local_refuses(args, error, text):
    with pytest.raises(error, match=text):
        ep_a2a.local(*args)


# ---- what resolve takes ------------------------------------------------------------------------------------------

_NAMES = [name for one in world._LAUNCHERS for name in (one.rank, one.size)]


@pytest.fixture
def environment(monkeypatch):
    for name in (*_NAMES, *world._OTHERS, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)

    def put(**env):
        for name, value in env.items():
            monkeypatch.setenv(name, str(value))

    return put


@pytest.mark.usefixtures("environment")
def test_nothing_is_a_world_of_one():
    group = world.resolve(None)
    assert (group.rank, group.size, group.all_gather(b"me", "x", 1)) == (0, 1, [b"me"])


def test_a_group_is_itself():
    rank = ep_a2a.local(2).ranks[1]
    assert world.resolve(rank) is rank


@pytest.mark.parametrize("group", [3, "world", object()])
def test_refuses_other_things(group):
    with pytest.raises(TypeError, match=f"not {type(group).__name__}"):
        world.resolve(group)


def test_refuses_a_whole_local_world():
    with pytest.raises(TypeError, match=r"world\.ranks\[r\]"):
        world.resolve(ep_a2a.local(2))


@pytest.mark.parametrize(
    ("env", "texts"),
    [
        ({"RANK": 0}, ["torchrun: WORLD_SIZE is missing", "Found RANK=0."]),
        ({"WORLD_SIZE": 4, "PMI_RANK": 0, "PMI_SIZE": 4}, ["RANK is missing", "WORLD_SIZE=4, PMI_RANK=0, PMI_SIZE=4"]),
        ({"RANK": 4, "WORLD_SIZE": 4}, ["rank 4 is none of 4 ranks"]),
        ({"RANK": "x", "WORLD_SIZE": 4}, ["must be numbers", "RANK=x"]),
        ({"RANK": 1, "WORLD_SIZE": 4, "MASTER_ADDR": "h"}, ["MASTER_ADDR and MASTER_PORT", "MASTER_ADDR=h"]),
        ({"RANK": 1, "WORLD_SIZE": 4, "MASTER_ADDR": "h", "MASTER_PORT": "70000"}, ["no address", "h:70000"]),
        ({"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "h", "MASTER_PORT": "abc"}, ["h:abc", "MASTER_PORT=abc"]),
        ({"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "h", "MASTER_PORT": "²"}, ["h:²", "MASTER_PORT=²"]),
        ({"OMPI_COMM_WORLD_RANK": 1}, ["Open MPI: OMPI_COMM_WORLD_SIZE is missing"]),
        ({"PMI_SIZE": 2}, ["PMI_RANK is missing"]),
        ({"SLURM_NTASKS": 4}, ["SLURM_PROCID is missing; in an allocation, start ranks with srun"]),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_STEP_NUM_TASKS": 1}, ["the step has other tasks", "=4", "=1"]),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4}, ["no address where ranks can meet: no host"]),
    ],
)
def test_a_confused_environment_is_listed(environment, env, texts):
    environment(**env)
    with pytest.raises(EpError) as info:
        world.resolve(None)
    for text in texts:
        assert text in str(info.value)


def test_torchrun_before_mpi_before_slurm(environment):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    environment(SLURM_PROCID=3, SLURM_NTASKS=9, **address)
    assert (world.resolve(None).rank, world.resolve(None).name) == (3, "Slurm at 127.0.0.1:1")
    environment(PMI_RANK=2, PMI_SIZE=8)
    assert (world.resolve(None).rank, world.resolve(None).size) == (2, 8)
    environment(OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=7)
    assert (world.resolve(None).rank, world.resolve(None).size) == (1, 7)
    environment(RANK=0, WORLD_SIZE=6)
    assert (world.resolve(None).rank, world.resolve(None).size) == (0, 6)


def test_slurm_allocation_without_srun_is_a_world_of_one(environment):
    environment(SLURM_NTASKS=1)
    assert world.resolve(None).size == 1


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[007-009,12],n1", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("r[1-2]n[04-07]", "r1n04"),
        ("a-b.c[10-11].d", "a-b.c10.d"),
        ("", ""),
    ],
)
def test_first_host_of_a_slurm_list(nodes, host):
    assert world._first_host(nodes) == host


_ROOT = str(Path(__file__).resolve().parent.parent)


def test_import_does_nothing():
    code = (
        "import os, sys, socket; before = dict(os.environ); socket.socket.connect = None\n"
        "import ep_a2a.world, ep_a2a.symm; assert not [m for m in sys.modules if m.startswith('mpi4py')]\n"
        "assert dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=os.environ | {"PYTHONPATH": _ROOT})


# ---- launchers and stores ----------------------------------------------------------------------------------------


def _meet(num_calls=3):
    group = world.resolve(None)
    for i in range(num_calls):
        mine = bytes([group.rank]) * (i * 50_000 * group.rank)  # empty, and more than MPI sends at once
        assert group.all_gather(mine, "x", 20) == [bytes([r]) * (i * 50_000 * r) for r in range(group.size)]
    group.barrier("end", 20)
    return group.rank, group.size, group.name.split()[0]


def test_torchrun():
    assert spawn.run(_meet, 2, launcher="torchrun") == [(r, 2, "torchrun") for r in range(2)]


def test_rank_0_holds_the_store_and_leaves_last():
    for _ in range(3):  # a reader that lost the race against rank 0's exit would see the store vanish
        assert spawn.run(_meet, 4, launcher="env") == [(r, 4, "torchrun") for r in range(4)]


def test_open_mpi_and_slurm_environments():
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(spawn.free_port())}

    def open_mpi(rank):
        return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", **address}

    assert spawn.run(_meet, 2, launcher="bare", env=open_mpi) == [(r, 2, "Open") for r in range(2)]

    def slurm(rank):
        step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "localhost"}
        return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3", **step}

    assert spawn.run(_meet, 3, launcher="bare", env=slurm) == [(r, 3, "Slurm") for r in range(3)]


def test_open_mpi_environment_with_another_mpi4py():
    pytest.importorskip("mpi4py")

    def open_mpi(rank):
        return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}

    for one in spawn.outcomes(_meet, 2, launcher="bare", env=open_mpi):
        assert f"rank {one.rank} of 2 by the environment, 0 of 1 by mpi4py" in one.error
        assert f"OMPI_COMM_WORLD_RANK={one.rank}" in one.error


def _store_deadline():
    group = world.resolve(None)
    if group.rank in (1, 3):
        group.barrier("connect", 20)  # enters the store, and is not seen in the next call
        time.sleep(1.0)
        return None
    group.barrier("connect", 20)
    with pytest.raises(RendezvousTimeout) as info:
        group.barrier("close", 0.3)
    time.sleep(1.0)
    return str(info.value)


def test_store_deadline_names_the_missing():
    found = spawn.run(_store_deadline, 4, launcher="env")
    for rank in (0, 2):
        assert found[rank] == f"rank {rank}, close: no word from ranks 1 and 3 after 0.3 s"


def test_no_server_is_a_timeout(environment):
    environment(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=spawn.free_port())
    started = time.monotonic()
    with pytest.raises(RendezvousTimeout, match=r"^rank 1, connect: the store of torchrun at 127.0.0.1:\d+ does not"):
        world.resolve(None).barrier("connect", 1.0)
    assert time.monotonic() - started < 10


def _late_rank_then_in_step():
    group = world.resolve(spawn.process_group())
    if group.rank == 0:
        with pytest.raises(RendezvousTimeout, match="no word from rank 1"):
            group.barrier("first", 0.2)
    else:
        time.sleep(0.8)
        group.barrier("first", 10)  # sees rank 0, which has given up
    return group.all_gather(b"second %d" % group.rank, "second", 20)


def test_after_a_timeout_calls_are_in_step():
    assert spawn.run(_late_rank_then_in_step, 2, launcher="store") == [[b"second 0", b"second 1"]] * 2


# ---- ProcessGroups -----------------------------------------------------------------------------------------------


def _sub_groups():
    default = spawn.process_group()
    me = dist.get_rank()
    whole = world.resolve(None)  # torch.distributed comes first
    again = world.resolve(default)
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [3, 2, 1])]
    found = {"whole": whole.all_gather(b"w%d" % me, "x", 20), "again": again.all_gather(b"a%d" % me, "x", 20)}
    for i, one in enumerate(groups):
        if one == dist.GroupMember.NON_GROUP_MEMBER:
            with pytest.raises(ValueError, match="not a member"):
                world.resolve(one)
        else:
            sub = world.resolve(one)
            assert (sub.rank, sub.size) == (dist.get_rank(one), dist.get_world_size(one))
            found[i] = sub.all_gather(b"%d" % me, "x", 20)
    found["interleaved"] = [g.all_gather(b"%d%d" % (i, me), "x", 20) for i in range(3) for g in (whole, again)]
    store = spawn.store()
    started = time.monotonic()
    while (keys := _calls_in(store)) and time.monotonic() - started < 10:
        time.sleep(0.05)  # rank 0 deletes a call's keys after the others have left it
    return found | {"keys": keys}


def _calls_in(store):
    keys = [key for key in store.list_keys() if "/ep_a2a/" in key]
    assert any("/made/" in key for key in keys)
    return [key for key in keys if "/made/" not in key]


def test_process_groups_and_sub_groups():
    found = spawn.run(_sub_groups, 4, launcher="store")
    for rank, one in enumerate(found):
        assert one["whole"] == [b"w0", b"w1", b"w2", b"w3"]
        assert one["again"] == [b"a0", b"a1", b"a2", b"a3"]
        assert one["interleaved"] == [[b"%d%d" % (i, r) for r in range(4)] for i in range(3) for _ in range(2)]
        assert one[rank % 2] == [b"%d" % rank_of for rank_of in ((0, 2) if rank % 2 == 0 else (1, 3))]
        if rank:
            assert one[2] == [b"1", b"2", b"3"]
        assert one["keys"] == []


def test_rank_0_waits_for_the_readers():
    store = dist.HashStore()
    store.set("ep_a2a/1/0/1/1/0", "rank 1 is here, and has yet to read")
    store.set("ep_a2a/1/0/1/1", "1 x")
    group = StoreGroup(0, 2, "test", lambda timeout_s: store)
    found = []
    thread = threading.Thread(target=lambda: found.extend(group.all_gather(b"", "x", 20)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    store.add("ep_a2a/1/0/1/gone", 1)
    thread.join(5)
    assert not thread.is_alive()
    assert found == [b"", b"rank 1 is here, and has yet to read"]


@pytest.mark.parametrize("piece_bytes", [40, 1000])
def test_a_store_does_not_grow(piece_bytes, monkeypatch):
    monkeypatch.setattr("ep_a2a.rendezvous.store._PIECE_BYTES", piece_bytes)
    store = dist.HashStore()
    groups = [StoreGroup(rank, 3, "test", lambda timeout_s: store) for rank in range(3)]

    def calls(num_calls):
        threads = [
            threading.Thread(target=lambda g=g: [g.all_gather(b"x" * 100, "x", 20) for _ in range(num_calls)])
            for g in groups
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return store.num_keys()

    assert calls(1) == calls(50)


def test_a_destroyed_process_group_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="not any more"):
        world.resolve(group)


# ---- MPI ---------------------------------------------------------------------------------------------------------


def _mpi():
    found = {"launcher": _meet(4)}
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    whole = world.resolve(comm)
    assert world.resolve(None) is whole
    me = comm.Get_rank()
    own = comm.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)  # a program's own message, open all the time
    half = comm.Split(color=me % 2, key=-me)
    sub = world.resolve(half)
    found["sub"] = sub.all_gather(b"%d" % me, "x", 20)
    none = comm.Split(color=0 if me == 0 else MPI.UNDEFINED)
    if none == MPI.COMM_NULL:
        with pytest.raises(ValueError, match="not a member"):
            world.resolve(none)
    found["whole"] = [whole.all_gather(b"%d" % me, "x", 20) for _ in range(3)][-1]
    comm.send(f"own {me}", (me + 1) % comm.Get_size(), tag=7)
    found["own"] = own.wait()
    if me == 2:
        time.sleep(1.0)
    else:
        with pytest.raises(RendezvousTimeout) as info:
            whole.barrier("close", 0.3)
        found["late"] = str(info.value)
    if me == 2:
        whole.barrier("close", 20)
    found["after"] = whole.all_gather(b"%d" % me, "after", 20)
    return found


def test_mpirun():
    for rank, one in enumerate(spawn.run(_mpi, 4, launcher="mpirun")):
        assert one["launcher"] == (rank, 4, "mpi4py")
        assert one["sub"] == ([b"2", b"0"] if rank % 2 == 0 else [b"3", b"1"])
        assert one["whole"] == one["after"] == [b"0", b"1", b"2", b"3"]
        assert one["own"] == f"own {(rank - 1) % 4}"
        assert one.get("late") == (None if rank == 2 else f"rank {rank}, close: no word from rank 2 after 0.3 s")


def _mpi_single_thread():
    import mpi4py

    mpi4py.rc.thread_level = "single"
    from mpi4py import MPI

    group = world.resolve(MPI.COMM_WORLD)
    errors = []
    for call in range(3):  # at first rank 1 is late, then rank 0: nobody has a duplicate yet
        if group.rank == 1 - call:
            time.sleep(0.6)
        try:
            found = group.all_gather(b"%d" % group.rank, f"call {call}", 0.3 if call < 2 else 20)
        except RendezvousTimeout as error:
            errors.append(str(error))
    return MPI.Query_thread() == MPI.THREAD_SINGLE, errors, found


def test_mpirun_without_threads_and_late_from_the_start():
    for rank, (is_single, errors, found) in enumerate(spawn.run(_mpi_single_thread, 2, launcher="mpirun")):
        assert is_single
        assert found == [b"0", b"1"]
        if rank == 0:
            assert errors[0] == "rank 0, call 0: no word from rank 1 after 0.3 s"
        else:
            assert re.match("rank 1, call 0: .*no word from .* after 0.3 s", errors[0])


# ---- the helper itself -------------------------------------------------------------------------------------------


def _misbehave(how):
    if spawn.rank() == 1:
        if how == "raise":
            raise ValueError("as planned")
        if how == "die":
            os.kill(os.getpid(), 9)
        time.sleep(1000)
    return torch.arange(3).sum().item()


@pytest.mark.parametrize(
    ("how", "error"), [("raise", "ValueError: as planned"), ("die", "exit code -9"), ("hang", "exit code 1")]
)
def test_spawn_reports_and_never_hangs(how, error):
    started = time.monotonic()
    found = spawn.outcomes(_misbehave, 2, how, deadline_s=2.0)
    assert time.monotonic() - started < 15
    assert (found[0].value, found[0].error) == (3, "")
    assert error in found[1].error
    assert how != "hang" or "in _misbehave" in found[1].output
    with pytest.raises(AssertionError, match="1 of 2 ranks failed"):
        spawn.run(_misbehave, 2, "raise")
