"""Rounds whose halves are on several streams and in several graphs, and captures that fail."""

from __future__ import annotations

import pytest
import torch

import ep_a2a
from ep_a2a import BF16
from tests import bodies
from tests.bodies import Case

pytestmark = pytest.mark.gpu
CASE = Case(num_experts=6, top_k=2, max_tokens=8, payload=BF16, counts="full")


class Alone:
    """The only rank of a world, whose experts answer each row with itself: `out` must be `x`, once each rank."""

    def __init__(self) -> None:
        self.a2a = ep_a2a.connect(CASE.config(timeout_s=5.0))
        given, own = bodies.make_inputs(CASE, 0, 0, 1)
        self.x, self.ids, self.weights = (t.cuda() for t in (given, own["ids"], own["weights"]))
        self.out = torch.zeros_like(self.x)
        self.streams = [torch.cuda.Stream() for _ in range(3)]

    def begin(self):
        return ep_a2a.dispatch_begin(self.a2a, self.x, self.ids, self.weights)

    def answer(self, pending):
        """The dispatch wait, the experts and the combine's first half."""
        received, handle = pending.wait()
        self.a2a.outbox().copy_(received.rows)
        return ep_a2a.combine_begin(self.a2a, handle, out=self.out)

    def check(self):
        torch.cuda.synchronize()
        self.a2a.check()
        assert torch.equal(self.out, self.x)
        self.out.zero_()
        torch.cuda.synchronize()

    def eager(self):
        self.answer(self.begin()).wait()
        self.check()


@pytest.fixture
def alone(record_property):
    record_property("world", "local")
    record_property("ranks", 1)
    found = Alone()
    found.eager()
    yield found
    found.a2a.close()


def test_halves_on_other_streams_are_in_the_capture(alone):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pending = alone.begin()
        with torch.cuda.stream(alone.streams[0]):
            combine = alone.answer(pending)
        with torch.cuda.stream(alone.streams[1]):
            combine.wait()
        torch.cuda.current_stream().wait_stream(alone.streams[1])
    for seed in range(5):
        alone.x.copy_(torch.randn(alone.x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        alone.check()
    alone.eager()


def test_halves_in_graphs_of_their_own(alone):
    graphs, pending = [torch.cuda.CUDAGraph() for _ in range(3)], None
    steps = (lambda _: alone.begin(), alone.answer, lambda combine: combine.wait())
    for graph, stream, step in zip(graphs, alone.streams, steps, strict=True):
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            pending = step(pending)
    for _ in range(3):
        for graph in graphs:
            graph.replay()
        alone.check()
    alone.eager()


@pytest.mark.parametrize("how_far", [1, 2, 3])
def test_after_a_capture_that_failed_eager_rounds_go_on(alone, how_far):
    def fail():
        pending = alone.begin()
        if how_far > 1:
            pending = alone.answer(pending)
        if how_far > 2:
            pending.wait()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fail()
    alone.eager()
    alone.eager()


def test_threads_have_streams_of_their_own(gpu_world):
    """`run` of a local world: each rank calls for itself, once torch's kernels are loaded."""
    world = gpu_world(3)
    case = Case(num_experts=6, top_k=2, max_tokens=8, payload=BF16, num_rounds=3)
    with ep_a2a.connect(case.config(), group=world) as a2as:

        def rounds(rank):
            a2a = a2as[rank.rank]
            assert torch.cuda.current_stream() == world.streams[rank.rank]
            for round_ in range(3):
                bodies.one_round(a2a, case, round_)
            return a2a.rank

        for rank in world.ranks:  # one at a time, alone: torch's kernels
            with ep_a2a.connect(case.config()) as a2a:
                bodies.one_round(a2a, case, rank.rank)
        assert world.run(rounds) == [0, 1, 2]
