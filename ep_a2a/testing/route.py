"""Which slot each (received row, expert) pair takes, and what combine makes of rows in such slots, bit for bit.

pairs      for each expert of the rank in ascending order, for each source, token and k in ascending order: the pairs
           whose id is that expert. Equal ids of a token are several pairs
compact    groups one behind the other, each padded to a multiple; slots past the capacity do not exist
by_expert  a group of max_rows slots for each expert; pairs past it do not exist
outbox     acc = 0 in fp32; for the row's pairs in ascending k acc += weight * float(row); one rounding
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_a2a.layout import Shape, local_experts
from ep_a2a.testing.exchange import Expected

_PAYLOAD = ("rows", "scales", "global_scale")


@dataclass(frozen=True)
class ExpectedPairs:
    """Pairs in slots; `planes` by name, zeros where a slot has no pair. Slots are [capacity] or [E_local, max_rows]."""

    planes: dict[str, Tensor]  # [*slots, ...]
    expert_offsets: Tensor  # [E_local + 1] int32
    counts: Tensor  # [E_local] int32
    row_index: Tensor  # [*slots] int32, -1 = no pair
    k: Tensor  # [*slots] int32, -1 = no pair
    weights: Tensor  # [*slots] fp32, 0 = no pair
    pairs_per_expert: list[int]  # those without a slot too
    needed: int  # slots for all pairs of all experts together
    slot_of: dict[tuple[int, int], int]  # (row, k) -> slot, of those that have one


def reference_compact(
    config: Shape, expected: Expected, rank: int, pad_multiple: int = 1, capacity: int | None = None
) -> ExpectedPairs:
    """What `Received.compact` must return on `rank`. Local; slow.

    expected  what the rank holds after dispatch (`reference_dispatch`), with ids and weights
    capacity  None = as many slots as the pairs need
    """
    pairs = _pairs(config, expected, rank)
    sizes = [-(-len(group) // pad_multiple) * pad_multiple for group in pairs]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    room = starts[-1] if capacity is None else capacity
    kept = [group[: max(0, room - start)] for group, start in zip(pairs, starts)]
    return _fill(expected, pairs, kept, [min(start, room) for start in starts], (room,), starts[-1])


def reference_by_expert(config: Shape, expected: Expected, rank: int, max_rows: int) -> ExpectedPairs:
    """What `Received.by_expert` must return on `rank`. Local; slow. Arguments as `reference_compact`."""
    pairs = _pairs(config, expected, rank)
    starts = [i * max_rows for i in range(len(pairs) + 1)]
    return _fill(expected, pairs, [group[:max_rows] for group in pairs], starts, (len(pairs), max_rows), starts[-1])


def reference_ordered_outbox(expected: Expected, pairs: ExpectedPairs, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The outbox that combine makes of `rows` [*slots, H] in the order of `pairs`: [R, max_tokens, H]. Local; slow.

    Rows that are not valid are 0 here.
    """
    flat, weights = rows.flatten(0, -2).float(), pairs.weights.flatten()
    num_ranks, max_tokens, top_k = expected.planes["ids"].shape
    total = torch.zeros(num_ranks * max_tokens, rows.shape[-1])
    for row in expected.valid.flatten().nonzero().flatten().tolist():
        for k in range(top_k):
            slot = pairs.slot_of.get((row, k))
            if slot is not None:
                total[row] = total[row] + weights[slot] * flat[slot]
    return total.to(dtype).reshape(num_ranks, max_tokens, -1)


def _pairs(config: Shape, expected: Expected, rank: int) -> list[list[tuple[int, int]]]:
    """For each expert of the rank its (row, k), row = source * max_tokens + token."""
    owned = local_experts(rank, config.num_experts, expected.valid.shape[0])
    found: list[list[tuple[int, int]]] = [[] for _ in owned]
    ids = expected.planes["ids"].flatten(0, 1).tolist()
    for row in expected.valid.flatten().nonzero().flatten().tolist():
        for k, expert in enumerate(ids[row]):
            if expert in owned:
                found[expert - owned.start].append((row, k))
    return found


def _fill(
    expected: Expected,
    pairs: list[list[tuple[int, int]]],
    kept: list[list[tuple[int, int]]],
    offsets: list[int],
    shape: tuple[int, ...],
    needed: int,
) -> ExpectedPairs:
    slot_of = {pair: offsets[e] + i for e, group in enumerate(kept) for i, pair in enumerate(group)}
    slots = torch.tensor(list(slot_of.values()), dtype=torch.int64)
    row = torch.tensor([pair[0] for pair in slot_of], dtype=torch.int64)
    k = torch.tensor([pair[1] for pair in slot_of], dtype=torch.int64)
    num_slots = torch.Size(shape).numel()

    def fill(values: Tensor, empty: int) -> Tensor:
        out = torch.full((num_slots, *values.shape[1:]), empty, dtype=torch.float32).to(values.dtype)
        bits = torch.uint8 if out.dtype.itemsize == 1 else out.dtype  # torch cannot put into all small dtypes
        out.view(bits)[slots] = values.view(bits)
        return out.reshape(*shape, *values.shape[1:])

    planes = {name: plane.flatten(0, 1)[row] for name, plane in expected.planes.items() if name in _PAYLOAD}
    return ExpectedPairs(
        planes={name: fill(values, 0) for name, values in planes.items()},
        expert_offsets=torch.tensor(offsets, dtype=torch.int32),
        counts=torch.tensor([len(group) for group in kept], dtype=torch.int32),
        row_index=fill(row.int(), -1),
        k=fill(k.int(), -1),
        weights=fill(expected.planes["weights"].flatten(0, 1)[row, k], 0),
        pairs_per_expert=[len(group) for group in pairs],
        needed=needed,
        slot_of=slot_of,
    )
