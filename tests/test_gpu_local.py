"""The local world of one GPU: rounds as in every world, pairs by expert, formats, layers, views; sizes, late work."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

import ep_a2a
from ep_a2a import BF16, FP8, FP16, FP32, MXFP4, NVFP4, Config
from ep_a2a.layout import PAYLOAD_FORMATS
from ep_a2a.quant import decode, encode, swizzle_scales, unswizzle_scales
from ep_a2a.testing import assert_same_bits, decode_planes
from tests import bodies, cases, large, test_corners, test_route
from tests.bodies import Case

pytestmark = pytest.mark.gpu
RANKS = (2, 3, 8, 16)
NUMBERED = list(enumerate(cases.CASES.items()))[::3]  # the slow tests run all of them


# ---- rounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "named"), NUMBERED, ids=[name for _, (name, _) in NUMBERED])
def test_cases(run_local, index, named):
    run_local(RANKS[index // 3 % 4], bodies.rounds, named[1])


@pytest.mark.parametrize("num_ranks", [2, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 16))])
@pytest.mark.parametrize("name", cases.SHAPES)
def test_models(run_local, num_ranks, name):
    case = cases.SHAPES[name]
    run_local(num_ranks, bodies.rounds, replace(case, max_tokens=case.max_tokens if num_ranks < 8 else 5))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("name", cases.CASES)
def test_all_cases(run_local, num_ranks, name):
    run_local(num_ranks, bodies.rounds, cases.CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("payload", PAYLOAD_FORMATS)
def test_corners_of_every_format(run_local, payload):
    for counts in test_corners.COUNTS:
        run_local(3, bodies.rounds, Case(payload=payload, counts=counts, routing="mixed", max_tokens=9))
    for routing in test_corners.ROUTES:
        run_local(4, bodies.rounds, Case(payload=payload, routing=routing, max_tokens=7))
    for shape in test_corners.SHAPES.values():
        run_local(5, bodies.rounds, Case(payload=payload, **shape))


def test_the_bits_of_a_cpu(run_local):
    case = Case(num_experts=20, top_k=6, routing="mixed", counts="up_and_down", hidden=1056)
    wanted = ep_a2a.local(4).run(bodies.rounds, case)
    for schedule, num_sms in (("general", None), ("phased", None), ("phased", 3), ("general", 1)):
        assert run_local(4, bodies.rounds, replace(case, schedule=schedule, num_sms=num_sms)) == wanted


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_on_streams_of_their_own(run_local, num_ranks):
    """Every rank calls for itself; the first run loads torch's kernels, which cannot be done while a rank waits."""
    case = Case(num_rounds=5, routing="mixed")
    wanted = run_local(num_ranks, bodies.rounds, case)
    assert run_local(num_ranks, bodies.rounds, case, streams=True) == wanted


@pytest.mark.parametrize("late_in", ["dispatch", "combine", "release"])
def test_late_peers(run_local, late_in):
    case = Case(num_rounds=4, num_experts=4, top_k=4, counts="full", max_tokens=3)
    run_local(4, bodies.rounds, case)
    run_local(4, bodies.late_peer, case, late_in, streams=True)


@pytest.mark.parametrize("streams", [False, True])
def test_two_channels_overlap(run_local, streams):
    run_local(3, bodies.two_channels, Case(num_rounds=7))
    if streams:
        run_local(3, bodies.two_channels, Case(num_rounds=7), streams=True)


def test_several_objects_with_other_configurations(run_local):
    several = [Case(), Case(payload=BF16, hidden=1024, seed=2), Case(num_experts=6, top_k=2, combine=FP32, seed=3)]

    def body(group):
        with (
            bodies.connect(group, several[0]) as first,
            bodies.connect(group, several[1]) as second,
            bodies.connect(group, several[2]) as third,
        ):
            for round_ in range(3):
                for a2a, case in zip((first, second, third), several):
                    bodies.one_round(a2a, case, round_, round_ - 1 if round_ else None, group=group)

    run_local(3, body)


def test_one_rank(run_local):
    run_local(1, bodies.rounds, Case(num_experts=17))


@pytest.mark.slow
def test_32_ranks(run_local):
    run_local(32, bodies.rounds, Case(num_experts=37, top_k=3, hidden=64, max_tokens=2, counts="up_and_down"))


@pytest.mark.parametrize(("num_ranks", "tokens", "hidden"), [(2, 3, 512), (8, 4, 7168), (8, 50, 1536), (16, 9, 2048)])
@pytest.mark.parametrize(("payload", "source"), [(NVFP4, "bfloat16"), (NVFP4, "float32"), (FP8, "float16")])
def test_few_rows_that_come_as_numbers(run_local, num_ranks, tokens, hidden, payload, source):
    shape = {"num_experts": 2 * num_ranks, "hidden": hidden, "max_tokens": tokens, "num_rounds": 2}
    run_local(num_ranks, bodies.rounds, Case(payload=payload, source=source, counts="odd", device_counts=True, **shape))


# ---- pairs, formats, layers, views -------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [NVFP4, MXFP4, FP8, BF16])
@pytest.mark.parametrize("routing", ["mixed", "holes", "duplicates", "zipf", "nothing"])
def test_pairs_by_expert(run_local, payload, routing):
    hidden = max(64, payload.hidden_multiple)
    run_local(3, test_route.rounds, replace(test_route.SMALL, routing=routing, payload=payload, hidden=hidden))


@pytest.mark.parametrize(("num_experts", "num_ranks", "top_k"), [(7, 3, 3), (2, 4, 2), (300, 2, 5), (64, 8, 22)])
def test_pairs_of_experts_over_ranks(run_local, num_experts, num_ranks, top_k):
    run_local(num_ranks, test_route.rounds, replace(test_route.SMALL, num_experts=num_experts, top_k=top_k))


@pytest.mark.parametrize("rows", ["bf16", "fp32"])
@pytest.mark.parametrize("combine", [BF16, FP16, FP32, FP8, NVFP4])
@pytest.mark.parametrize("how", ["compact", "by_expert"])
def test_combine_with_an_order(run_local, rows, combine, how):
    case = replace(test_route.ORDERED, combine=combine)
    run_local(3, test_route.ordered_rounds, case, how, test_route.NUMBERS[rows])


def _spread(num_rows, hidden, dtype):
    gen = torch.Generator().manual_seed(7)
    x = torch.randn(num_rows, hidden // 16, 16, generator=gen)
    x *= torch.exp(4 * torch.randn(num_rows, hidden // 16, 1, generator=gen))
    return x.reshape(num_rows, hidden).clamp(-6e4, 6e4).to(dtype)


@pytest.mark.parametrize("fmt", PAYLOAD_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_formats_have_the_bits_of_a_cpu(fmt, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = every.view(dtype) if dtype.itemsize == 2 else every.view(torch.bfloat16).float()
    for x in (_spread(17, 512, dtype), _spread(5, 7168, dtype), every.reshape(128, 512), _spread(3, 512, dtype)[:0]):
        here, there = encode(x, fmt), encode(x.cuda(), fmt)
        for name, one, other in zip(fmt.plane_names, here, there, strict=True):
            other = bodies.on_cpu(other)
            if not fmt.is_encoded:  # torch's own rounding, whose NaN may be another one
                one, other = one.nan_to_num(7.0), other.nan_to_num(7.0)
            assert_same_bits(other, one, f"{fmt} {name}")
        for out in (torch.bfloat16, torch.float16, torch.float32):
            got, wanted = decode(there, fmt, out).cpu(), decode(here, fmt, out)
            assert torch.equal(got.isnan(), wanted.isnan())
            assert_same_bits(got.nan_to_num(7.0, 8.0, 9.0), wanted.nan_to_num(7.0, 8.0, 9.0), f"{fmt} to {out}")


def test_codes_and_tiles_have_the_bits_of_a_cpu():
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    rows = (codes, scales, torch.full((256,), 0.37))
    got, wanted = decode([p.cuda() for p in rows], NVFP4).cpu(), decode(rows, NVFP4)
    assert_same_bits(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
    tiles = swizzle_scales(scales.cuda())
    assert_same_bits(bodies.on_cpu(tiles), swizzle_scales(scales))
    assert_same_bits(bodies.on_cpu(unswizzle_scales(tiles, 256, 32)), scales)


LAYER = Case(num_experts=12, top_k=4, hidden=256, num_rounds=2)


@pytest.mark.parametrize("payload", [NVFP4, MXFP4, FP8, BF16])
@pytest.mark.parametrize("combine", [BF16, FP32, FP8])
def test_layers(run_local, payload, combine):
    run_local(3, bodies.layer, replace(LAYER, payload=payload, combine=combine, routing="duplicates"))


def test_moe_layers_on_streams_of_their_own(run_local):
    run_local(2, bodies.layer, LAYER)
    run_local(2, bodies.layer, LAYER, streams=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [8, 16])
def test_layers_of_models(run_local, num_ranks):
    run_local(num_ranks, bodies.layer, Case(num_experts=48, top_k=22, hidden=2048, max_tokens=9, num_rounds=1))
    run_local(num_ranks, bodies.layer, Case(num_experts=24, top_k=8, hidden=7168, max_tokens=9, num_rounds=1))


def test_views(run_local):
    def body(group):
        case, calls = Case(counts="full"), bodies.calls_of(group)
        with bodies.connect(group, case) as a2a:
            assert a2a.device == torch.device("cuda", torch.cuda.current_device())
            given, own = bodies.make_inputs(case, 0, a2a.rank, a2a.num_ranks)
            x, ids, weights = bodies.place((given, own["ids"], own["weights"]), a2a.device)
            received, handle = calls.dispatch(a2a, x, ids, weights)
            outbox = a2a.outbox()
            assert outbox.shape == (2, case.max_tokens, case.hidden) and outbox.dtype == torch.bfloat16
            planes = list(bodies.received_planes(received).values())
            assert {one.device for one in (*planes, outbox, received.valid, received.num_tokens)} == {a2a.device}
            there = received.values(torch.float32).cpu()
            here = decode_planes(a2a.config, {n: bodies.on_cpu(p) for n, p in bodies.received_planes(received).items()})
            valid = received.valid.cpu()
            assert valid.any()
            assert_same_bits(there[valid], here[valid], "values")
            calls.release(a2a, handle)
        assert received.valid.any() and (outbox.fill_(2.0) == 2).all()  # memory that must still be there
        return received.rows.sum().item() >= 0

    assert run_local(2, body) == [True, True]


# ---- sizes and late work -----------------------------------------------------------------------------------------


def patient(**fields):
    return Config(timeout_s=30.0, first_timeout_s=60.0, **fields)


def large_rounds(gpu_world, config, counts, num_rounds=2):
    """The number of wrong elements of eager rounds, then of a replayed graph of one."""
    world, found = gpu_world(len(counts)), []
    with ep_a2a.connect(config, group=world) as a2as:
        for round_ in range(num_rounds):
            inputs = [large.make_inputs(a2a, count, round_) for a2a, count in zip(a2as, counts)]
            found.append(large.run(world, a2as, inputs).item())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wrong = large.run(world, a2as, inputs)
        for _ in range(3):
            graph.replay()
            found.append(wrong.item())
        for a2a in a2as:
            a2a.check()
    return found


@pytest.mark.parametrize("payload", [NVFP4, BF16])
def test_rounds_checked_on_the_device(gpu_world, payload):
    config = patient(num_experts=64, top_k=8, hidden=512, max_tokens=300, payload=payload)
    assert large_rounds(gpu_world, config, (300, 0, 257, 1)) == [0] * 5


@pytest.mark.slow
def test_16_ranks_with_8192_tokens_each(gpu_world):
    config = patient(num_experts=512, top_k=22, hidden=2048, max_tokens=8192)
    assert large_rounds(gpu_world, config, [8192] * 16) == [0] * 5


@pytest.mark.slow
def test_8_ranks_with_8192_tokens_each_of_7168_values(gpu_world):
    config = patient(num_experts=256, top_k=8, hidden=7168, max_tokens=8192, payload=FP8)
    assert large_rounds(gpu_world, config, [8192] * 8) == [0] * 5


@pytest.mark.slow
def test_65536_tokens_on_one_rank(gpu_world):
    config = patient(num_experts=8, top_k=2, hidden=64, max_tokens=65536, payload=BF16)
    assert large_rounds(gpu_world, config, (65536, 3)) == [0] * 5


@pytest.mark.slow
def test_a_receive_region_past_4_gib(gpu_world):
    """Rank 2's rows start 4 GiB into every plane of rows; so do its results in every outbox."""
    config = patient(num_experts=6, top_k=2, hidden=4096, max_tokens=2**18 + 3, payload=BF16)
    assert 2 * config.max_tokens * 8192 > 2**32
    assert large_rounds(gpu_world, config, (40, 7, 9)) == [0] * 5


@pytest.mark.parametrize("busy_rank", [0, 1])
def test_kernels_that_fill_the_gpu_beside_a_rank_that_waits(gpu_world, busy_rank):
    """One rank's stream is full of products before its dispatch and its combine; the other one waits meanwhile."""
    world = gpu_world(2)
    config = patient(num_experts=4, top_k=4, hidden=256, max_tokens=64, payload=BF16)
    with ep_a2a.connect(config, group=world) as a2as:
        inputs = [large.make_inputs(a2a, 64) for a2a in a2as]
        assert large.run(world, a2as, inputs).item() == 0
        work = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
        busy(work, 1)  # torch's kernels are loaded while no rank waits
        torch.ones(8, dtype=torch.bfloat16, device="cuda")
        streams = [torch.cuda.Stream() for _ in a2as]
        started = time.monotonic()
        for _ in range(10):
            found = []
            for rank in (1 - busy_rank, busy_rank):
                with torch.cuda.stream(streams[rank]):
                    busy(work, 20 if rank == busy_rank else 0)
                    one = inputs[rank]
                    found.append((rank, ep_a2a.dispatch_begin(a2as[rank], one.x, one.ids, one.weights)))
            for rank, pending in found:
                with torch.cuda.stream(streams[rank]):
                    _, handle = pending.wait()
                    a2as[rank].outbox().fill_(1.0)
                    busy(work, 20)
                    ep_a2a.combine(a2as[rank], handle)
        torch.cuda.synchronize()
        assert time.monotonic() - started < 20
        for a2a in a2as:
            a2a.check()
        assert large.run(world, a2as, inputs).item() == 0


def busy(work, num_products):
    """Products, one after the other, each of which fills the GPU."""
    for _ in range(num_products):
        work = work @ work / 64


def test_products_between_the_calls_of_all(gpu_world):
    world = gpu_world(8)
    config = patient(num_experts=64, top_k=8, hidden=512, max_tokens=64, payload=BF16)
    with ep_a2a.connect(config, group=world) as a2as:
        inputs = [large.make_inputs(a2a, 64) for a2a in a2as]
        work = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(5):
            busy(work, 10)
            wrong += large.run(world, a2as, inputs)
        assert wrong.item() == 0
        for a2a in a2as:
            a2a.check()
