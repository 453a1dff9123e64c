"""The corner cases of a round for every payload format: the same body as everywhere, bit for bit."""

from __future__ import annotations

import pytest

import ep_a2a
from ep_a2a.layout import PAYLOAD_FORMATS
from tests import bodies
from tests.bodies import Case

COUNTS = ["none", "one", "odd", "full", "varied", "one_rank_none", "some_ranks_none", "one_rank_one", "up_and_down"]
ROUTES = ["mixed", "holes", "duplicates", "one_expert", "empty_ranks", "nothing"]
SHAPES = {
    "top-1": {"top_k": 1},
    "top-9 on 5 ranks": {"top_k": 9, "num_experts": 23},
    "top-32": {"top_k": 32, "num_experts": 40},
    "fewer experts than ranks": {"top_k": 2, "num_experts": 2},
    "four extra planes": {"extra_planes": (4, 1, 36, 100)},
    "one CTA": {"num_sms": 1, "counts": "full"},
    "general": {"schedule": "general"},
    "from memory on any address": {"unaligned": True},
    "33 tokens": {"max_tokens": 33, "counts": "full"},
}


@pytest.mark.parametrize("payload", PAYLOAD_FORMATS)
@pytest.mark.parametrize("counts", COUNTS)
def test_counts(payload, counts):
    ep_a2a.local(3).run(bodies.rounds, Case(payload=payload, counts=counts, routing="mixed", max_tokens=9))


@pytest.mark.parametrize("payload", PAYLOAD_FORMATS)
@pytest.mark.parametrize("routing", ROUTES)
def test_routes(payload, routing):
    ep_a2a.local(4).run(bodies.rounds, Case(payload=payload, routing=routing, max_tokens=7))


@pytest.mark.parametrize("payload", PAYLOAD_FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(payload, shape):
    ep_a2a.local(5).run(bodies.rounds, Case(payload=payload, **SHAPES[shape]))
