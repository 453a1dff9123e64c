"""Rounds whose inputs lie at fixed addresses: they run eagerly, or are captured in a CUDA graph and replayed.

`Rounds` holds the ranks that this process has: all of a local world, or one. `load` writes the inputs of a round of a
case, `run` makes the calls (eagerly, or while a graph is captured), and `check` compares what came with the references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import ep_a2a
from ep_a2a.moe import MoELayer
from ep_a2a.testing import assert_same_bits
from tests import bodies
from tests.bodies import Case

Call = Callable[[list[Any]], Sequence[Any]]


def own_dispatch(entries: list[Any]) -> list[Any]:
    """The dispatch of a process, in the form of `world.dispatch`."""
    return [ep_a2a.dispatch(*one) for one in entries]


def own_combine(entries: list[Any]) -> list[Tensor]:
    """The combine of a process, in the form of `world.combine`."""
    return [ep_a2a.combine(*one) for one in entries]


def snapshot(received: ep_a2a.Received) -> Any:
    """Copies of all that `bodies.assert_received` looks at."""
    names = ("rows", "scales", "global_scale", "ids", "weights")
    planes = {name: plane if plane is None else copied(plane) for name in names for plane in [getattr(received, name)]}
    extra = tuple(map(copied, received.extra))
    return SimpleNamespace(**planes, extra=extra, num_tokens=received.num_tokens.clone(), valid=received.valid)


def copied(plane: Tensor) -> Tensor:
    """A copy as bits: not every small dtype can be copied from a strided view."""
    return bodies.as_bits(plane).clone().view(plane.dtype)


class Rounds:
    """Rounds of some ranks; counts are on the device, x is bf16."""

    def __init__(self, a2as: Sequence[ep_a2a.A2A], case: Case, dispatch: Call, combine: Call) -> None:
        self.a2as, self.case = list(a2as), case
        self._dispatch, self._combine = dispatch, combine
        self.num_ranks, device, tokens = self.a2as[0].num_ranks, self.a2as[0].device, case.max_tokens
        self.x = [torch.ones(tokens, case.hidden, dtype=torch.bfloat16, device=device) for _ in self.a2as]
        self.ids = [torch.zeros(tokens, case.top_k, dtype=torch.int32, device=device) for _ in self.a2as]
        self.weights = [torch.ones(tokens, case.top_k, device=device) for _ in self.a2as]
        self.counts = [torch.zeros(1, dtype=torch.int32, device=device) for _ in self.a2as]
        shape, dtype = (self.num_ranks, tokens, case.hidden), case.combine.result_dtype
        self.results = [torch.zeros(shape, dtype=dtype, device=device) for _ in self.a2as]
        self.received: list[Any] = []
        self.out: list[Tensor] = []
        self._poisoned: int | None = None

    def load(self, round_: int) -> None:
        """Write the inputs of a round, and what experts are to answer, over those of the last."""
        for i, a2a in enumerate(self.a2as):
            given, own = bodies.make_inputs(self.case, round_, a2a.rank, self.num_ranks)
            count = own["ids"].shape[0]
            self.x[i][:count].copy_(given)
            self.ids[i][:count].copy_(own["ids"])
            self.weights[i][:count].copy_(own["weights"])
            self.counts[i].fill_(count)
            values = [bodies.results(self.case, round_, a2a.rank, source) for source in range(self.num_ranks)]
            self.results[i].copy_(torch.stack(values))

    def entries(self) -> list[Any]:
        """What dispatch takes for each rank."""
        return list(zip(self.a2as, self.x, self.ids, self.weights, self.counts, strict=True))

    def run(self) -> None:
        """One round by calls on the current stream."""
        found = self._dispatch(self.entries())
        self.received = []
        for a2a, (received, _), values in zip(self.a2as, found, self.results, strict=True):
            self.received.append(snapshot(received))
            bodies.poison(received, 0)
            a2a.outbox().copy_(values)
        self.out = list(self._combine([(a2a, handle) for a2a, (_, handle) in zip(self.a2as, found, strict=True)]))

    def capture(self) -> torch.cuda.CUDAGraph:
        """A graph of `run`, which must have run once."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph

    def check(self, round_: int) -> None:
        """Compare all that came in a round."""
        config = self.case.config()
        inputs = [bodies.make_inputs(self.case, round_, rank, self.num_ranks)[1] for rank in range(self.num_ranks)]
        for i, a2a in enumerate(self.a2as):
            bodies.settle(a2a)
            bodies.assert_received(self.received[i], config, inputs, a2a.rank, self._poisoned)
            ids, out = inputs[a2a.rank]["ids"], self.out[i].cpu()
            wanted = bodies.wanted_out(self.case, config, round_, a2a.rank, ids, self.num_ranks)
            assert_same_bits(out[: ids.shape[0]], wanted, f"rank {a2a.rank} round {round_} out")
            assert not out[ids.shape[0] :].any(), f"rank {a2a.rank} round {round_} behind the count"
        self._poisoned = 0


class Layers(Rounds):
    """Whole layers, one call a rank. Ranks of a local world run on `streams`, forked from the current one."""

    def __init__(
        self,
        a2as: Sequence[ep_a2a.A2A],
        case: Case,
        experts: Callable[[ep_a2a.A2A], Any] | None = None,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> None:
        super().__init__(a2as, case, own_dispatch, own_combine)
        self._streams = streams
        self._bounded = experts is None
        make = experts or (lambda a2a: bodies.local_experts(a2a, case, 64))
        self.layers = [MoELayer(a2a, make(a2a)) for a2a in a2as]

    def warm(self, world: Any) -> None:
        """A round in which no rank waits alone, so that torch can load the kernels of the experts."""
        found = world.dispatch(self.entries())
        for layer, (received, _) in zip(self.layers, found, strict=True):
            layer.experts(received, layer.a2a.outbox())
        world.combine([(a2a, handle) for a2a, (_, handle) in zip(self.a2as, found, strict=True)])

    def run(self) -> None:
        """One layer of each rank."""
        calls = list(zip(self.layers, self.x, self.ids, self.weights, self.counts, strict=True))
        if not self._streams:
            self.out = [layer(*given) for layer, *given in calls]
            return
        current, self.out = torch.cuda.current_stream(), []
        for stream, (layer, *given) in zip(self._streams, calls, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self.out.append(layer(*given))
        for stream in self._streams:
            current.wait_stream(stream)

    def check(self, round_: int) -> None:
        """Compare what the layers returned: `LocalExperts` by their bound, other experts are those of `sums`."""
        for i, a2a in enumerate(self.a2as):
            bodies.settle(a2a)
            given, own = bodies.make_inputs(self.case, round_, a2a.rank, self.num_ranks)
            count, out = own["ids"].shape[0], self.out[i].cpu()
            if self._bounded:
                bodies.assert_layer(out[:count], self.case, given, own, self.num_ranks, 64)
            else:
                assert_same_bits(out[:count], sums(self.case, given, own, self.num_ranks), f"rank {a2a.rank} out")
            assert not out[count:].any(), f"rank {a2a.rank} round {round_} behind the count"


class CopyExperts:
    """Experts that answer each row with itself, without a look at the host: for payload BF16."""

    def __call__(self, received: ep_a2a.Received, outbox: Tensor) -> None:
        """Copy all rows."""
        outbox.copy_(received.rows)


def sums(case: Case, given: Tensor, own: dict[str, Tensor], num_ranks: int) -> Tensor:
    """What a layer of `CopyExperts` returns: each token times the number of its ranks, added one by one."""
    goes = bodies.destinations(own["ids"], case.num_experts, num_ranks)
    acc = torch.zeros(given.shape)
    for rank in range(num_ranks):
        acc = torch.where(goes[:, rank, None], acc + given.float(), acc)
    return acc.to(case.combine.result_dtype)
