"""Rounds between processes over POSIX shared memory, started by every launcher; sub-groups; what a host can lack."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import ep_a2a
from ep_a2a import BF16, FP16, FP32, NVFP4, Config, ConfigMismatch, InvalidRouting, SymmetricMemoryError, world
from tests import bodies, spawn
from tests.bodies import Case


def _rounds(*cases):
    group = world.resolve(None)
    return [bodies.rounds(group, case) for case in cases]


def _body(name, *args):
    return getattr(bodies, name)(world.resolve(None), *args)


def in_threads(num_ranks, case):
    """The digests of the same case in a local world."""
    return ep_a2a.local(num_ranks).run(bodies.rounds, case)


SMALL = Case(num_experts=20, top_k=3, max_tokens=6, num_rounds=3, routing="mixed", counts="up_and_down")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_processes_give_the_bits_of_threads(num_ranks):
    found = spawn.run(_rounds, num_ranks, SMALL)
    assert [one for (one,) in found] == in_threads(num_ranks, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [5, 6, 8, 9, 10, 11, 12, 13, 14, 15])
def test_more_processes(num_ranks):
    test_processes_give_the_bits_of_threads(num_ranks)


def test_16_processes():
    case = replace(SMALL, max_tokens=3, hidden=64, num_rounds=2)
    assert [one for (one,) in spawn.run(_rounds, 16, case, deadline_s=120)] == in_threads(16, case)


TABLE = [
    Case(counts="none"),
    Case(counts="one_rank_none", num_rounds=5),
    Case(counts="full", max_tokens=33, combine=FP32, how="rows"),
    Case(counts="odd", num_experts=40, top_k=32, combine=FP16, how="out"),
    Case(num_experts=2, top_k=1, payload=BF16, source="float32"),
    Case(num_experts=512, top_k=22, hidden=2048, schedule="general"),
    Case(num_experts=256, top_k=8, hidden=7168, max_tokens=9, source="packed_rows"),
    Case(hidden=2880, extra_planes=(1, 3, 36, 100), routing="duplicates"),
    Case(hidden=4096, payload=BF16, how="release", max_tokens=7),
    Case(device_counts=True, counts="up_and_down", routing="holes", num_rounds=4),
    Case(top_k=9, routing="empty_ranks", source="packed_scalar"),
]


def test_the_table_of_cases():
    assert spawn.run(_rounds, 4, *TABLE, deadline_s=120) == list(
        map(list, zip(*(in_threads(4, case) for case in TABLE), strict=True))
    )


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_launchers(launcher):
    case = replace(SMALL, num_rounds=2)
    assert [one for (one,) in spawn.run(_rounds, 3, case, launcher=launcher, deadline_s=120)] == in_threads(3, case)


@pytest.mark.parametrize("late_in", ["dispatch", "combine", "release"])
def test_late_peers(late_in):
    case = Case(num_rounds=4, num_experts=4, top_k=4, counts="full", max_tokens=3)
    assert spawn.run(_body, 4, "late_peer", case, late_in) == ["ok"] * 4


def test_two_channels_overlap():
    assert spawn.run(_body, 4, "two_channels", Case(num_rounds=7)) == ["ok"] * 4


# ---- groups ------------------------------------------------------------------------------------------------------


def _sub_groups():
    default = spawn.process_group()
    rank = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    own = halves[rank % 2]
    torch.set_num_threads(1)
    whole_case, half_case = replace(SMALL, seed=11), replace(SMALL, seed=12 + rank % 2, payload=BF16)
    with ep_a2a.connect(whole_case.config(), group=default) as whole:
        with ep_a2a.connect(half_case.config(), group=own) as half:
            assert (whole.num_ranks, half.num_ranks) == (4, 2)
            assert half.rank == dist.get_rank(own) and whole.rank == rank
            for round_ in range(3):  # rounds of both groups alternate
                bodies.one_round(half, half_case, round_, round_ - 1 if round_ else None)
                bodies.one_round(whole, whole_case, round_, round_ - 1 if round_ else None)
        bodies.one_round(whole, whole_case, 3, 2)
    digest = bodies.rounds(world.resolve(own), half_case)
    dist.destroy_process_group()
    return digest


def test_sub_groups_beside_the_whole():
    found = spawn.run(_sub_groups, 4, launcher="store")
    for parity in (0, 1):
        wanted = in_threads(2, replace(SMALL, seed=12 + parity, payload=BF16))
        in_group = sorted((found[parity], found[parity + 2]))
        assert in_group == sorted(wanted)


def _mpi_groups():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    half = comm.Split(comm.rank % 2, -comm.rank)
    digest = bodies.rounds(world.resolve(half), SMALL)
    half.Free()
    return digest


def test_mpi_communicators():
    found = spawn.run(_mpi_groups, 4, launcher="mpirun", deadline_s=120)
    wanted = in_threads(2, SMALL)
    assert [found[2], found[0]] == wanted == [found[3], found[1]]


# ---- errors that every rank knows --------------------------------------------------------------------------------


def _too_large():
    group = world.resolve(None)
    free = os.statvfs("/dev/shm")
    available = free.f_bavail * free.f_frsize
    config = Config(num_experts=8, top_k=1, hidden=2**17, max_tokens=2**20, payload=BF16)
    needed = 2 * config.bytes(2).region_bytes
    assert needed > available
    try:
        ep_a2a.connect(config, group=group)
    except SymmetricMemoryError as error:
        text = str(error)
    bodies.rounds(group, replace(SMALL, num_rounds=1))
    return text, available


def test_dev_shm_that_is_too_small():
    for text, available in spawn.run(_too_large, 2):
        region = Config(num_experts=8, top_k=1, hidden=2**17, max_tokens=2**20, payload=BF16).bytes(2).region_bytes
        numbers = [int(one) for one in re.findall(r"\d{6,}", text.replace(",", ""))]
        assert "/dev/shm" in text and {region, 2 * region} & set(numbers), text
        assert any(abs(one - available) < available / 2 for one in numbers), (text, available)


def _disagree():
    group = world.resolve(None)
    config = Case(hidden=1024 if group.rank == 1 else 512, payload=BF16 if group.rank == 1 else NVFP4).config()
    with pytest.raises(ConfigMismatch) as found:
        ep_a2a.connect(config, group=group)
    bodies.rounds(group, replace(SMALL, num_rounds=1))
    return str(found.value)


def test_processes_that_disagree():
    for rank, text in enumerate(spawn.run(_disagree, 3)):
        assert f"rank {rank}: " in text and "hidden" in text and "1024 on rank 1" in text, text
        assert "payload" in text and "NVFP4 on rank 0, 2" in text, text


def _bad_ids():
    torch.set_num_threads(1)
    with ep_a2a.connect(SMALL.config(), group=world.resolve(None)) as a2a:
        ids = torch.full((2, 3), 4, dtype=torch.int32)
        ids[1, 2] = 20 if a2a.rank == 1 else -1
        received, handle = ep_a2a.dispatch(a2a, torch.ones(2, 512), ids, torch.ones(2, 3))
        assert received.valid.sum() == (6 if a2a.rank == 0 else 0)
        a2a.outbox().fill_(2.0)
        assert (ep_a2a.combine(a2a, handle) == 2).all()
        if a2a.rank == 1:
            with pytest.raises(InvalidRouting, match=r"rank 1.*token 1.*position 2.*\b20\b"):
                bodies.one_round(a2a, SMALL, 0)
        bodies.one_round(a2a, SMALL, 0)
        a2a.check()


def test_ids_out_of_range_between_processes():
    spawn.run(_bad_ids, 3)
