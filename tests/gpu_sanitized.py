"""A few rounds of the ranks of one process on a GPU, for compute-sanitizer to watch: prints how many were right.

    python tests/gpu_sanitized.py

All ranks send before any waits, so a tool that lets one kernel run at a time does not stop them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import ep_a2a
from ep_a2a import BF16, NVFP4
from ep_a2a.testing import assert_same_bits
from tests.bodies import Case, assert_received, fill_results, make_inputs, wanted_out

NUM_RANKS, NUM_ROUNDS = 4, 2
PLANES = ("rows", "scales", "global_scale", "ids", "weights", "num_tokens", "valid")


def on_cpu(received: ep_a2a.Received) -> Any:
    """A copy of what a rank received that the checks can read."""
    planes = {name: getattr(received, name) for name in PLANES}
    return SimpleNamespace(extra=(), **{name: None if p is None else p.cpu() for name, p in planes.items()})


def one_round(world: Any, a2as: list[Any], case: Case, round_: int) -> None:
    """All ranks' dispatch, results and combine, checked."""
    inputs = [make_inputs(case, round_, rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    planes = [own for _, own in inputs]
    given = [[t.cuda() for t in (x, own["ids"], own["weights"])] for x, own in inputs]
    rounds = world.dispatch([(a2a, *tensors) for a2a, tensors in zip(a2as, given)])
    torch.cuda.synchronize()
    for rank, (a2a, (received, _)) in enumerate(zip(a2as, rounds)):
        copy = on_cpu(received)
        assert_received(copy, a2a.config, planes, rank, None)
        box = torch.empty(a2a.outbox().shape, dtype=a2a.outbox().dtype)
        fill_results(case, round_, copy, box, rank)
        a2a.outbox().copy_(box)
    torch.cuda.synchronize()
    handles = [(a2a, handle) for a2a, (_, handle) in zip(a2as, rounds)]
    if round_ == NUM_ROUNDS:  # the last one fetches nothing
        world.release(handles)
        return
    outs = world.combine(handles)
    torch.cuda.synchronize()
    for rank, (a2a, out) in enumerate(zip(a2as, outs)):
        wanted = wanted_out(case, a2a.config, round_, rank, planes[rank]["ids"], NUM_RANKS)
        assert_same_bits(out.cpu(), wanted, f"rank {rank} round {round_} out")


def main() -> None:
    done = 0
    for payload in (NVFP4, BF16):
        for schedule in ("general", "phased"):
            case = Case(payload=payload, counts="full", schedule=schedule)
            world = ep_a2a.local(NUM_RANKS, device="cuda")
            a2as = ep_a2a.connect(case.config(timeout_s=120.0, first_timeout_s=120.0), group=world)
            for a2a in a2as:
                a2a.schedule = schedule
            for round_ in range(NUM_ROUNDS + 1):
                one_round(world, a2as, case, round_)
                done += 1
            for a2a in a2as:
                a2a.check()
            a2as.close()
    print(f"{done} rounds of {NUM_RANKS} ranks were right")


if __name__ == "__main__":
    main()
