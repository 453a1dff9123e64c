"""Threads that call a local world together, with a world on the CPU that takes calls as one on a GPU does."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import ep_a2a
from ep_a2a import FP8, layout
from tests import bodies, together
from tests.bodies import Case
from tests.together import NotMet, Table


class Objects(list):
    """All ranks' objects."""

    def __init__(self, world, objects):
        super().__init__(objects)
        self.world, self.ended = world, None

    def close(self):
        self.ended = "closed"
        self.world.each(lambda a2a: a2a.close(), self)

    def __exit__(self, kind, error, trace):
        self.ended = kind
        self.world.each(lambda a2a: a2a.__exit__(kind, error, trace), self)


class World:
    """The calls of a local GPU world, each made by threads that live as long as it."""

    def __init__(self, num_ranks):
        self.world = ep_a2a.local(num_ranks)
        self.log, self.objects = [], []

    def each(self, call, given):
        return self.world.run(lambda rank: call(given[rank.rank]))

    def connect(self, config, group):
        assert group is self
        ranks = self.world.run(lambda rank: ep_a2a.connect(config, group=rank))
        self.objects.append(Objects(self, ranks))
        return self.objects[-1]

    def dispatch(self, entries, channel=0):
        self.log.append(("dispatch", channel))
        return self.each(lambda one: ep_a2a.dispatch(*one, channel=channel), entries)

    def combine(self, entries):
        self.log.append("combine")
        return self.each(lambda one: ep_a2a.combine(*one), entries)

    def release(self, entries):
        self.log.append("release")
        self.each(lambda one: ep_a2a.release(*one), entries)


def run(num_ranks, body, *args, world=None):
    world = world or World(num_ranks)
    table = Table(world, num_ranks, world.each, world.connect, streams=False)
    return table.run(body, args, lambda rank: contextlib.nullcontext())


CASES = [
    Case(),
    Case(how="release", device_counts=True),
    Case(how="rows", combine=FP8, extra_planes=(3, 16), unaligned=True),
    Case(how="out", source="planes", routing="mixed", counts="up_and_down"),
]


@pytest.mark.parametrize("case", CASES)
def test_a_body_gives_the_bits_of_ranks_that_call_for_themselves(case):
    world = World(3)
    assert run(3, bodies.rounds, case, world=world) == ep_a2a.local(3).run(bodies.rounds, case)
    end = "release" if case.how == "release" else "combine"
    assert world.log == [("dispatch", 0), end] * case.num_rounds
    assert world.objects[0].ended == "closed"


def test_begin_forms_and_channels():
    assert run(3, bodies.two_channels, Case(num_rounds=4)) == ["ok"] * 3


def test_the_last_rank_calls_for_all():
    def body(group):
        found = group.meet("what", lambda asked: [(one, threading.current_thread().name) for one in asked], group.rank)
        group.barrier("again", 1)
        return found

    found = run(4, body)
    assert [one for one, _ in found] == [0, 1, 2, 3] and len({name for _, name in found}) == 1


def test_an_error_of_the_call_reaches_every_rank_and_they_go_on():
    def body(group):
        case = Case()
        with bodies.connect(group, case) as a2a:
            given, own = bodies.make_inputs(case, 0, a2a.rank, a2a.num_ranks)
            ids = own["ids"].long() if a2a.rank == 1 else own["ids"]
            with pytest.raises(TypeError, match="topk_ids"):
                group.calls.dispatch(a2a, given, ids, own["weights"])

    world = World(2)
    world.dispatch = _refuse
    run(2, body, world=world)


def _refuse(entries, channel=0):
    assert entries[1][2].dtype == torch.int64
    raise TypeError("topk_ids of rank 1")


def test_ranks_that_call_different_things():
    def body(group):
        group.barrier(f"rank {group.rank}" if group.rank == 2 else "others", 1)

    with pytest.raises(NotMet, match=r"ranks call different things: .*rank 2"):
        run(3, body)


def test_a_rank_that_fails_ends_the_others_and_closes_what_is_open():
    world = World(3)

    def body(group):
        with bodies.connect(group, Case()) as a2a:
            if a2a.rank == 1:
                raise KeyError("as planned")
            group.calls.dispatch(a2a, None, None, None)

    with pytest.raises(KeyError, match="as planned"):
        run(3, body, world=world)
    assert world.objects[0].ended is KeyError and world.log == []


def test_a_rank_that_returns_early_is_waited_for_until_patience_ends(monkeypatch):
    monkeypatch.setattr(together, "PATIENCE_S", 0.2)

    def body(group):
        if group.rank == 0:
            group.barrier("alone", 1)

    with pytest.raises(NotMet, match=r"rank 0, .*alone"):
        run(2, body)


def test_every_format_is_a_case():
    for payload in layout.PAYLOAD_FORMATS:
        run(2, bodies.rounds, Case(payload=payload, num_rounds=1, source="planes" if payload.is_encoded else "float32"))
