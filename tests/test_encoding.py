"""Rows that come to a dispatch as numbers: encoded by the dispatch itself, or before it; the same bits either way."""

from __future__ import annotations

import pytest
import torch

import ep_a2a
from ep_a2a import FP8, MXFP4, MXFP8, NVFP4
from ep_a2a.quant import encode
from ep_a2a.testing import ROUTINGS, assert_same_bits, encode_format
from tests import bodies
from tests.bodies import Case

ENCODED = [NVFP4, MXFP4, FP8, MXFP8]


@pytest.mark.parametrize("payload", ENCODED)
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_few_tokens_are_encoded_by_the_dispatch_and_many_before_it(payload, source):
    case = Case(payload=payload, source=source, hidden=128, max_tokens=90, num_rounds=8, seed=3)
    tokens = [bodies.num_tokens(case, round_, 0, 2) for round_ in range(8)]
    assert min(tokens) <= 64 < max(tokens)  # 8 parts of a tile
    ep_a2a.local(2).run(bodies.rounds, case)


@pytest.mark.parametrize("payload", ENCODED)
@pytest.mark.parametrize("schedule", ["general", "phased"])
def test_what_rows_do_not_fill_is_zero(payload, schedule):
    config = Case(payload=payload, hidden=3 * payload.hidden_multiple, max_tokens=11, top_k=3).config()
    with ep_a2a.connect(config, ep_a2a.local(1).ranks[0]) as a2a:
        a2a.schedule = schedule
        planes, places = a2a.layout.planes, a2a.layout.plane_offsets
        a2a._memory.region[places[0] : a2a.layout.outbox_offset] = 255
        x = torch.randn(11, config.hidden)
        ids, weights = ROUTINGS["uniform"](11, config.num_experts, 3, bodies.generator("zeros"))
        _, handle = ep_a2a.dispatch(a2a, x, ids, weights)
        for plane, place in zip(planes, places):
            rows = a2a._memory.region[place : place + 11 * plane.row_bytes].view(11, plane.row_bytes)
            rest = rows[:, plane.source_bytes + plane.tail_bytes :]
            assert (rest.numel() or plane.name == "rows") and not rest.any(), plane.name
        ep_a2a.release(a2a, handle)


@pytest.mark.parametrize("payload", ENCODED)
def test_rows_come_as_numbers_and_encoded_in_turn(payload):
    def body(group):
        case = Case(payload=payload, hidden=256, max_tokens=70)
        with ep_a2a.connect(case.config(), group=group) as a2a:
            x = torch.randn(70, 256, generator=bodies.generator("turns", group.rank))
            ids = torch.full((70, 4), group.rank * 8, dtype=torch.int32)  # to itself
            wanted = encode_format(x, payload)
            for round_, count in enumerate((5, 5, 70, 5, 70, 70, 5)):
                rows = x[:count].clone()
                given = rows if round_ % 2 else encode(rows, payload)
                received, handle = ep_a2a.dispatch(a2a, given, ids[:count], torch.ones(count, 4))
                for name, plane in zip(payload.plane_names, wanted, strict=True):
                    assert_same_bits(getattr(received, name)[group.rank, :count], plane[:count], f"{round_} {name}")
                ep_a2a.release(a2a, handle)

    ep_a2a.local(2).run(body)
