"""What tests marked `gpu` need: a GPU, else they are skipped; worlds, whose kind and size go into the report."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ep_a2a
from tests import spawn, together

if "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:  # there processes share the queues
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # read when CUDA starts: one for each local rank


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")


@pytest.fixture
def gpu_world(record_property: Callable[[str, object], None]) -> Callable[[int], Any]:
    """Makes the local world of a number of ranks on the current GPU."""

    def make(num_ranks: int) -> Any:
        record_property("world", "local")
        record_property("ranks", num_ranks)
        return ep_a2a.local(num_ranks, device="cuda")

    return make


@pytest.fixture
def run_local(gpu_world: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """Calls `body(group, *args)` for each rank of a local world on the current GPU; see `together.run`."""

    def run(num_ranks: int, body: Callable[..., Any], *args: Any, streams: bool = False) -> list[Any]:
        return together.run(gpu_world(num_ranks), num_ranks, body, *args, streams=streams)

    return run


@pytest.fixture
def run_processes(record_property: Callable[[str, object], None]) -> Callable[..., list[Any]]:
    """`spawn.run` of ranks with GPUs, which may share one under MPS."""

    def run(worker: Callable[..., Any], num_ranks: int, *args: Any, mps: bool = True, **options: Any) -> list[Any]:
        num_gpus = torch.cuda.device_count()
        if mps and num_ranks > num_gpus and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
            pytest.skip(f"{num_ranks} ranks on {num_gpus} GPUs need MPS: CUDA_MPS_PIPE_DIRECTORY is not set")
        record_property("world", "nvshmem")
        record_property("ranks", num_ranks)
        share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // -(-num_ranks // num_gpus))}
        env = (share if mps and num_ranks > num_gpus else {}) | options.pop("env", {})
        return spawn.run(worker, num_ranks, *args, env=env, gpus=True, **options)

    return run
