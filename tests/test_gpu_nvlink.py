"""Ranks on two GPUs, one process a GPU and no MPS: one is killed in a round; very many rounds in replayed graphs."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import ep_a2a
from tests import spawn
from tests.bodies import PATIENCE_S
from tests.left_behind import LeftBehind
from tests.replay import own_combine, own_dispatch
from tests.test_gpu_processes import LATE, MARGIN_S, TIMEOUT_S, Calls, after_a_timeout, join, told_after
from tests.test_gpu_soak import BATCH, CASE, ROUNDS_OF_A_GRAPH, Plan, one_round
from tests.test_timeouts import names_the_dead

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SOAK_ROUNDS = int(os.environ.get("EP_A2A_SOAK_ROUNDS", "100000"))


@pytest.fixture(autouse=True)
def two_gpus(record_property):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, here is {torch.cuda.device_count()}")
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        pytest.skip("is meant to run without MPS: CUDA_MPS_PIPE_DIRECTORY is set")
    record_property("world", "nvshmem")
    record_property("ranks", 2)


# ---- a rank that is killed ---------------------------------------------------------------------------------------


def _dies(when, victim, by_graph):
    """The victim dies before its "dispatch", before its "combine", or on its GPU, "waiting" in its dispatch."""
    if "EP_SPAWN_PORT" in os.environ:
        spawn.process_group()
    group, _ = join()
    a2a = ep_a2a.connect(LATE.config(timeout_s=TIMEOUT_S), group=group)
    call = Calls(a2a, by_graph)
    for _ in range(2):
        call("dispatch")
        call("combine")
    torch.cuda.synchronize()
    a2a.check()
    assert (call.out == 5 * group.size).all()
    if when == "combine":
        call("dispatch")
        torch.cuda.synchronize()
    group.barrier("two rounds have passed", PATIENCE_S)
    if group.rank == victim:
        if when == "waiting":
            call("dispatch")
            time.sleep(0.3)  # its kernels have sent, and wait
        os.kill(os.getpid(), signal.SIGKILL)
    return survives(a2a, call, when, victim, by_graph)


def survives(a2a, call, when, victim, by_graph):
    """The other rank: the deadline names the victim, the GPU works, nobody is asked, and that quickly."""
    phase = "dispatch" if when == "dispatch" else "combine"
    if when == "waiting":
        time.sleep(1.0)  # the victim is dead, its process and its memory are gone
        call("dispatch")
        torch.cuda.synchronize()
        a2a.check()
    told = []
    watch = a2a.watch(lambda error: told.append((error, threading.current_thread())), every_s=0.05)
    started = time.monotonic()
    call(phase)
    assert time.monotonic() - started < 0.5, "the host waited"
    seconds = told_after(a2a, rf"rank {a2a.rank}, {phase}: peer {victim} ", started)
    assert 0.9 * TIMEOUT_S < seconds < TIMEOUT_S + MARGIN_S, seconds

    def refuse(*args, **more):
        raise AssertionError("the others are asked")

    a2a.group.all_gather = a2a.group.barrier = refuse
    after_a_timeout(a2a, call, told, by_graph)
    watch.stop()
    work = torch.randn(256, 256, device=a2a.device)
    assert (work @ work).isfinite().all()
    return round(seconds, 3)


@pytest.mark.parametrize(
    ("launcher", "when", "victim", "by_graph"),
    [("store", "combine", 1, False), ("env", "dispatch", 0, True), ("store", "waiting", 1, False)],
)
def test_the_other_rank_of_one_that_is_killed(launcher, when, victim, by_graph, record_property):
    before = LeftBehind()
    found = spawn.outcomes(_dies, 2, when, victim, by_graph, launcher=launcher, gpus=True, deadline_s=90)
    other = found[1 - victim]
    assert not other.error, f"{other.error}\n{other.traceback}\n{other.output[-3000:]}"
    assert (found[victim].exit_code, other.exit_code) == (-signal.SIGKILL, 0)
    record_property("told_after_s", other.value)
    before.expect_nothing()


@pytest.mark.parametrize(("launcher", "when"), [("torchrun", "combine"), ("mpirun", "dispatch")])
def test_a_launcher_names_the_rank_that_was_killed(launcher, when):
    before = LeftBehind()
    found = spawn.outcomes(_dies, 2, when, 1, False, launcher=launcher, env=before.env, gpus=True, deadline_s=90)
    assert found[0].exit_code not in (0, None), found[0]
    names_the_dead(found[0].output, launcher, 1)
    before.expect_nothing()


# ---- very many rounds --------------------------------------------------------------------------------------------


def _soaks(num_rounds):
    """This rank's rounds by graphs of its own: nothing but flags holds it to the other. (rounds, what was wrong)."""
    group, device = join()
    with ep_a2a.connect(CASE.config(), group=group) as a2a:
        one_round(own_dispatch, own_combine, [a2a], Plan(device, group.size))  # torch's kernels are loaded
        plan, graph = Plan(device, group.size), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(ROUNDS_OF_A_GRAPH):
                one_round(own_dispatch, own_combine, [a2a], plan)
        for _ in range(0, num_rounds, BATCH):
            for _ in range(BATCH // ROUNDS_OF_A_GRAPH):
                graph.replay()
            torch.cuda.synchronize()
            a2a.check()
        return int(plan.round), int(plan.wrong)


def test_replayed_rounds(run_processes, record_property):
    num_rounds = -(-SOAK_ROUNDS // BATCH) * BATCH
    found = run_processes(_soaks, 2, num_rounds, mps=False, deadline_s=200)
    record_property("rounds", min(rounds for rounds, _ in found))
    record_property("wrong", sum(wrong for _, wrong in found))
    assert found == [(num_rounds, 0)] * 2
