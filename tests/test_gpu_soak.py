"""Very many rounds of eight local ranks in replayed graphs, each with another routing and checked on the device.

Each rank runs freely, on a stream of its own. Everything is a closed form of (round, rank, token, column), in integers
that fp16 holds exactly: a counter on the device says which round it is, small kernels make counts, ids and rows from
it, and after the calls add what differs to a second counter. No host looks between the rounds of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import ep_a2a
from ep_a2a import FP16
from tests import test_together
from tests.bodies import Case
from tests.replay import own_combine, own_dispatch

RANKS, TOKENS, TOP_K, EXPERTS, HIDDEN = 8, 32, 4, 64, 64
CASE = Case(num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, payload=FP16, combine=FP16)
ROUNDS_OF_A_GRAPH = 8
BATCH = 1000
PRIME = 251  # values are -125 to 125: times 8 ranks they stay below 2048


class Plan:
    """What the ranks do in the round that a counter on the device names."""

    def __init__(self, device: torch.device, num_ranks: int = RANKS) -> None:
        self._experts_of_rank = EXPERTS // num_ranks
        self.round = torch.zeros((), dtype=torch.int64, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.rank = torch.arange(num_ranks, device=device)
        self.token = torch.arange(TOKENS, device=device)
        self.weights = torch.ones(TOKENS, TOP_K, device=device)
        column = torch.arange(HIDDEN, device=device)
        self._place = self.rank[:, None, None] * 71 + self.token[:, None] * 13 + column * 7
        k = torch.arange(TOP_K, device=device)
        self._key = ((self.rank[:, None, None] * TOKENS + self.token[:, None]) * TOP_K + k) * 2654435761

    def counts(self) -> Tensor:
        """int32 [R]: none at all in some rounds, all tokens in others."""
        drawn = mixed(self.round * 7919 + self.rank * 104729) % (TOKENS + 1)
        kind = self.round % 16
        return torch.where(kind == 5, 0, torch.where(kind == 9, TOKENS, drawn)).int()

    def ids(self) -> Tensor:
        """int32 [R, T, K], -1 among them; in one round of eight all the same expert."""
        drawn = mixed(self._key + self.round * 40503) % (EXPERTS + 1) - 1
        return torch.where(self.round % 8 == 3, self.round // 8 % EXPERTS, drawn).int()

    def rows(self) -> Tensor:
        """fp16 [R, T, H]; those of other rounds differ in every element."""
        return ((self._place + self.round * 37) % PRIME - PRIME // 2).half()

    def goes(self, ids: Tensor, counts: Tensor) -> Tensor:
        """bool [R, T, R]: which token goes to which rank."""
        owner = torch.div(ids, self._experts_of_rank, rounding_mode="floor")
        there = (owner[..., None] == self.rank).any(dim=2)
        return there & (self.token < counts[:, None])[..., None]


def mixed(key: Tensor) -> Tensor:
    """A number of 31 bits that looks random, for each key."""
    key = (key ^ (key >> 15)) * 2246822519 & 0x7FFFFFFF
    return (key ^ (key >> 13)) * 3266489917 >> 7 & 0x7FFFFFFF


def one_round(dispatch: Any, combine: Any, a2as: Sequence[ep_a2a.A2A], plan: Plan) -> None:
    """Go to the next round, make it on these neighbouring ranks, and add up what is wrong with it."""
    plan.round += 1
    counts, ids, rows = plan.counts(), plan.ids(), plan.rows()
    goes = plan.goes(ids, counts)
    mine = [a2a.rank for a2a in a2as]
    entries = [(a2a, rows[r], ids[r], plan.weights, counts[r : r + 1]) for r, a2a in zip(mine, a2as, strict=True)]
    found = dispatch(entries)
    for a2a, (received, _) in zip(a2as, found, strict=True):
        here = goes[..., a2a.rank]
        wrong = ((received.rows != rows) & here[..., None]).sum() + (received.valid != here).sum()
        wrong += ((received.ids != ids) & here[..., None]).sum() + (received.num_tokens != counts).sum()
        plan.wrong += wrong
        a2a.outbox().copy_(received.rows + a2a.rank)  # rows that nobody sent stay what they are; nobody reads them
    outs = combine([(a2a, handle) for a2a, (_, handle) in zip(a2as, found, strict=True)])
    num_ranks, ranks = goes.sum(dim=2, keepdim=True), (goes * plan.rank).sum(dim=2, keepdim=True)
    wanted = (rows * num_ranks + ranks).half()
    plan.wrong += (torch.stack(list(outs)) != wanted[mine[0] : mine[-1] + 1]).sum()


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_rounds", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_replayed_rounds(gpu_world, record_property, num_rounds):
    """Every rank has a graph and a stream of its own: nothing but flags holds one rank to another."""
    world = gpu_world(RANKS)
    with ep_a2a.connect(CASE.config(), group=world) as a2as:
        one_round(world.dispatch, world.combine, a2as, Plan(a2as[0].device))  # torch's kernels are loaded
        plans, graphs, streams = [], [], [torch.cuda.Stream() for _ in a2as]
        for a2a, stream in zip(a2as, streams, strict=True):
            plans.append(Plan(a2a.device))
            graphs.append(torch.cuda.CUDAGraph())
            torch.cuda.synchronize()
            with torch.cuda.graph(graphs[-1], stream=stream):
                for _ in range(ROUNDS_OF_A_GRAPH):
                    one_round(own_dispatch, own_combine, [a2a], plans[-1])
        for _ in range(0, num_rounds, BATCH):
            for _ in range(BATCH // ROUNDS_OF_A_GRAPH):
                for graph, stream in zip(graphs, streams, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
            torch.cuda.synchronize()
            for a2a in a2as:
                a2a.check()
        rounds, wrong = {int(plan.round) for plan in plans}, sum(int(plan.wrong) for plan in plans)
        record_property("rounds", min(rounds))
        record_property("wrong", wrong)
        assert (rounds, wrong) == ({num_rounds}, 0)


# ---- the plan itself, on a CPU -----------------------------------------------------------------------------------


def plan_of(round_: int) -> Plan:
    plan = Plan(torch.device("cpu"))
    plan.round.fill_(round_)
    return plan


@pytest.mark.parametrize("num_ranks", [2, RANKS])
def test_rounds_on_a_cpu_are_right_and_a_mistake_shows(num_ranks):
    world = test_together.World(num_ranks)
    a2as, plan = world.connect(CASE.config(), world), Plan(torch.device("cpu"), num_ranks)
    for _ in range(20):
        one_round(world.dispatch, world.combine, a2as, plan)
    assert (int(plan.round), int(plan.wrong)) == (20, 0)
    dispatch = world.dispatch

    def rows_of_other_tokens(entries):
        return dispatch([(a2a, x.roll(1, 0), *rest) if a2a.rank == 1 else (a2a, x, *rest) for a2a, x, *rest in entries])

    world.dispatch = rows_of_other_tokens
    for _ in range(2):
        one_round(world.dispatch, world.combine, a2as, plan)
    assert int(plan.wrong) > 0
    a2as.close()


def test_a_plan_has_every_kind_of_round():
    counts = torch.stack([plan_of(r).counts() for r in range(64)])
    assert (counts == 0).all(dim=1).any() and (counts == TOKENS).all(dim=1).any() and (counts % 2 == 1).any()
    assert (counts >= 0).all() and (counts <= TOKENS).all() and counts.unique().numel() == TOKENS + 1
    ids = torch.stack([plan_of(r).ids() for r in range(64)])
    assert ids.min() == -1 and ids.max() == EXPERTS - 1 and ids.unique().numel() == EXPERTS + 1
    assert (ids == ids[:, :1, :1, :1]).all(dim=(1, 2, 3)).any() and not torch.equal(ids[1], ids[2])
    plan = plan_of(1)
    spread = plan.goes(plan.ids(), torch.full((RANKS,), TOKENS)).sum(dim=2)
    assert spread.max() == TOP_K and spread.min() < TOP_K


def test_rows_differ_from_those_of_rounds_nearby_in_every_element():
    rows = torch.stack([plan_of(r).rows() for r in range(PRIME)])
    assert all((rows[0] != rows[r]).all() for r in range(1, PRIME))
    assert rows.abs().max() * RANKS + 28 <= 2048
