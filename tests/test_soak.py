"""Many rounds with changing counts, changing routing and a random delay at every flag access, every round checked.

What travels is a closed form of (round, source rank, token, column), so any rank can check any row by one comparison;
what experts put into the outbox reveals the order in which it is added up.
"""

from __future__ import annotations

import hashlib
import time

import pytest
import torch
from torch import Tensor

import ep_a2a
from ep_a2a import FP32, NVFP4, native, world
from tests import spawn
from tests.bodies import LARGE, PATIENCE_S, Case, generator

RANKS = 4
CASE = Case(num_experts=10, top_k=3, hidden=512, max_tokens=16, payload=NVFP4, combine=FP32)
SHAPE = (RANKS, CASE.max_tokens)
_TOKEN = torch.arange(CASE.max_tokens)
_COLUMN = torch.arange(CASE.hidden)


def plan(round_: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of all ranks in a round: counts [R], ids [R, max_tokens, K] and where each token goes [R, max_tokens, R]."""
    gen = generator("soak", round_)
    counts = torch.randint(CASE.max_tokens + 1, (RANKS,), generator=gen)
    kind = round_ % 8
    if kind in (3, 5):
        counts[torch.randint(RANKS, (1,), generator=gen)] = 0 if kind == 3 else CASE.max_tokens
    ids = torch.randint(CASE.num_experts, (*SHAPE, CASE.top_k), generator=gen, dtype=torch.int32)
    if kind == 1:
        ids[torch.rand(ids.shape, generator=gen) < 0.4] = -1
    elif kind == 4:
        ids[:] = ids[0, 0, 0]  # all to one
    elif kind == 6:
        ids.clamp_(max=3)  # some ranks receive nothing
    elif kind == 7 and round_ % 16 == 7:
        counts[:] = 0
    ids[counts[:, None] <= _TOKEN] = -1
    owner = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, -1])[ids]  # 10 experts on 4 ranks; -1 finds the last
    return counts, ids, torch.stack([(owner == rank).any(dim=-1) for rank in range(RANKS)], dim=-1)


def packed_rows(round_: int) -> Tensor:
    """The codes of all tokens of all ranks, any bytes: [R, max_tokens, H/2]."""
    base = torch.arange(RANKS)[:, None] * 71 + _TOKEN * 13 + round_ * 37
    return (base[..., None] + _COLUMN[: CASE.hidden // 2] * (2 * (round_ % 61) + 1)).to(torch.uint8)


def row_scales(round_: int) -> Tensor:
    """[R, max_tokens], exact, another one for every row."""
    return 1.0 + torch.arange(RANKS)[:, None] * 16 + _TOKEN + round_ * 64


def expert_results(round_: int, rank: int) -> Tensor:
    """What `rank` puts into its outbox, [R, max_tokens, H]: +-LARGE or small, so that the order of a sum shows."""
    key = (torch.arange(RANKS)[:, None] * 5 + _TOKEN * 3 + round_)[..., None] + _COLUMN * 7 + rank * (_COLUMN % 5 + 1)
    small = (key % 251 - 125).float() * (2.0**-14 / 3)
    return torch.where(key % 3 == 0, LARGE, torch.where(key % 3 == 1, -LARGE, small))


def ordered_sum(round_: int, source: int, goes: Tensor, reverse: bool = False) -> Tensor:
    """What combine returns to `source`; `goes` is [max_tokens, R]."""
    acc = torch.zeros(CASE.max_tokens, CASE.hidden)
    for rank in sorted(range(RANKS), reverse=reverse):
        acc = torch.where(goes[:, rank, None], acc + expert_results(round_, rank)[source], acc)
    return acc


def check_round(a2a, round_: int) -> None:
    me = a2a.rank
    counts, ids, goes = plan(round_)
    count = int(counts[me])
    rows, scales = packed_rows(round_), row_scales(round_)
    blocks = torch.full((count, CASE.hidden // 16), 0x30 + round_ % 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = (rows[me, :count].contiguous(), blocks, scales[me, :count].contiguous())
    weights = scales[me, :count, None] + torch.arange(CASE.top_k) / 4
    received, handle = ep_a2a.dispatch(a2a, x, ids[me, :count].contiguous(), weights)
    valid = goes[..., me]
    assert torch.equal(received.num_tokens, counts.int()), (round_, me, received.num_tokens, counts)
    assert torch.equal(received.valid, valid), (round_, me, "valid")
    assert torch.equal(received.rows[valid], rows[valid]), (round_, me, "rows")
    assert torch.equal(received.global_scale[valid], scales[valid]), (round_, me, "global_scale")
    assert torch.equal(received.ids[valid], ids[valid]), (round_, me, "ids")
    assert torch.equal(received.weights[valid][:, 0], scales[valid]), (round_, me, "weights")
    assert (received.scales.view(torch.uint8)[valid] == 0x30 + round_ % 64).all(), (round_, me, "scales")
    a2a.outbox()[valid] = expert_results(round_, me)[valid]
    if round_ % 11 == 10:
        ep_a2a.release(a2a, handle)
        return
    out = ep_a2a.combine(a2a, handle)
    wanted = ordered_sum(round_, me, goes[me])[:count]
    assert torch.equal(out.view(torch.int32), wanted.view(torch.int32)), (round_, me, "out")


def soak(group, num_rounds: int, permille: int, max_us: int) -> int:
    """All rounds; the delays are set once per process. Returns the number of rounds done."""
    torch.set_num_threads(1)
    host = native.load("host")
    with ep_a2a.connect(CASE.config(), group=group) as a2a:
        group.barrier("no delays so far", PATIENCE_S)
        host.set_delays(7 + group.rank, permille, max_us)
        try:
            for round_ in range(num_rounds):
                check_round(a2a, round_)
        finally:
            host.set_delays(0, 0, 0)
    return num_rounds


def soak_process(num_rounds: int, permille: int, max_us: int) -> int:
    return soak(world.resolve(None), num_rounds, permille, max_us)


def test_what_is_added_reveals_the_order():
    for round_ in (0, 1, 2, 5):
        goes = torch.ones(CASE.max_tokens, RANKS, dtype=torch.bool)
        sums = {ordered_sum(round_, 0, goes, reverse).numpy().tobytes() for reverse in (False, True)}
        assert len(sums) == 2
    digests = {hashlib.sha256(packed_rows(r).numpy().tobytes()).digest() for r in range(200)}
    assert len(digests) == 200


def test_a_plan_has_every_kind_of_round():
    plans = [plan(round_) for round_ in range(64)]
    counts = torch.stack([one[0] for one in plans])
    assert (counts == 0).all(dim=1).any() and (counts == CASE.max_tokens).any() and (counts % 2 == 1).any()
    goes = torch.stack([one[2] for one in plans])
    assert (~goes.any(dim=(1, 2))).any() and (goes.sum(dim=-1) > 2).any() and (counts[1:] != counts[:-1]).any()


def test_delays_delay():
    def seconds(permille):
        native.load("host").set_delays(1, permille, 20000)
        started = time.monotonic()
        try:
            ep_a2a.local(1).run(_few_rounds)
        finally:
            native.load("host").set_delays(0, 0, 0)
        return time.monotonic() - started

    assert seconds(1000) > 0.04 + seconds(0)


def _few_rounds(group):
    with ep_a2a.connect(CASE.config(), group=group) as a2a:
        for _ in range(4):
            ids = torch.zeros(1, 3, dtype=torch.int32)
            ep_a2a.release(a2a, ep_a2a.dispatch(a2a, torch.ones(1, 512), ids, torch.ones(1, 3))[1])


@pytest.mark.parametrize("kind", ["local", "processes"])
@pytest.mark.parametrize(
    "num_rounds",
    [150, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_soak(kind, num_rounds):
    if kind == "local":
        found = ep_a2a.local(RANKS).run(soak, num_rounds, 1000, 100)
    else:
        found = spawn.run(soak_process, RANKS, num_rounds, 1000, 100, deadline_s=800)
    assert found == [num_rounds] * RANKS
