"""Pairs of received rows and experts: every bit against the references, overflow, and the way back through combine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ep_a2a
from ep_a2a import BF16, FP8, FP16, FP32, NVFP4, CapacityExceeded, ClosedError, RoundError, layout, route
from ep_a2a.testing import (
    ROUTINGS,
    assert_same_bits,
    assert_within,
    decode_planes,
    destinations,
    payload_planes,
    reference_by_expert,
    reference_combine,
    reference_compact,
    reference_dispatch,
    reference_moe,
    reference_ordered_outbox,
)
from tests import bodies
from tests.bodies import Case

CANARY = 0x5B


def run(num_ranks, body, *args):
    return ep_a2a.local(num_ranks).run(body, *args)


def dispatch(a2a, case, round_=0, group=None):
    """(received, handle, what must be there, the rank's own ids) of a round."""
    inputs = [bodies.make_inputs(case, round_, r, a2a.num_ranks) for r in range(a2a.num_ranks)]
    given, own = inputs[a2a.rank]
    extra = bodies.place([own[f"extra{i}"] for i in range(len(case.extra_planes))], a2a.device)
    given, ids, weights = bodies.place((given, own["ids"], own["weights"]), a2a.device)
    received, handle = bodies.calls_of(group).dispatch(a2a, given, ids, weights, extra=extra)
    bodies.settle(a2a)
    return received, handle, reference_dispatch(case.config(), [p for _, p in inputs], a2a.rank), own["ids"]


def assert_pairs(found, wanted, what):
    """Every output up to the end of the last group; which slots are padding everywhere."""
    end = int(wanted.expert_offsets[-1]) if found.row_index.dim() == 1 else None
    for name in ("expert_offsets", "counts"):
        assert_same_bits(getattr(found, name), getattr(wanted, name), f"{what} {name}")
    numbers = {"row_index": (found.row_index, wanted.row_index, -1), "k": (found.k, wanted.k, -1)}
    numbers["weights"] = found.weights, wanted.weights, 0
    if "global_scale" in wanted.planes:
        numbers["global_scale"] = found.global_scale, wanted.planes["global_scale"], 0
    for name, (got, want, empty) in numbers.items():
        assert_same_bits(got[:end], want[:end], f"{what} {name}")
        assert end is None or (got[end:] == empty).all(), f"{what} {name} behind the last group"
    assert (found.scales is None) == ("scales" not in wanted.planes)
    for name in wanted.planes.keys() - {"global_scale"}:
        assert_same_bits(getattr(found, name)[:end], wanted.planes[name][:end], f"{what} {name}")
    assert found.order.shape == tuple(found.row_index.shape)


def most_rows(wanted):
    return max([1, *wanted.pairs_per_expert])


def check_all(a2a, received, expected, case):
    """All operations of one round."""
    config, me = case.config(), a2a.rank
    owned = layout.local_experts(me, case.num_experts, a2a.num_ranks)
    ids = expected.planes["ids"]
    here = expected.valid[..., None] & (ids >= owned.start) & (ids < owned.stop)
    assert_same_bits(received.topk_ids(), torch.where(here, ids, -1), f"rank {me} topk_ids")
    for pad in (1, 4, 128):
        wanted = reference_compact(config, expected, me, pad)
        assert_pairs(received.compact(pad), wanted, f"rank {me} compact({pad})")
        assert_pairs(received.compact(pad, wanted.needed), wanted, f"rank {me} compact({pad}), exactly")
    per_expert = torch.tensor(wanted.pairs_per_expert, dtype=torch.int32)
    assert_same_bits(received.num_tokens_per_expert, per_expert, f"rank {me} num_tokens_per_expert")
    most = most_rows(wanted)
    for max_rows in (most, most + 3):
        wanted = reference_by_expert(config, expected, me, max_rows)
        assert_pairs(received.by_expert(max_rows), wanted, f"rank {me} by_expert({max_rows})")
    bodies.settle(a2a)
    a2a.check()


def rounds(group, case):
    torch.set_num_threads(1)
    with bodies.connect(group, case) as a2a:
        for round_ in range(case.num_rounds):
            received, handle, expected, _ = dispatch(a2a, case, round_, group)
            check_all(a2a, received, expected, case)
            bodies.calls_of(group).release(
                a2a, handle
            )  # bits and ids of this round stay behind the counts of the next one


# ---- against the references --------------------------------------------------------------------------------------

SMALL = Case(hidden=64, num_rounds=2, max_tokens=16)


@pytest.mark.parametrize("routing", [*ROUTINGS, "mixed"])
@pytest.mark.parametrize("payload", [NVFP4, BF16])
def test_routings(routing, payload):
    run(3, rounds, replace(SMALL, routing=routing, payload=payload))


@pytest.mark.parametrize("counts", ["none", "one", "odd", "up_and_down", "one_rank_none"])
def test_token_counts(counts):
    run(3, rounds, replace(SMALL, counts=counts, num_rounds=3, routing="holes"))


@pytest.mark.parametrize("top_k", [1, 9, 32])
@pytest.mark.parametrize("payload", [NVFP4, BF16])
def test_top_k(top_k, payload):
    run(2, rounds, replace(SMALL, num_experts=35, top_k=top_k, payload=payload))


@pytest.mark.parametrize(("num_experts", "num_ranks", "top_k"), [(7, 3, 3), (2, 4, 2), (1, 3, 1), (300, 2, 5)])
def test_experts_over_ranks(num_experts, num_ranks, top_k):
    case = replace(SMALL, num_experts=num_experts, top_k=top_k)
    run(num_ranks, rounds, case)
    run(num_ranks, rounds, replace(case, routing="duplicates", payload=BF16))


@pytest.mark.parametrize("hidden", [16, 48, 2880])
@pytest.mark.parametrize("payload", [NVFP4, BF16])
def test_rows_that_are_no_whole_vectors(hidden, payload):
    run(2, rounds, replace(SMALL, hidden=hidden, payload=payload, extra_planes=(3,), max_tokens=9))


@pytest.mark.parametrize("max_segments", [1, 3, 1024])
@pytest.mark.parametrize("max_tokens", [33, 450])
def test_segments(max_segments, max_tokens, monkeypatch):
    monkeypatch.setattr(layout, "MAX_SEGMENTS", max_segments)
    run(3, rounds, replace(SMALL, max_tokens=max_tokens, counts="up_and_down", routing="zipf", hidden=16))


def test_one_cta_gathers():
    run(2, rounds, replace(SMALL, num_sms=1))


def test_sizes():
    for num_words in (1, 2, 1023, 1024, 1025, 128 * 2048, 128 * 2048 - 1):
        segments, words = layout.route_segments(num_words)
        assert segments <= 1024 and (segments - 1) * words < num_words <= segments * words
    assert layout.most_slots(10, 4, 0, 128) == 0
    assert layout.most_slots(10, 4, 3, 1) == 40
    assert layout.most_slots(1, 2, 64, 128) == 256  # two pairs fill two groups at most
    assert layout.most_slots(10, 4, 3, 4) == 48


def test_a_token_may_need_every_slot_that_the_default_has():
    def body(group):
        case = replace(SMALL, num_experts=2, top_k=4, max_tokens=8)
        with ep_a2a.connect(case.config(), group=group) as a2a:
            ids = torch.zeros(8, 4, dtype=torch.int32)
            received, handle = ep_a2a.dispatch(a2a, torch.ones(8, 64), ids, torch.ones(8, 4))
            pairs = received.compact()
            assert pairs.row_index.shape == (64,)
            assert pairs.counts.tolist() == [64 if a2a.rank == 0 else 0]
            a2a.check()
            ep_a2a.release(a2a, handle)

    run(2, body)


# ---- overflow ----------------------------------------------------------------------------------------------------


def guard_outputs(monkeypatch):
    """All results of routing inside larger memory; the value checks that nothing was written around them."""
    made = []

    def guarded(shape, dtype, device):
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        memory = torch.full((num_bytes + 512,), CANARY, dtype=torch.uint8, device=device)
        made.append((memory, num_bytes))
        return memory[256 : 256 + num_bytes].view(dtype).reshape(shape)

    def check():
        assert len(made) > 8
        for memory, num_bytes in made:
            assert (memory[:256] == CANARY).all() and (memory[256 + num_bytes :] == CANARY).all()

    monkeypatch.setattr(route, "_empty", guarded)
    return check


@pytest.mark.parametrize("payload", [NVFP4, BF16])
@pytest.mark.parametrize("told_by", ["check", "dispatch"])
def test_overflow(payload, told_by, monkeypatch):
    check_guards = guard_outputs(monkeypatch)
    case = replace(SMALL, payload=payload, counts="full", max_tokens=24, hidden=48)

    def cut(pairs):  # (how, what to call, what must come, the numbers of the error)
        full = reference_compact(*pairs)
        for pad, share in ((1, 0.6), (4, 0.3), (4, 0), (128, 0.5)):
            needed = reference_compact(*pairs, pad).needed
            room = int(needed * share) // pad * pad
            wanted = reference_compact(*pairs, pad, room)
            yield "compact", (pad, room), wanted, rf"{needed} slots are needed.* {room};.*capacity={needed} "
        for max_rows in (1, most_rows(full) - 1):
            over = next(i for i, n in enumerate(full.pairs_per_expert) if n > max_rows)
            first, n = layout.first_expert(pairs[2], case.num_experts, 3), full.pairs_per_expert[over]
            text = rf"expert {first + over} has {n} pairs.* {max_rows};.*max_rows={n} "
            yield "by_expert", (max_rows,), reference_by_expert(*pairs, max_rows), text

    def body(group):
        with ep_a2a.connect(case.config(), group=group) as a2a:
            for i in range(6):
                received, handle, expected, own = dispatch(a2a, case, i)
                how, arguments, wanted, text = list(cut((case.config(), expected, a2a.rank)))[i]
                pairs = getattr(received, how)(*arguments)
                assert_pairs(pairs, wanted, f"rank {a2a.rank} {how}{arguments}")
                rows = torch.ones(*pairs.order.shape, case.hidden)
                out = ep_a2a.combine(a2a, handle, rows=rows, order=pairs.order)  # completes, and never tells
                group.barrier("nobody has dispatched again", bodies.PATIENCE_S)
                with pytest.raises(CapacityExceeded, match=rf"rank {a2a.rank}: .*{text}"):
                    a2a.check() if told_by == "check" else dispatch(a2a, case, i)
                a2a.check()
                assert out.shape == (own.shape[0], case.hidden)
                group.barrier("told", bodies.PATIENCE_S)
            received, handle, expected, _ = dispatch(a2a, case, 6)
            check_all(a2a, received, expected, case)
            ep_a2a.release(a2a, handle)

    run(3, body)
    check_guards()


def test_the_first_overflow_is_told_and_does_not_hide_bad_routing():
    def body(group):
        case = replace(SMALL, payload=BF16, num_experts=4, top_k=2, max_tokens=4)
        with ep_a2a.connect(case.config(), group=group) as a2a:
            ids = torch.tensor([[0, 3], [0, 3], [0, 9], [0, 3]], dtype=torch.int32)
            received, handle = ep_a2a.dispatch(a2a, torch.ones(4, 64), ids, torch.ones(4, 2))
            received.by_expert(2)
            received.compact(1, 1)
            ep_a2a.release(a2a, handle)
            with pytest.raises(ep_a2a.InvalidRouting, match="expert 9"):
                a2a.check()
            text = {0: "expert 0 has 8 pairs.* 2;", 1: "expert 3 has 6 pairs.* 2;"}[a2a.rank]
            with pytest.raises(CapacityExceeded, match=text):
                a2a.check()
            a2a.check()

    run(2, body)


# ---- combine with an order ---------------------------------------------------------------------------------------

NUMBERS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ORDERED = Case(num_experts=6, top_k=5, hidden=128, max_tokens=12, routing="duplicates", num_rounds=2, counts="full")


def slot_rows(case, rank, shape, dtype):
    """Rows of pairs that reveal the order of a sum; NaN where no pair may be."""
    gen = bodies.generator(case.seed, "slots", rank)
    size = (*shape, case.hidden)
    small, kind = torch.randn(size, generator=gen) * 2.0**-8, torch.randint(4, size, generator=gen)
    large = torch.where(kind == 0, bodies.LARGE, -bodies.LARGE)
    return torch.where(kind < 2, large, small).to(dtype)


def wanted_out(config, outbox_of, ids, rank, num_ranks):
    """What combine must return on `rank`, from the outboxes of all ranks."""
    masks = [torch.zeros(0, num_ranks, dtype=torch.bool) for _ in range(num_ranks)]
    masks[rank] = destinations(ids, config.num_experts, num_ranks)
    return reference_combine([outbox_of(r) for r in range(num_ranks)], masks, config.combine)[rank]


def ordered_rounds(group, case, how, dtype):
    """Rounds whose results come back pair by pair; for the last of three ranks there are too few slots."""
    config, calls, combine = case.config(), bodies.calls_of(group), case.combine
    with bodies.connect(group, case) as a2a:
        for round_ in range(case.num_rounds):
            inputs = [bodies.make_inputs(case, round_, r, 3)[1] for r in range(3)]

            def outbox_of(rank, inputs=inputs):
                expected = reference_dispatch(config, inputs, rank)
                if how == "compact":
                    pairs = reference_compact(config, expected, rank, 4, 8 if rank == 2 else 240)
                else:
                    pairs = reference_by_expert(config, expected, rank, 2 if rank == 2 else 60)
                values = slot_rows(case, rank, pairs.row_index.shape, dtype)
                encoded_from = torch.float32 if combine.is_encoded else combine.result_dtype
                return reference_ordered_outbox(expected, pairs, values, encoded_from)

            received, handle, _, ids = dispatch(a2a, case, round_, group)
            last = a2a.rank == 2
            room = (4, 8 if last else 240) if how == "compact" else (2 if last else 60,)
            pairs = getattr(received, how)(*room)
            values = slot_rows(case, a2a.rank, pairs.order.shape, dtype)
            values[pairs.row_index.cpu() < 0] = float("nan")
            group.barrier("all have their pairs", bodies.PATIENCE_S)
            bodies.poison(received, round_)
            begin = calls.combine_begin if round_ else calls.combine
            out = begin(a2a, handle, rows=values.to(a2a.device), order=pairs.order)
            out = out.wait() if round_ else out
            assert_same_bits(out, wanted_out(config, outbox_of, ids, a2a.rank, 3), f"rank {a2a.rank} out")
            if last:
                with pytest.raises(CapacityExceeded):
                    a2a.check()
            a2a.check()


@pytest.mark.parametrize("rows", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("combine", [BF16, FP16, FP32, FP8, NVFP4])
@pytest.mark.parametrize("how", ["compact", "by_expert"])
def test_combine_with_an_order(rows, combine, how):
    run(3, ordered_rounds, replace(ORDERED, combine=combine), how, NUMBERS[rows])


def test_the_rows_reveal_the_order():
    values = slot_rows(Case(hidden=96), 0, (4,), torch.bfloat16).float()
    forward, backward = torch.zeros(96), torch.zeros(96)
    for i in range(4):
        forward, backward = forward + values[i], backward + values[3 - i]
    assert not torch.equal(forward, backward)


@pytest.mark.parametrize("payload", [NVFP4, BF16])
@pytest.mark.parametrize("how", ["compact", "by_expert"])
def test_a_layer_by_grouped_products(payload, how):
    case = Case(
        num_experts=10, top_k=4, hidden=256, max_tokens=20, payload=payload, routing="duplicates", counts="full"
    )
    gen = torch.Generator().manual_seed(3)
    w13 = torch.randn(10, 2 * 64, 256, generator=gen).bfloat16().float() / 16
    w2 = torch.randn(10, 256, 64, generator=gen).bfloat16().float() / 8

    def experts(rows, expert):
        gate, up = (rows @ w13[expert].T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).bfloat16().float() @ w2[expert].T

    def body(group):
        torch.set_num_threads(1)
        with ep_a2a.connect(case.config(), group=group) as a2a:
            received, handle, _, ids = dispatch(a2a, case)
            pairs = received.compact(16) if how == "compact" else received.by_expert(60 * 4)
            planes = {"rows": pairs.rows, "scales": pairs.scales, "global_scale": pairs.global_scale}
            planes = {
                name: plane.flatten(0, len(pairs.order.shape) - 1)
                for name, plane in planes.items()
                if plane is not None
            }
            results = torch.zeros(pairs.row_index.numel(), case.hidden)
            starts = pairs.expert_offsets.tolist()
            for i, expert in enumerate(a2a.local_experts):
                group_rows = decode_planes(case.config(), {n: p[starts[i] : starts[i + 1]] for n, p in planes.items()})
                results[starts[i] : starts[i + 1]] = experts(group_rows, expert)
            out = ep_a2a.combine(a2a, handle, rows=results.reshape(*pairs.order.shape, -1), order=pairs.order)
            given, own = bodies.make_inputs(case, 0, a2a.rank, 3)
            rows = decode_planes(case.config(), payload_planes(case.config(), given))
            wanted = reference_moe(case.config(), rows, ids, own["weights"], lambda e: (w13[e], w2[e]), 3)
            assert_within(out, wanted.out, wanted.likely_bound)
            assert wanted.out.abs().max() > 0.1

    run(3, body)


# ---- the same bits, and calls that do not fit ----------------------------------------------------------------------


def test_same_bits_every_run():
    case = Case(num_experts=12, top_k=6, hidden=96, max_tokens=70, routing="zipf", counts="full")

    def body(group, num_sms):
        with ep_a2a.connect(case.config(num_sms=num_sms), group=group) as a2a:
            received, handle, _, _ = dispatch(a2a, case)
            pairs = received.compact(8, 1400)
            found = [
                pairs.row_index,
                pairs.k,
                pairs.weights,
                pairs.expert_offsets,
                pairs.order.pair_slots[received.valid],
            ]
            values = slot_rows(case, a2a.rank, pairs.order.shape, torch.bfloat16)
            found.append(ep_a2a.combine(a2a, handle, rows=values, order=pairs.order))
            return b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in found)

    first = run(3, body, None)
    assert run(3, body, 1) == first and run(3, body, 7) == first and len(set(first)) == 3


def test_bad_arguments():
    def body(group):
        case = replace(SMALL, top_k=2)
        with ep_a2a.connect(case.config(), group=group) as a2a, ep_a2a.connect(case.config(), group=group) as other:
            received, old, _, _ = dispatch(a2a, case)
            there, their_handle, _, _ = dispatch(other, case)
            old_order = received.compact().order
            ep_a2a.release(a2a, old)
            for call in (received.compact, received.topk_ids, lambda: received.num_tokens_per_expert):
                with pytest.raises(RoundError, match="closed"):
                    call()
            received, handle, _, _ = dispatch(a2a, case, 1)
            order = received.compact(4, 96).order
            good = torch.zeros(96, 64)
            for error, text, arguments in (
                (
                    RoundError,
                    "round 0 of channel 0, the handle of round 1",
                    {"rows": torch.zeros(96, 64), "order": old_order},
                ),
                (RoundError, "another A2A", {"rows": good, "order": there.compact(4, 96).order}),
                (ValueError, r"order needs rows \[96, 64\]", {"order": order}),
                (ValueError, r"rows is \[95, 64\], wanted \[96, 64\]", {"rows": good[:95], "order": order}),
                (TypeError, "rows is torch.float64", {"rows": good.double(), "order": order}),
                (TypeError, "order must be.*Pairs", {"rows": good, "order": received.compact()}),
            ):
                with pytest.raises(error, match=text):
                    ep_a2a.combine(a2a, handle, **arguments)
            for error, text, call in (
                (ValueError, "pad_multiple=0: must be 1", lambda: received.compact(0)),
                (TypeError, "pad_multiple.*float", lambda: received.compact(4.0)),
                (ValueError, "capacity=-4", lambda: received.compact(4, -4)),
                (ValueError, "capacity=98.*pad_multiple=4; nearest: 96 and 100", lambda: received.compact(4, 98)),
                (ValueError, "slots could be needed", lambda: received.compact(2**31 - 1)),
                (ValueError, "max_rows=0: must be 1", lambda: received.by_expert(0)),
            ):
                with pytest.raises(error, match=text):
                    call()
            ep_a2a.combine(a2a, handle, rows=good, order=order)
            ep_a2a.release(other, their_handle)
            a2a.check()
        with pytest.raises(ClosedError):
            received.compact()

    run(2, body)
