"""Rounds of a local GPU world that are made and checked on the GPU, for sizes at which the references are too slow.

Moved bytes are random and compared by bits. What experts answer are small integers, so that every sum is exact in bf16,
of up to 16 ranks: rank d adds `base` of the token, -7 to 7, and d % 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ep_a2a
from ep_a2a import layout
from tests import bodies


@dataclass(frozen=True)
class Inputs:
    """Of a rank: what it sends, where to, and the integers that come back."""

    x: Any
    ids: Tensor
    weights: Tensor
    goes: Tensor  # bool [T, num_ranks]
    base: Tensor  # bf16 [T, H]


def make_inputs(a2a: ep_a2a.A2A, count: int, seed: int = 1) -> Inputs:
    """Random inputs of a rank on its device; experts are uniform and distinct."""
    config, device = a2a.config, a2a.device
    gen = torch.Generator(device=device).manual_seed(1000 * seed + a2a.rank)
    planes = []
    for column in config.payload.columns:
        num_bytes = config.hidden // column.hidden_per_element * column.dtype.itemsize
        data = torch.randint(256, (count, num_bytes), generator=gen, device=device, dtype=torch.uint8)
        planes.append(data.view(column.dtype))
    ids = torch.rand(count, config.num_experts, generator=gen, device=device).topk(config.top_k).indices.int()
    owner = torch.empty(config.num_experts, dtype=torch.int64)
    for rank in range(a2a.num_ranks):
        owned = layout.local_experts(rank, config.num_experts, a2a.num_ranks)
        owner[owned.start : owned.stop] = rank
    owners = owner.to(device)[ids.long()]
    goes = torch.stack([(owners == rank).any(dim=1) for rank in range(a2a.num_ranks)], dim=1)
    token = torch.arange(count, device=device, dtype=torch.int32)[:, None]
    column = torch.arange(config.hidden, device=device, dtype=torch.int32)
    base = ((token * 13 + column * 7 + a2a.rank * 5 + seed) % 15 - 7).bfloat16()
    weights = torch.rand(count, config.top_k, generator=gen, device=device)
    return Inputs(tuple(planes) if config.payload.is_encoded else planes[0], ids, weights, goes, base)


def run(world: Any, a2as: Sequence[ep_a2a.A2A], inputs: Sequence[Inputs]) -> Tensor:
    """One round. Returns on the device how many elements were wrong; may be captured in a graph."""
    found = world.dispatch([(a2a, i.x, i.ids, i.weights) for a2a, i in zip(a2as, inputs, strict=True)])
    wrong = torch.zeros((), dtype=torch.int64, device=a2as[0].device)
    for a2a, (received, _) in zip(a2as, found, strict=True):
        wrong += wrong_rows(a2a, received, inputs)
        outbox = a2a.outbox()
        for source, theirs in enumerate(inputs):
            outbox[source, : theirs.base.shape[0]] = theirs.base + a2a.rank % 8
    outs = world.combine([(a2a, handle) for a2a, (_, handle) in zip(a2as, found, strict=True)])
    share = torch.arange(len(a2as), device=wrong.device) % 8.0
    for out, own in zip(outs, inputs, strict=True):
        goes = own.goes.float()
        wanted = goes.sum(dim=1, keepdim=True) * own.base + (goes * share).sum(dim=1, keepdim=True)
        wrong += (out != wanted).sum()
    return wrong


def wrong_rows(a2a: ep_a2a.A2A, received: ep_a2a.Received, inputs: Sequence[Inputs]) -> Tensor:
    """How many elements of what a rank received are not what the others sent."""
    valid = received.valid
    wrong = torch.zeros((), dtype=torch.int64, device=valid.device)
    for source, theirs in enumerate(inputs):
        count, here = theirs.ids.shape[0], theirs.goes[:, a2a.rank]
        wrong += (valid[source, :count] != here).sum() + valid[source, count:].sum()
        wrong += received.num_tokens[source] != count
        sent = theirs.x if isinstance(theirs.x, tuple) else (theirs.x,)
        planes = [(received.rows, sent[0]), (received.ids, theirs.ids), (received.weights, theirs.weights)]
        if received.scales is not None:
            planes.append((received.scales, sent[1]))
        for plane, wanted in planes:
            differs = bodies.as_bits(plane)[source, :count] != bodies.as_bits(wanted)
            wrong += (differs & here[:, None]).sum()
    return wrong
