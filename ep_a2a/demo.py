"""Two small layers, from router to result, on every rank of the launcher: `python -m ep_a2a demo`.

Their hidden, intermediate and top-k sizes are real ones; tokens and experts are few. Rows and weights are NVFP4. The
result is compared with a float64 reference of the whole layer, and the demo fails where it is out of bound.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from dataclasses import dataclass, field

import torch

import ep_a2a
from ep_a2a import layout, testing, world
from ep_a2a.device import choose
from ep_a2a.experts import ExpertWeights, LocalExperts
from ep_a2a.report import Report

PHASES = ("router", "dispatch", "experts", "combine")
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Layer:
    """The shape of a demo layer; `tokens` is what rank 0 has, the others have fewer."""

    name: str
    hidden: int
    top_k: int
    intermediate: int
    num_experts: int
    tokens: int

    def config(self) -> ep_a2a.Config:
        """What `connect` gets."""
        return ep_a2a.Config(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens=self.tokens,
            timeout_s=TIMEOUT_S,
            first_timeout_s=2 * TIMEOUT_S,
        )

    def num_tokens(self, rank: int) -> int:
        """Tokens of a rank: another number on each of three neighbours."""
        return max(1, self.tokens - self.tokens // 4 * (rank % 3))


LAYERS = (
    Layer("Nemotron-like", hidden=2048, top_k=22, intermediate=1024, num_experts=64, tokens=24),
    Layer("DeepSeek-like", hidden=7168, top_k=8, intermediate=2048, num_experts=16, tokens=12),
)


@dataclass
class Outcome:
    """What one rank saw of a layer."""

    out: torch.Tensor
    rows_from: list[int]  # rows received from each rank
    pairs: int  # (row, local expert) pairs computed
    phase_ms: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})


@dataclass(frozen=True)
class Routed:
    """Tokens of one rank and what the router says of them."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def main(arguments: list[str] | None = None) -> int:
    """Run the demo on this rank. Collective over the launcher's ranks. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ep_a2a demo", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each layer")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one rank a GPU, or MPS")
    parser.add_argument("--layer", choices=[layer.name for layer in LAYERS], help="only this one")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the ranks share the machine
    group = world.resolve(None)
    if options.device == "cuda":
        ep_a2a.set_device(group)
    device = choose(options.device)
    report = Report(quiet=group.rank != 0)
    report.title(f"ep_a2a {ep_a2a.__version__}: {group.size} ranks on {device.type}, {group.name}")
    good = True
    for layer in LAYERS:
        if options.layer in (None, layer.name):
            good &= run_layer(group, device, layer, max(1, options.rounds), report)
    if good:
        report.success("every result is within the bound of its float64 reference")
    return 0 if good else 1


def run_layer(group: world.Group, device: torch.device, layer: Layer, num_rounds: int, report: Report) -> bool:
    """Run one layer on this rank and show what happened; True if the result is within bound on every rank."""
    config = layer.config()
    mine = layout.local_experts(group.rank, layer.num_experts, group.size)
    with report.progress(f"{layer.name}: weights", len(mine)) as step:
        parts = [expert_weights(layer, expert) for expert in mine if not step()]
        experts = LocalExperts(stack(parts, layer, device), mine.start)
    with ep_a2a.connect(config, group, device.type) as a2a:
        with report.progress(f"{layer.name}: {num_rounds} rounds and one to warm up", num_rounds + 1) as step:
            outcome = run_rounds(a2a, layer, experts, num_rounds, step)
        with report.progress(f"{layer.name}: float64 reference", len(mine)) as step:
            worst, worst_ratio = compare(group, layer, config, experts, outcome.out, step)
    rows = {
        "rank": group.rank,
        "out": layer.num_tokens(group.rank),
        "from": outcome.rows_from,
        "pairs": outcome.pairs,
        "ms": {phase: statistics.median(times[1:] or times) for phase, times in outcome.phase_ms.items()},
        "error": worst,
        "ratio": worst_ratio,
    }
    everyone = gather_objects(group, rows)
    bytes_per_row = config.bytes(group.size).row_bytes
    report.layer(layer.name, config, bytes_per_row, everyone)
    good = all(row["ratio"] <= 1 for row in everyone)
    if not good:
        report.failure(f"{layer.name}: the result is out of bound: {max(row['ratio'] for row in everyone):.2f} times")
    return good


def run_rounds(a2a: ep_a2a.A2A, layer: Layer, experts: LocalExperts, num_rounds: int, step: object) -> Outcome:
    """One round to warm up and `num_rounds` timed ones, all of the same tokens; they must give the same bits."""
    assert callable(step)
    outcome: Outcome | None = None
    phase_ms: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(num_rounds + 1):
        a2a.group.barrier("demo: round", TIMEOUT_S)
        times = [time.perf_counter()]
        routed = route(layer, a2a.rank)
        x, ids, weights = (tensor.to(a2a.device) for tensor in (routed.x, routed.ids, routed.weights))
        times.append(now(a2a))
        received, handle = ep_a2a.dispatch(a2a, x, ids, weights)
        times.append(now(a2a))
        experts(received, a2a.outbox())
        times.append(now(a2a))
        rows_from, pairs = received.valid.sum(dim=1).tolist(), int((received.topk_ids() >= 0).sum())
        out = ep_a2a.combine(a2a, handle)
        times.append(now(a2a))
        for phase, start, end in zip(PHASES, times, times[1:]):
            phase_ms[phase].append((end - start) * 1e3)
        if outcome is not None and not torch.equal(outcome.out.view(torch.int16), out.view(torch.int16)):
            raise AssertionError("two rounds of the same tokens differ")
        outcome = Outcome(out, rows_from, pairs, phase_ms)
        step()
    assert outcome is not None
    return outcome


def now(a2a: ep_a2a.A2A) -> float:
    """Seconds, once all that was launched has run."""
    if a2a.device.type == "cuda":
        torch.cuda.synchronize(a2a.device)
    return time.perf_counter()


def route(layer: Layer, rank: int) -> Routed:
    """Tokens of a rank, from its seed, through a router: softmax of a projection, the best top_k, renormalised."""
    generator = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(layer.num_tokens(rank), layer.hidden, generator=generator).bfloat16()
    projection = torch.randn(layer.num_experts, layer.hidden, generator=torch.Generator().manual_seed(7))
    probabilities = torch.softmax(x.float() @ projection.T / layer.hidden**0.5, dim=1)
    best = probabilities.topk(layer.top_k, dim=1)
    return Routed(x, best.indices.int(), best.values / best.values.sum(dim=1, keepdim=True))


def expert_weights(layer: Layer, expert: int) -> ExpertWeights:
    """One expert's NVFP4 weights, from its global number: random codes and block scales, about 1 / sqrt(inputs)."""
    generator = torch.Generator().manual_seed(expert)
    hidden, intermediate = layer.hidden, layer.intermediate

    def matrix(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = torch.randint(256, (1, rows, columns // 2), dtype=torch.uint8, generator=generator)
        scales = torch.randint(0x30, 0x40, (1, rows, columns // 16), dtype=torch.uint8, generator=generator)
        return packed, scales.view(torch.float8_e4m3fn), torch.tensor([0.3 / columns**0.5])

    return ExpertWeights(*matrix(2 * intermediate, hidden), *matrix(hidden, intermediate))


def stack(parts: list[ExpertWeights], layer: Layer, device: torch.device) -> ExpertWeights:
    """The weights of several experts as one, on a device; of none, where a rank owns none."""
    names = ("w13", "w13_scales", "w13_global", "w2", "w2_scales", "w2_global")
    if not parts:
        one = expert_weights(layer, 0)
        return ExpertWeights(*(getattr(one, name)[:0].to(device) for name in names))
    columns = ([getattr(part, name).view(torch.uint8) for part in parts] for name in names)
    dtypes = (getattr(parts[0], name).dtype for name in names)
    return ExpertWeights(*(torch.cat(c).view(dtype).to(device) for c, dtype in zip(columns, dtypes)))


def compare(
    group: world.Group, layer: Layer, config: ep_a2a.Config, experts: LocalExperts, out: torch.Tensor, step: object
) -> tuple[float, float]:
    """Largest error of this rank's result and its largest share of the bound. Each rank computes its own experts'
    part of the reference for the tokens of all ranks, and the parts are exchanged. Collective."""
    assert callable(step)
    tokens = [route(layer, rank) for rank in range(group.size)]
    x, ids, weights = (torch.cat([getattr(t, name) for t in tokens]) for name in ("x", "ids", "weights"))
    rows = testing.decode_planes(config, testing.payload_planes(config, x))

    def decoded(expert: int) -> tuple[torch.Tensor, ...]:
        step()
        return tuple(tensor.cpu() for tensor in experts.weights.decoded(expert - experts.first_expert))

    part = testing.reference_part(config, rows, ids, weights, decoded, group.size, group.rank)
    reference = testing.reference_sum(config, gather_objects(group, part))
    first = sum(layer.num_tokens(rank) for rank in range(group.rank))
    mine = slice(first, first + out.shape[0])
    error = (out.cpu().double() - reference.out[mine]).abs()
    ratio = torch.nan_to_num(error / reference.likely_bound[mine], nan=float("inf"))
    return float(error.max()), float(ratio.max())


def gather_objects(group: world.Group, value: object) -> list:  # type: ignore[type-arg]
    """`value` of every rank, by rank. Collective."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    texts = group.all_gather(buffer.getvalue(), "demo: results", TIMEOUT_S)
    return [torch.load(io.BytesIO(text), weights_only=False) for text in texts]
