"""Rounds that every kind of world runs, checked against the references: a body is a function of (group, case).

Every rank makes the inputs of all ranks from seeds, so it knows what it must receive and what combine must return.
Results of experts are made to reveal the order of a sum: among large values of both signs are small ones, of which an
fp32 accumulator keeps the more, the later they come.

Before a round ends, all that a rank received is overwritten with a pattern: rows that the next round does not deliver
must still hold it. That is inside the window in which the planes are this rank's: every peer's rows are here, and no
peer writes again before this rank has called combine or release.

Inputs and references are made on the CPU, moved to the rank's device for the calls, and compared on the CPU. A group
may bring the functions that a body calls (`group.calls`, see `tests/together.py`); else they are those of `ep_a2a`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ep_a2a
from ep_a2a import BF16, NVFP4, Config, Format
from ep_a2a.experts import ExpertWeights, LocalExperts
from ep_a2a.moe import MoELayer
from ep_a2a.testing import (
    ROUTINGS,
    assert_same_bits,
    assert_within,
    decode_planes,
    destinations,
    encode_nvfp4,
    payload_planes,
    reference_combine,
    reference_dispatch,
    reference_moe,
)

PATIENCE_S = 60.0  # where nothing is meant to be late
LARGE = 2.0**12
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ONE_AT_A_TIME = threading.Lock()  # threads that share Python with 63 others and all compute are slow
TOP_K = ("ids", "weights")
_PAYLOAD_NAMES = ("rows", "scales", "global_scale")


@dataclass(frozen=True)
class Case:
    """A configuration and what happens in its rounds. Travels to other processes by pickle."""

    num_experts: int = 16
    top_k: int = 4
    hidden: int = 512
    max_tokens: int = 16
    payload: Format = NVFP4
    combine: Format = BF16
    extra_planes: tuple[int, ...] = ()
    num_sms: int | None = None
    num_rounds: int = 3
    routing: str = "uniform"  # of ROUTINGS, or "mixed": another one every round and rank
    counts: str = "varied"  # how many tokens each rank has; see `num_tokens`
    source: str = "bfloat16"  # dtype of x; or "planes"; or for NVFP4 "packed", "packed_scalar", "packed_rows"
    how: str = "outbox"  # or "rows", "out", "release"
    schedule: str | None = None
    device_counts: bool = False
    unaligned: bool = False  # what dispatch is given starts one element behind a multiple of 16 bytes
    seed: int = 1

    def config(self, **more: Any) -> Config:
        """The configuration, patient where `more` does not say otherwise."""
        fields = {"timeout_s": PATIENCE_S, "first_timeout_s": PATIENCE_S, "num_sms": self.num_sms} | more
        return Config(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens=self.max_tokens,
            payload=self.payload,
            combine=self.combine,
            extra_planes=self.extra_planes,
            **fields,
        )


def generator(*key: int | str) -> torch.Generator:
    """A generator that depends on all of `key`, the same in every process."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))


def num_tokens(case: Case, round_: int, rank: int, num_ranks: int) -> int:
    """Tokens of a rank in a round."""
    most = case.max_tokens
    drawn = random.Random(repr((case.seed, round_, rank))).randint(0, most)
    named = {
        "varied": drawn,
        "full": most,
        "none": 0,
        "one": 1,
        "odd": min(most - (most % 2 == 0), drawn | 1),
        "one_rank_none": 0 if rank == round_ % num_ranks else max(1, drawn),
        "some_ranks_none": 0 if (rank + round_) % 2 else max(1, drawn),
        "one_rank_one": int(rank == round_ % num_ranks),
        "up_and_down": most if round_ % 2 == 0 else drawn // 4,
    }
    return named[case.counts]


@functools.lru_cache(maxsize=512)
def make_inputs(case: Case, round_: int, rank: int, num_ranks: int) -> tuple[Any, dict[str, Tensor]]:
    """(x as dispatch takes it, the planes that must arrive), of a rank in a round. Shared: never written to."""
    gen = generator(case.seed, "inputs", round_, rank)
    count = num_tokens(case, round_, rank, num_ranks)
    routing = case.routing
    if routing == "mixed":
        routing = sorted(ROUTINGS)[(round_ * 5 + rank * 2) % len(ROUTINGS)]
    ids, weights = ROUTINGS[routing](count, case.num_experts, case.top_k, gen)
    x = torch.randn(count, case.hidden, generator=gen) * torch.exp(torch.randn(count, 1, generator=gen))
    given: Any
    if case.source.startswith("packed"):
        scale = {"packed": 1.0, "packed_scalar": 0.37}.get(case.source)
        g = torch.exp(torch.randn(count, generator=gen)) * 1e-2 if scale is None else torch.tensor(scale)
        planes = dict(zip(_PAYLOAD_NAMES, encode_nvfp4(x, g), strict=True))
        given = (planes["rows"], planes["scales"]) + (() if case.source == "packed" else (g,))
    elif case.source == "planes":
        planes = payload_planes(case.config(), x)
        given = tuple(planes.values())
    else:
        given = x.to(getattr(torch, case.source))
        planes = payload_planes(case.config(), given)
    planes |= {"ids": ids, "weights": weights}
    for i, num_bytes in enumerate(case.extra_planes):
        planes[f"extra{i}"] = torch.randint(256, (count, num_bytes), generator=gen, dtype=torch.uint8)
    return given, planes


@functools.lru_cache(maxsize=4096)
def results(case: Case, round_: int, rank: int, source: int) -> Tensor:
    """What the experts of `rank` make of all rows of `source`: [max_tokens, H] in the dtype of the result.

    For an encoded combine whole blocks are large or small, and as small as their scales let them be.
    """
    gen = generator(case.seed, "results", round_, rank, source)
    shape = (case.max_tokens, case.hidden)
    encoded = case.combine.is_encoded
    small = torch.randn(shape, generator=gen) * (2.0**-4 if encoded else 2.0**-8)
    blocks = -(-case.hidden // 128) if encoded else case.hidden
    kind = torch.randint(4, (case.max_tokens, blocks), generator=gen)
    kind = kind.repeat_interleave(128 if encoded else 1, dim=1)[:, : case.hidden]
    value = torch.where(kind == 0, LARGE, torch.where(kind == 1, -LARGE, small))
    return value.to(case.combine.result_dtype)


def calls_of(group: Any) -> Any:
    """What has the functions connect, dispatch, combine, ... for a rank of `group`."""
    return getattr(group, "calls", ep_a2a)


def connect(group: Any, case: Case, **more: Any) -> Any:
    """Connect for a case; to be used in a `with` statement."""
    return calls_of(group).connect(case.config(**more), group=group)


def settle(a2a: ep_a2a.A2A) -> None:
    """Wait until a GPU has done what this thread launched, and raise what went wrong; on a CPU a call has and does."""
    if a2a.device.type != "cpu":
        torch.cuda.current_stream(a2a.device).synchronize()
        a2a.check()


def place(given: Any, device: torch.device) -> Any:
    """Tensors, also in tuples and lists, on a device."""
    if isinstance(given, (tuple, list)):
        return type(given)(place(one, device) for one in given)
    return given.to(device) if isinstance(given, Tensor) else given


def on_cpu(plane: Tensor) -> Tensor:
    """A plane on the CPU, moved as bits: not every small dtype can be copied from a strided view."""
    return plane if plane.device.type == "cpu" else as_bits(plane).cpu().view(plane.dtype)


def received_planes(received: ep_a2a.Received) -> dict[str, Tensor]:
    """The planes of a `Received` by the names that the reference uses."""
    planes = {"rows": received.rows, "scales": received.scales, "global_scale": received.global_scale}
    planes |= {"ids": received.ids, "weights": received.weights}
    planes |= {f"extra{i}": plane for i, plane in enumerate(received.extra)}
    return {name: plane for name, plane in planes.items() if plane is not None}


def unaligned(given: Any) -> Any:
    """A copy that starts one element behind where it would: contiguous, on no vector of 16 bytes."""
    if isinstance(given, (tuple, list)):
        return type(given)(map(unaligned, given))
    copy = torch.empty(given.numel() + 1, dtype=given.dtype, device=given.device)[1:].view(given.shape)
    copy.copy_(given)
    assert given.numel() == 0 or copy.data_ptr() % 16
    return copy


def as_bits(plane: Tensor) -> Tensor:
    """The elements of a plane as integers of the same size."""
    return plane.view(_BITS[plane.dtype.itemsize])


def pattern(plane: Tensor, round_: int) -> int:
    """The element with which a plane is poisoned in a round: equal bytes, never those of a small number."""
    byte = 0xC1 + round_ % 23
    return int.from_bytes(bytes([byte] * plane.dtype.itemsize), "little", signed=plane.dtype.itemsize > 1)


def poison(received: ep_a2a.Received, round_: int) -> None:
    """Overwrite all rows of all planes."""
    for plane in received_planes(received).values():
        as_bits(plane).fill_(pattern(plane, round_))


def assert_received(
    received: ep_a2a.Received, config: Config, inputs: list[dict[str, Tensor]], rank: int, poisoned: int | None
) -> None:
    """All that a rank holds after dispatch: every bit of the rows that came, and that no other row was written."""
    with _ONE_AT_A_TIME:
        wanted = reference_dispatch(config, inputs, rank)
    assert_same_bits(received.num_tokens, wanted.num_tokens, f"rank {rank} num_tokens")
    assert_same_bits(received.valid, wanted.valid, f"rank {rank} valid")
    planes = received_planes(received)
    assert planes.keys() == wanted.planes.keys(), (sorted(planes), sorted(wanted.planes))
    for name, there in planes.items():
        plane = on_cpu(there)
        assert plane.shape == wanted.planes[name].shape, (name, plane.shape)
        assert_same_bits(plane[wanted.valid], wanted.planes[name][wanted.valid], f"rank {rank} {name} of valid rows")
        if poisoned is not None:
            rest = as_bits(plane)[~wanted.valid]
            untouched = torch.full_like(rest, pattern(plane, poisoned))
            assert_same_bits(rest, untouched, f"rank {rank} {name} of rows that nobody sent")


def wanted_out(case: Case, config: Config, round_: int, rank: int, ids: Tensor, num_ranks: int) -> Tensor:
    """What combine must return on `rank`, bit for bit."""
    with _ONE_AT_A_TIME:
        masks = [torch.zeros(0, num_ranks, dtype=torch.bool) for _ in range(num_ranks)]
        masks[rank] = destinations(ids, config.num_experts, num_ranks)
        outboxes = [results(case, round_, r, rank).expand(num_ranks, -1, -1) for r in range(num_ranks)]
        return reference_combine(outboxes, masks, config.combine if config.combine.is_encoded else None)[rank]


def fill_results(case: Case, round_: int, received: ep_a2a.Received, box: Tensor, rank: int) -> None:
    """Write the results of a round at the valid rows of `box`, NaN at all others, which nobody may read."""
    there = box if box.device.type == "cpu" else torch.empty(box.shape, dtype=box.dtype)
    there.fill_(float("nan"))
    for source, valid in enumerate(received.valid.cpu()):
        there[source, valid] = results(case, round_, rank, source)[valid]
    if there is not box:
        box.copy_(there)


def one_round(
    a2a: ep_a2a.A2A, case: Case, round_: int, poisoned: int | None = None, channel: int = 0, group: Any = None
) -> Tensor | None:
    """One round and all its checks. `poisoned` is the round whose pattern the planes hold. Returns what combine did."""
    rank, num_ranks = a2a.rank, a2a.num_ranks
    everybody = [make_inputs(case, round_, r, num_ranks) for r in range(num_ranks)]
    inputs = [planes for _, planes in everybody]
    given, own = everybody[rank]
    rows, count, on_device = given, own["ids"].shape[0], None
    ids, weights, extra = own["ids"], own["weights"], [own[f"extra{i}"] for i in range(len(case.extra_planes))]
    if case.device_counts:  # rows behind the count are there, legal, and must not travel
        tail = 3 if round_ % 2 else case.max_tokens - count
        rows = torch.cat([given, torch.ones(tail, case.hidden, dtype=given.dtype)])
        ids = torch.cat([ids, torch.zeros(tail, case.top_k, dtype=torch.int32)])[: case.max_tokens]
        weights = torch.cat([weights, torch.ones(tail, case.top_k)])[: case.max_tokens]
        rows, on_device = rows[: case.max_tokens], torch.tensor([count], dtype=torch.int32)
    rows, ids, weights, extra, on_device = place((rows, ids, weights, extra, on_device), a2a.device)
    if case.unaligned:
        rows, ids, weights, extra = map(unaligned, (rows, ids, weights, extra))
    calls = calls_of(group)
    received, handle = calls.dispatch(a2a, rows, ids, weights, on_device, extra=extra, channel=channel)
    settle(a2a)
    assert_received(received, a2a.config, inputs, rank, poisoned)
    encoded, by_rows = case.combine.is_encoded, case.how == "rows" or case.combine.is_encoded
    box = a2a.scratch(channel) if encoded else a2a.outbox(channel)
    if case.how == "rows":
        box = torch.empty(box.shape, dtype=box.dtype, device=box.device)
    fill_results(case, round_, received, box, rank)
    if group is not None:
        group.barrier("all have their rows", PATIENCE_S)
    poison(received, round_)
    if case.how == "release":
        calls.release(a2a, handle)
        settle(a2a)
        return None
    out = torch.full((ids.shape[0], case.hidden), 7.0, dtype=box.dtype, device=box.device)
    out = calls.combine(a2a, handle, rows=box if by_rows else None, out=out if case.how == "out" else None)
    settle(a2a)
    out = out.cpu()
    wanted = wanted_out(case, a2a.config, round_, rank, own["ids"], num_ranks)
    assert_same_bits(out[:count], wanted, f"rank {rank} round {round_} out")
    assert out.shape[0] == ids.shape[0]
    assert_same_bits(out[count:], torch.zeros_like(out[count:]), f"rank {rank} round {round_} out behind the count")
    return out


def rounds(group: Any, case: Case) -> str:
    """All rounds of a case, poisoned in between. Returns a digest of what combine returned on this rank."""
    torch.set_num_threads(1)
    digest = hashlib.sha256()
    with connect(group, case) as a2a:
        if case.schedule is not None:
            a2a.schedule = case.schedule
        for round_ in range(case.num_rounds):
            out = one_round(a2a, case, round_, round_ - 1 if round_ else None, group=group)
            if out is not None:
                digest.update(out.contiguous().view(torch.uint8).numpy().tobytes())
        a2a.check()
    return digest.hexdigest()


def late_peer(group: Any, case: Case, late_in: str) -> str:
    """Rounds in which one rank, another every round, comes late to "dispatch", "combine" or "release".

    The other phases are in step by the group's barrier alone, so that a wait that is missing shows in its own phase.
    """
    torch.set_num_threads(1)
    calls = calls_of(group)
    with connect(group, case) as a2a:
        for round_ in range(case.num_rounds):
            inputs = [make_inputs(case, round_, r, a2a.num_ranks) for r in range(a2a.num_ranks)]
            given, own = inputs[a2a.rank]
            late = a2a.rank == round_ % a2a.num_ranks
            if late and late_in == "dispatch":
                time.sleep(0.05)
            given, ids, weights = place((given, own["ids"], own["weights"]), a2a.device)
            pending = calls.dispatch_begin(a2a, given, ids, weights)
            if late_in != "dispatch":
                settle(a2a)
                group.barrier("all have sent", PATIENCE_S)
            received, handle = pending.wait()
            settle(a2a)
            assert_received(received, a2a.config, [planes for _, planes in inputs], a2a.rank, None)
            if late and late_in != "dispatch":
                time.sleep(0.05)  # the others must not begin the next round, which would overwrite these rows
                assert_received(received, a2a.config, [planes for _, planes in inputs], a2a.rank, None)
            if late_in == "release":
                calls.release(a2a, handle)
                settle(a2a)
                continue
            fill_results(case, round_, received, a2a.outbox(), a2a.rank)
            if late_in == "dispatch":
                settle(a2a)
                group.barrier("all have their results", PATIENCE_S)
            out = calls.combine(a2a, handle)
            settle(a2a)
            assert_same_bits(out, wanted_out(case, a2a.config, round_, a2a.rank, own["ids"], a2a.num_ranks))
            group.barrier("all have combined", PATIENCE_S)
    return "ok"


def two_channels(group: Any, case: Case) -> str:
    """Rounds of two channels that overlap, begun one before the other is waited for, some of them abandoned."""
    torch.set_num_threads(1)
    calls, config = calls_of(group), case.config(channels=2)
    with connect(group, case, channels=2) as a2a:
        me, size = a2a.rank, a2a.num_ranks
        for round_ in range(0, 2 * case.num_rounds, 2):
            inputs = [[make_inputs(case, round_ + c, r, size)[1] for r in range(size)] for c in (0, 1)]
            pending = []
            for channel in (0, 1):
                own = make_inputs(case, round_ + channel, me, size)[0], *(inputs[channel][me][n] for n in TOP_K)
                pending.append(calls.dispatch_begin(a2a, *place(own, a2a.device), channel=channel))
            if round_ % 6 == 4:
                pending[0].abandon()
                pending[1].abandon()
                continue
            combines = []
            for channel in (1, 0):  # the waits come in the same order on every rank, not in that of the sends
                received, handle = pending[channel].wait()
                settle(a2a)
                assert_received(received, config, inputs[channel], me, None)
                fill_results(case, round_ + channel, received, a2a.outbox(channel), me)
                combines.append((channel, calls.combine_begin(a2a, handle)))
            for channel, combine in combines:
                out = combine.wait()
                settle(a2a)
                wanted = wanted_out(case, config, round_ + channel, me, inputs[channel][me]["ids"], size)
                assert_same_bits(out, wanted, f"rank {me} channel {channel} out")
    return "ok"


@functools.lru_cache(maxsize=2)
def expert_weights(case: Case, intermediate: int) -> ExpertWeights:
    """The weights of all experts, NVFP4, on the CPU."""
    gen, n, h = generator(case.seed, "weights"), case.num_experts, case.hidden
    w13 = torch.randn(n, 2 * intermediate, h, generator=gen) / h**0.5
    return ExpertWeights.quantize(w13, torch.randn(n, h, intermediate, generator=gen) / intermediate**0.5)


def local_experts(a2a: ep_a2a.A2A, case: Case, intermediate: int) -> LocalExperts:
    """The experts of a rank, on its device."""
    whole, owned = expert_weights(case, intermediate), a2a.local_experts
    parts = {name: tensor[owned.start : owned.stop].to(a2a.device) for name, tensor in whole.tensors().items()}
    return LocalExperts(dataclasses.replace(whole, **parts), owned.start)


def assert_layer(
    out: Tensor, case: Case, given: Any, own: dict[str, Tensor], num_ranks: int, intermediate: int
) -> None:
    """What a layer returned for inputs that `make_inputs` made, within the bound of the formats."""
    if not own["ids"].numel():
        assert out.shape == (0, case.hidden)
        return
    with _ONE_AT_A_TIME:
        config, weights = case.config(), expert_weights(case, intermediate)
        rows = decode_planes(config, payload_planes(config, given))
        wanted = reference_moe(config, rows, own["ids"], own["weights"], weights.decoded, num_ranks)
    assert_within(out, wanted.out, wanted.likely_bound)
    assert (wanted.out.abs() > 4 * wanted.likely_bound).any() or (own["ids"] < 0).all(), "zeros would be within bound"


def layer(group: Any, case: Case, intermediate: int = 64) -> str:
    """Whole layers: by `MoELayer`, or where the calls of all ranks meet, by its three steps."""
    torch.set_num_threads(1)
    calls = calls_of(group)
    with connect(group, case) as a2a:
        experts = local_experts(a2a, case, intermediate)
        for round_ in range(case.num_rounds):
            given, own = make_inputs(case, round_, a2a.rank, a2a.num_ranks)
            x, ids, weights = place((given, own["ids"], own["weights"]), a2a.device)
            if calls.dispatch is ep_a2a.dispatch:
                out = MoELayer(a2a, experts)(x, ids, weights)
            else:
                received, handle = calls.dispatch(a2a, x, ids, weights)
                rows = a2a.scratch() if case.combine.is_encoded else None
                experts(received, a2a.outbox() if rows is None else rows)
                out = calls.combine(a2a, handle, rows=rows)
            settle(a2a)
            assert_layer(out, case, given, own, a2a.num_ranks, intermediate)
    return "ok"
