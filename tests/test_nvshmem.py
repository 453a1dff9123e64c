"""What `symm/nvshmem.py` decides without a GPU: parts of heaps, who may take part, and what is said where it fails.

NVSHMEM itself is a fake here, one for each process: addresses are numbers.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from ep_a2a import world
from ep_a2a.errors import EpError, RendezvousTimeout, SymmetricMemoryError
from ep_a2a.symm import nvshmem
from tests import spawn

PAGE = 4096
GPU = torch.device("cuda", 0)


# ---- heaps -------------------------------------------------------------------------------------------------------


@pytest.fixture
def heaps(monkeypatch):
    found = [nvshmem._Heap(1 << 40, 8 * PAGE), nvshmem._Heap(1 << 41, 16 * PAGE)]
    monkeypatch.setattr(nvshmem, "_heaps", found)
    return found


def take(num_bytes):
    part, _ = nvshmem._take(-(-num_bytes // PAGE) * PAGE, num_bytes)
    part.kept = False
    return part


def address(part):
    return part.__cuda_array_interface__["data"][0]


def test_parts_fill_the_first_gap(heaps):
    first, second, third = take(3 * PAGE), take(PAGE + 1), take(3 * PAGE)
    assert [address(p) for p in (first, second, third)] == [1 << 40, (1 << 40) + 3 * PAGE, (1 << 40) + 5 * PAGE]
    assert second.__cuda_array_interface__["shape"] == (PAGE + 1,)
    assert address(take(PAGE)) == 1 << 41, "the first heap is full"
    del second
    assert address(take(2 * PAGE)) == (1 << 40) + 3 * PAGE, "what was given back is taken again"
    assert nvshmem._take(17 * PAGE, 17 * PAGE) == (None, (-1, 0, 16 * PAGE))


def test_a_part_is_given_back_only_where_that_is_said(heaps):
    part, _ = nvshmem._take(8 * PAGE, 8 * PAGE)
    del part
    assert heaps[0].taken == [(0, 8 * PAGE)]
    assert list(heaps[0].gaps()) == []
    assert list(heaps[1].gaps()) == [(0, 16 * PAGE)]


# ---- who may take part -------------------------------------------------------------------------------------------


def gpus(*names, mps=False):
    return [{"gpu": name, "mps": mps} for name in names]


def test_a_gpu_is_shared_under_mps_only():
    nvshmem._check_gpus(gpus("a", "b", "c"))
    nvshmem._check_gpus(gpus("a", "b", "a", mps=True))
    with pytest.raises(SymmetricMemoryError, match="ranks 0 and 2 are on one GPU, a, without MPS: 3 ranks on 2 GPUs"):
        nvshmem._check_gpus(gpus("a", "b", "a"))
    with pytest.raises(SymmetricMemoryError, match="ranks 0 and 1 are on one GPU"):
        nvshmem._check_gpus([*gpus("a", mps=True), *gpus("a")])


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    with pytest.raises(EpError, match="pip install nvshmem4py-cu13 nvidia-nvshmem-cu13"):
        nvshmem._modules()


def fake(rank, size, up=False, out_of_reach=(), free_bytes=1 << 30, pe=None):
    """Put a fake NVSHMEM into this process; the peers' heaps lie 2^44 apart."""
    status = SimpleNamespace(STATUS_IS_INITIALIZED=2, STATUS_INVALID=9)
    state = {"up": up, "next": 1 << 44, "mallocs": 0}

    def malloc(num_bytes):
        state["mallocs"] += 1
        base, state["next"] = state["next"], state["next"] + num_bytes
        return base

    bindings = SimpleNamespace(
        Init_status=status,
        init_status=lambda: 2 if state["up"] else 0,
        my_pe=lambda: rank if pe is None else pe,
        n_pes=lambda: size,
    )
    library = SimpleNamespace(
        nvshmem_malloc=malloc,
        nvshmem_ptr=lambda base, peer: None if peer in out_of_reach else base + (peer << 44),
    )
    nvshmem._modules = lambda: (None, bindings)
    nvshmem._library = lambda: library
    nvshmem._initialize = lambda *args: state.update(up=True)
    nvshmem.ctypes = SimpleNamespace(
        CDLL=lambda name: SimpleNamespace(cuDeviceGetAttribute=lambda *args: 0),
        c_int=lambda: SimpleNamespace(value=0),
        byref=lambda value: value,
    )
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"GPU-{rank}")
    torch.cuda.mem_get_info = lambda device: (free_bytes, 2 * free_bytes)
    nvshmem.NvshmemMemory = lambda part, rank, num_bytes, bases, kind: SimpleNamespace(
        part=part, bases=bases, kind=kind
    )
    return state


def error_of(work, *args):
    try:
        work(*args)
    except (EpError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _rounds_of_connections():
    group = world.resolve(None)
    state = fake(group.rank, group.size)
    first = nvshmem.allocate(group, 3 * PAGE, 20, GPU)
    assert first.kind == "nvlink"
    assert first.bases == [(1 << 44) + (peer << 44) for peer in range(group.size)]
    first.part.kept = False  # as `close` says
    second = nvshmem.allocate(group, 2 * PAGE, 20, GPU)
    assert second.bases[0] == (1 << 44) + 3 * PAGE, "the first heap is full: a second one"
    del first
    third = nvshmem.allocate(group, PAGE, 20, GPU)
    assert third.bases[0] == 1 << 44
    assert state["mallocs"] == 2
    return error_of(nvshmem.allocate, group, PAGE * (group.rank + 1), 20, GPU)


def test_connections_of_all_ranks():
    errors = spawn.run(_rounds_of_connections, 3)
    assert set(errors) == {"SymmetricMemoryError: bytes: 4096 on rank 0, 8192 on rank 1"}


def _sub_groups():
    import torch.distributed as dist

    whole = world.resolve(spawn.process_group())
    fake(whole.rank, whole.size)
    nvshmem.reserve(whole, 4 * PAGE, 20, GPU)
    half = world.resolve([dist.new_group([0, 1]), dist.new_group([2, 3])][whole.rank // 2])
    if whole.rank == 2:
        keep = nvshmem._Part(nvshmem._heaps[0], 0, PAGE)  # so ranks 2 and 3 get other offsets
        keep.kept = False
    memory = nvshmem.allocate(half, 2 * PAGE, 20, GPU)
    pes = [0, 1] if whole.rank < 2 else [2, 3]
    assert memory.bases == [(1 << 44) + (pe << 44) + (PAGE if pe == 2 else 0) for pe in pes]
    whole.barrier("all are here", 20)
    if whole.rank == 2:
        del keep
    return error_of(nvshmem.allocate, half, 3 * PAGE, 20, GPU)


def test_sub_groups_take_parts_of_what_was_reserved():
    errors = spawn.run(_sub_groups, 4, launcher="store")
    text = "SymmetricMemoryError: each rank needs 12288 bytes of NVSHMEM's heap, free in one piece are"
    assert errors[0] == f"{text} rank 0: 8192, rank 1: 8192: ep_a2a.reserve(16384 and as many more) on all 4 PEs, " + (
        "before the first connect"
    )
    assert errors[2].startswith(f"{text} rank 0: 4096, rank 1: 8192: ")


def _errors():
    group = world.resolve(None)
    me = group.rank
    found = []
    for args in (
        {"up": me == 1},
        {"free_bytes": 3 * PAGE - 1 if me == 1 else 1 << 30},
        {"out_of_reach": (2,) if me == 0 else ()},
        {"up": True, "pe": 0},
    ):
        fake(me, group.size, **args)
        nvshmem._heaps.clear()
        found.append(error_of(nvshmem.allocate, group, 3 * PAGE, 20, GPU))
    return found


def test_errors_are_told_on_every_rank():
    for late, memory, reach, foreign in spawn.run(_errors, 3):
        assert "NVSHMEM is initialised on rank 1 and not on rank 0" in late
        assert "reserve(bytes)" in late
        assert "needs 12288 bytes on each rank, 12288 on GPU GPU-1 of" in memory
        assert "of which 12287 are free" in memory
        assert "GPU GPU-0 of" in reach
        assert "does not reach the memory of rank 2, GPU GPU-2 of" in reach
        assert "the ranks are PEs [0, 0, 0] of [3]" in foreign


@pytest.mark.parametrize("late", [False, True])
def test_an_allocation_counts_however_it_ends(monkeypatch, late):
    """So that heaps have the same numbers on all PEs: this one does not hear how the others fared, or has no memory."""
    bases = iter([1 << 44, 0, 1 << 45])
    monkeypatch.setattr(nvshmem, "_heaps", [])
    monkeypatch.setattr(nvshmem, "tell", lambda group, what, timeout_s, step: [step()] * 2)
    monkeypatch.setattr(nvshmem, "_library", lambda: SimpleNamespace(nvshmem_malloc=lambda _: next(bases)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))

    def gather(payload, *_):
        if late:
            raise RendezvousTimeout("late")
        return [payload] * 2

    group = SimpleNamespace(rank=0, size=2, all_gather=gather)
    for _ in range(3):
        error_of(nvshmem._grow, group, PAGE, 1, GPU, nvshmem._Pes([0, 1], 2, ["a", "b"]))
    found = [(heap.base, heap.num_bytes) for heap in nvshmem._heaps]
    assert found == [(1 << 44, PAGE), (0, 0), (1 << 45, PAGE)]


def test_two_threads_take_two_parts(heaps):
    start, parts = threading.Barrier(8), []

    def work():
        start.wait(20)
        parts.append(take(2 * PAGE))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({address(part) for part in parts}) == 8


def test_a_call_that_hangs_ends_the_process_with_a_sentence():
    code = """
import time
from ep_a2a.symm import nvshmem
with nvshmem._watchdog("rank 3: a call", 0.2):
    time.sleep(30)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 70
    assert done.stderr == "ep_a2a: rank 3: a call did not return within 0.2 s: this process ends\n"
