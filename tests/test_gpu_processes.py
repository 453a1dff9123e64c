"""Ranks as processes with GPUs, over NVSHMEM: several on one GPU under MPS, or one on each, started by every launcher.

Starting a process costs seconds, so one job runs many cases. EP_A2A_TEST_RANKS makes all worlds that large whose size
does not matter, and leaves out what then says nothing new, or takes too long.
"""

from __future__ import annotations

import importlib.abc
import os
import re
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ep_a2a
from ep_a2a import BF16, FP8, MXFP4, EpError, PeerTimeout, SymmetricMemoryError, world
from ep_a2a.layout import PAYLOAD_FORMATS
from tests import bodies, cases
from tests.bodies import PATIENCE_S, Case
from tests.replay import CopyExperts, Layers, Rounds, own_combine, own_dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
MIB = 2**20
RANKS = int(os.environ.get("EP_A2A_TEST_RANKS", "0"))
not_many = pytest.mark.skipif(RANKS > 8, reason="takes long with more than 8 ranks; run with fewer on a GPU")
of_two = pytest.mark.skipif(RANKS > 2, reason="a matter of 2 ranks; run with fewer on a GPU")
SMALL = Case(num_experts=20, top_k=3, max_tokens=6, num_rounds=3, routing="mixed", counts="up_and_down")
TABLE = [
    *(replace(cases.NEMOTRON, payload=f, max_tokens=9, routing="mixed") for f in PAYLOAD_FORMATS),
    *(replace(cases.DEEPSEEK, payload=f, max_tokens=5, routing="mixed") for f in PAYLOAD_FORMATS),
    *(replace(SMALL, counts=counts) for counts in cases.COUNTS),
    *(cases.CASES[f"routing {routing}"] for routing in ("mixed", "nothing", "duplicates", "empty_ranks")),
    *(cases.CASES[name] for name in ("33 tokens", "top-32, phased", "top-9, general", "extra (1, 3, 4, 36), phased")),
    *(cases.CASES[name] for name in ("combine FP8, rows", "combine NVFP4, out", "combine FP32, out", "release")),
    *(cases.CASES[name] for name in ("unaligned NVFP4, general", "device counts up_and_down", "one expert in all")),
]


def join():
    """This worker's group and device, as an application joins."""
    torch.set_num_threads(1)
    group = world.resolve(None)
    return group, ep_a2a.set_device(group)


def replays(a2a, rounds, num_rounds=6):
    """An eager round, then replays of its graph."""
    rounds.load(0)
    rounds.run()
    rounds.check(0)
    graph = rounds.capture()
    for round_ in range(1, num_rounds):
        rounds.load(round_)
        graph.replay()
        rounds.check(round_)


# ---- what works --------------------------------------------------------------------------------------------------


def _all_of_it(reserved, with_groups):
    if with_groups:
        dist.init_process_group("gloo")
    group, device = join()
    assert device.type == "cuda" and torch.cuda.current_device() == device.index
    if reserved:
        ep_a2a.reserve(reserved, group)
    for case in TABLE:
        bodies.rounds(group, case)
    for late_in in ("dispatch", "combine", "release"):
        case = Case(num_rounds=group.size, num_experts=4, top_k=4, counts="full", max_tokens=3)
        bodies.late_peer(group, case, late_in)
    bodies.two_channels(group, Case(num_rounds=4))
    bodies.layer(group, Case(num_experts=24, top_k=4, hidden=256, num_rounds=2))
    bodies.layer(group, Case(num_experts=24, top_k=4, hidden=256, num_rounds=2, combine=FP8, payload=BF16))
    graphs(group)
    two_configurations(group)
    if with_groups and group.size >= 4:
        sub_groups(group)
    if with_groups:
        dist.destroy_process_group()
    return "ok"


def graphs(group):
    """Replays of a round, of a layer that copies, and of a layer with experts."""
    case = replace(SMALL, payload=MXFP4)
    with ep_a2a.connect(case.config(), group=group) as a2a:
        replays(a2a, Rounds([a2a], case, own_dispatch, own_combine))
    case = replace(SMALL, payload=BF16)
    with ep_a2a.connect(case.config(), group=group) as a2a:
        replays(a2a, Layers([a2a], case, lambda a2a: CopyExperts()))
    case = replace(SMALL, hidden=256)
    with ep_a2a.connect(case.config(), group=group) as a2a:
        replays(a2a, Layers([a2a], case), 4)


def two_configurations(group):
    """Rounds of two objects in turn, of which one closes first."""
    one, two = SMALL, replace(SMALL, payload=BF16, hidden=1024, seed=2)
    with ep_a2a.connect(one.config(), group=group) as first:
        with ep_a2a.connect(two.config(), group=group) as second:
            for round_ in range(3):
                bodies.one_round(first, one, round_, round_ - 1 if round_ else None, group=group)
                bodies.one_round(second, two, round_, round_ - 1 if round_ else None, group=group)
        bodies.one_round(first, one, 3, 2, group=group)


def sub_groups(group):
    """Rounds of halves, one in reverse order, beside those of the whole."""
    rank, size = dist.get_rank(), group.size
    halves = [dist.new_group(list(range(0, size, 2))), dist.new_group(list(range(size - 1, 0, -2)))]
    own = halves[rank % 2]
    whole_case, half_case = replace(SMALL, seed=11), replace(SMALL, seed=12 + rank % 2, payload=BF16)
    with ep_a2a.connect(whole_case.config(), group=group) as whole:
        with ep_a2a.connect(half_case.config(), group=own) as half:
            assert (whole.num_ranks, half.num_ranks) == (size, size // 2)
            assert half.rank == dist.get_rank(own)
            for round_ in range(3):
                bodies.one_round(half, half_case, round_, round_ - 1 if round_ else None)
                bodies.one_round(whole, whole_case, round_, round_ - 1 if round_ else None)
        bodies.one_round(whole, whole_case, 3, 2)
    bodies.rounds(world.resolve(own), half_case)


@pytest.mark.parametrize("num_ranks", [RANKS] if RANKS else [2, 4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_torchrun(run_processes, num_ranks):
    found = run_processes(_all_of_it, num_ranks, 512 * MIB, True, launcher="torchrun", deadline_s=500)
    assert found == ["ok"] * num_ranks


@not_many
@pytest.mark.parametrize("num_ranks", [RANKS] if RANKS else [pytest.param(4, marks=pytest.mark.slow), 8])
def test_mpirun(run_processes, num_ranks):
    found = run_processes(_all_of_it, num_ranks, 512 * MIB, False, launcher="mpirun", deadline_s=500)
    assert found == ["ok"] * num_ranks


def _without_reserve():
    group, _ = join()
    case = replace(SMALL, num_rounds=2)
    return [bodies.rounds(group, case), bodies.rounds(group, case)]  # the heap has what the first connect needed


@not_many
def test_the_first_connect_makes_the_heap(run_processes):
    num_ranks = RANKS or 3
    wanted = ep_a2a.local(num_ranks).run(bodies.rounds, replace(SMALL, num_rounds=2))
    found = run_processes(_without_reserve, num_ranks, deadline_s=200)
    assert found == [[one, one] for one in wanted]


# ---- ranks that stop calling -------------------------------------------------------------------------------------

TIMEOUT_S, MARGIN_S = 1.0, 1.0
LATE = Case(num_experts=4, top_k=4, hidden=64, max_tokens=8, payload=BF16, counts="full")


def told_after(a2a, text, started):
    """The seconds after which `check` raised what it must."""

    def check():
        while time.monotonic() < started + 20:
            a2a.check()
            time.sleep(0.002)

    with pytest.raises(PeerTimeout, match=text):
        check()
    return time.monotonic() - started


class Calls:
    """A round of the late case, by calls or by graphs."""

    def __init__(self, a2a, by_graph):
        self.a2a, device = a2a, a2a.device
        self.x = torch.ones(8, 64, dtype=torch.bfloat16, device=device)
        self.ids = torch.arange(4, dtype=torch.int32, device=device).repeat(8, 1)
        self.weights, self.out = torch.ones(8, 4, device=device), torch.zeros(8, 64, device=device).bfloat16()
        self._graphs, self._handle = {}, None
        a2a.outbox().fill_(5.0)
        torch.cuda.synchronize()
        for name in ("dispatch", "combine") if by_graph else ():
            self._graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[name], capture_error_mode="thread_local"):
                self._call(name)

    def __call__(self, name):
        self._graphs[name].replay() if self._graphs else self._call(name)

    def _call(self, name):
        if name == "dispatch":
            _, self._handle = ep_a2a.dispatch(self.a2a, self.x, self.ids, self.weights)
        else:
            ep_a2a.combine(self.a2a, self._handle, out=self.out)


def _stops(late):
    """One rank of all does not come, in either phase, by calls and by graphs; then all connect again."""
    group, _ = join()
    ep_a2a.reserve(128 * MIB, group)
    for when in ("dispatch", "combine"):
        for by_graph in (False, True):
            a2a = ep_a2a.connect(LATE.config(timeout_s=TIMEOUT_S), group=group)
            told = []
            watch = a2a.watch(lambda error: told.append((error, threading.current_thread())), every_s=0.05)
            call = Calls(a2a, by_graph)
            for _ in range(2):
                call("dispatch")
                call("combine")
            torch.cuda.synchronize()
            a2a.check()
            assert (call.out == 5 * min(group.size, 4)).all()  # each token goes to the owners of 4 experts
            if when == "combine":
                call("dispatch")
                torch.cuda.synchronize()
            group.barrier("two rounds have passed", PATIENCE_S)
            if group.rank == late:
                group.barrier("the others gave up", PATIENCE_S)
                started = time.monotonic()
                call(when)
                assert told_after(a2a, rf"rank {late}, {when}: .*gave up", started) < 0.5
            else:
                started = time.monotonic()
                call(when)
                assert time.monotonic() - started < 0.5, "the host waited"
                seconds = told_after(a2a, rf"rank {group.rank}, {when}: peer {late} ", started)
                assert 0.9 * TIMEOUT_S < seconds < TIMEOUT_S + MARGIN_S, seconds
                group.barrier("the others gave up", PATIENCE_S)
            after_a_timeout(a2a, call, told, by_graph)
            watch.stop()
            group.barrier("all have been told", PATIENCE_S)
    bodies.rounds(group, SMALL)
    return "told"


def after_a_timeout(a2a, call, told, by_graph):
    """Later calls raise or end at once, the context lives, the watchdog has told, and close asks nobody."""
    if by_graph:
        started = time.monotonic()
        for _ in range(20):
            call("dispatch")
            call("combine")
        torch.cuda.synchronize()
        assert time.monotonic() - started < 1
        assert call.out.isnan().all()
    else:
        with pytest.raises(PeerTimeout):
            call("dispatch")
    assert torch.ones(1000, device=a2a.device).sum().item() == 1000
    time.sleep(0.2)
    assert len(told) == 1 and isinstance(told[0][0], PeerTimeout) and told[0][1].daemon, told
    started = time.monotonic()
    a2a.close()
    a2a.close()
    assert time.monotonic() - started < 1


LATE_RANKS = [(RANKS, RANKS // 2)] if RANKS else [(4, 2), pytest.param(8, 0, marks=pytest.mark.slow)]


@not_many
@pytest.mark.parametrize(("num_ranks", "late"), LATE_RANKS)
def test_a_rank_that_stops_calling(run_processes, num_ranks, late):
    assert run_processes(_stops, num_ranks, late, deadline_s=300) == ["told"] * num_ranks


# ---- NVSHMEM that is there already, or is not --------------------------------------------------------------------


def _initialised_by_others():
    group, device = join()
    import nvshmem.core as nvshmem

    try:
        from cuda.core import Device
    except ImportError:  # before cuda.core 0.5
        from cuda.core.experimental import Device
    last = group.size - 1
    uid = nvshmem.get_unique_id(empty=group.rank != last)
    told = group.all_gather(uid._data.view(np.int8).tobytes(), "unique id", PATIENCE_S)
    uid._data.view(np.int8)[...] = np.frombuffer(told[last], dtype=np.int8)
    there = Device(device.index)
    there.set_current()
    nvshmem.init(
        device=there,
        uid=uid,
        rank=last - group.rank,
        nranks=group.size,
        initializer_method="uid",
    )
    assert nvshmem.my_pe() == last - group.rank
    digest = bodies.rounds(group, SMALL)
    bodies.late_peer(group, Case(num_rounds=3, num_experts=4, top_k=4, counts="full", max_tokens=3), "dispatch")
    assert (nvshmem.my_pe(), nvshmem.n_pes()) == (last - group.rank, group.size)  # it is not ours to end
    tensor = nvshmem.tensor((4,), dtype=torch.float32)
    assert tensor.is_cuda
    nvshmem.free_tensor(tensor)
    group.barrier("all are done", PATIENCE_S)
    return digest


@not_many
def test_nvshmem_that_somebody_else_initialised_in_another_order(run_processes):
    pytest.importorskip("nvshmem.core", reason="nvshmem4py is not installed")
    num_ranks = RANKS or 4
    found = run_processes(_initialised_by_others, num_ranks, deadline_s=200)
    assert found == ep_a2a.local(num_ranks).run(bodies.rounds, SMALL)


class _Hidden(importlib.abc.MetaPathFinder):
    """No module of this name can be imported."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "nvshmem":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def refused(call, kinds, *texts):
    """What `call` raised, which says all of `texts`."""
    started = time.monotonic()
    with pytest.raises(kinds) as found:
        call()
    assert time.monotonic() - started < 60
    text = str(found.value)
    assert all(re.search(one, text) for one in texts), text
    return text


def _no_nvshmem4py(without):
    group, _ = join()
    if group.rank in without:
        sys.meta_path.insert(0, _Hidden())
        for name in [name for name in sys.modules if name.partition(".")[0] == "nvshmem"]:
            del sys.modules[name]
    return refused(lambda: ep_a2a.connect(SMALL.config(), group=group), (EpError, ImportError), "nvshmem4py")


@of_two
@pytest.mark.parametrize("without", [(0, 1), (1,)])
def test_nvshmem4py_is_missing(run_processes, without):
    run_processes(_no_nvshmem4py, 2, without, deadline_s=120)


def _no_gpu():
    group = world.resolve(None)
    return refused(
        lambda: ep_a2a.connect(SMALL.config(), group=group, device="cuda"), (EpError, ValueError), "(?i)gpu|cuda"
    )


@of_two
def test_no_gpu_is_visible(run_processes):
    run_processes(_no_gpu, 2, mps=False, env={"CUDA_VISIBLE_DEVICES": ""}, deadline_s=120)


def _no_mps():
    os.environ.pop("CUDA_MPS_PIPE_DIRECTORY", None)
    group = world.resolve(None)

    def connect():
        ep_a2a.set_device(group)
        ep_a2a.connect(SMALL.config(), group=group)

    return refused(connect, EpError, "MPS", r"\b2\b")


@of_two
def test_ranks_that_share_a_gpu_without_mps(run_processes):
    run_processes(_no_mps, 2, mps=False, env={"CUDA_VISIBLE_DEVICES": "0"}, deadline_s=120)


def _heap_too_small():
    group, _ = join()
    ep_a2a.reserve(64 * MIB, group)
    large = Case(num_experts=8, top_k=2, hidden=4096, max_tokens=2**17, payload=BF16).config()
    needed = large.bytes(group.size).region_bytes
    text = refused(lambda: ep_a2a.connect(large, group=group), SymmetricMemoryError, str(needed))
    others = [int(n) for n in re.findall(r"\d+", text.replace(",", "")) if MIB <= int(n) < needed]
    assert others, f"no free bytes in: {text}"
    return bodies.rounds(group, SMALL)


@of_two
def test_a_heap_that_is_too_small(run_processes):
    found = run_processes(_heap_too_small, 2, deadline_s=120)
    assert found == ep_a2a.local(2).run(bodies.rounds, SMALL)
