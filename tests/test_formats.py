"""Formats beside NVFP4: bits of the reference and of independent code, rounds with each, encoded results, bounds."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ep_a2a
from ep_a2a import BF16, FP8, MXFP4, MXFP8, NVFP4, Format
from ep_a2a.experts import ExpertWeights, LocalExperts
from ep_a2a.layout import COMBINE_FORMATS, PAYLOAD_FORMATS
from ep_a2a.moe import MoELayer
from ep_a2a.quant import decode, encode, swizzle_scales, unswizzle_scales
from ep_a2a.testing import (
    ROUTINGS,
    assert_same_bits,
    assert_within,
    coding_error,
    decode_format,
    decode_planes,
    encode_format,
    payload_planes,
    reference_combine,
    reference_moe,
)
from tests import bodies
from tests.bodies import Case

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ENCODED = [NVFP4, MXFP4, FP8, MXFP8]
NEW = [MXFP4, FP8, MXFP8]
LARGEST = {MXFP4: 6.0, FP8: 448.0, MXFP8: 448.0}
HIDDEN = [512, 2048, 2880, 3584, 4096, 5120, 6144, 7168, 7680]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spread_rows(num_rows: int, hidden: int, spread: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows whose runs of 16 values differ in size by factors of about exp(spread)."""
    gen = generator()
    runs = torch.randn(num_rows, hidden // 16, 16, generator=gen)
    runs *= torch.exp(spread * torch.randn(num_rows, hidden // 16, 1, generator=gen))
    return runs.reshape(num_rows, hidden).clamp(-6e4, 6e4).to(dtype)


def assert_encodes_as_reference(x: Tensor, fmt: Format) -> tuple[Tensor, ...]:
    found, wanted = encode(x, fmt), encode_format(x, fmt)
    for name, one, other in zip(fmt.plane_names, found, wanted, strict=True):
        assert_same_bits(one, other, f"{fmt} {name}")
        assert one.is_contiguous()
    return found


def scale_bits(scales: Tensor) -> Tensor:
    return scales.view(torch.int32 if scales.dtype == torch.float32 else torch.uint8)


# ---- kernels against the reference -------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", PAYLOAD_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_and_decode(fmt, dtype):
    for hidden in (max(16, fmt.hidden_multiple), 3 * max(16, fmt.hidden_multiple), 512, 7168):
        for spread in (0.0, 12.0):
            planes = assert_encodes_as_reference(spread_rows(3, hidden, spread, dtype), fmt)
            for out in DTYPES:
                assert_same_bits(decode(planes, fmt, out), decode_format(planes, fmt, out), f"{fmt} {hidden} {out}")


@pytest.mark.parametrize("fmt", NEW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encode_every_value_of_16_bits(fmt, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_encodes_as_reference(every.reshape(128, 512), fmt)  # NaN and Inf among them
    finite = torch.where(every.float().isfinite(), every, torch.zeros_like(every))
    assert_encodes_as_reference(finite.reshape(128, 512), fmt)
    assert_encodes_as_reference(finite[torch.randperm(2**16, generator=generator())].reshape(256, 256), fmt)


@pytest.mark.parametrize("fmt", NEW)
def test_encode_ties_saturation_and_subnormals(fmt):
    """Scales a power of two, so that all midpoints between codes are hit exactly; at every exponent of fp32."""
    codes = torch.arange(16 if fmt == MXFP4 else 127, dtype=torch.uint8)
    dtype = ml_dtypes.float4_e2m1fn if fmt == MXFP4 else ml_dtypes.float8_e4m3fn
    values = torch.from_numpy(codes.numpy().view(dtype).astype(np.float32)).abs().unique()
    middles = (values[1:] + values[:-1]) / 2
    above = torch.tensor([LARGEST[fmt] * 1.01, LARGEST[fmt] * 8 / 7 - 2.0**-10])  # saturate in MX
    points = torch.cat([values, middles, middles * (1 + 2.0**-22), middles * (1 - 2.0**-22), above])
    block = fmt.hidden_multiple
    room = block - 1
    chunks = torch.nn.functional.pad(points, (0, -len(points) % room)).reshape(-1, room)
    top = torch.full((chunks.shape[0], 1), LARGEST[fmt])
    blocks = torch.cat([top, chunks], dim=1)
    for exponent in (-149, -140, -134, -127, -126, -100, -20, 0, 20, 100, 118):
        x = torch.ldexp(blocks.double(), torch.tensor(exponent)).float()
        assert_encodes_as_reference(torch.cat([x, -x]), fmt)


@pytest.mark.parametrize("fmt", ENCODED)
@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32), min_size=128, max_size=128))
def test_any_floats(fmt, values):
    x = torch.tensor(values)[None]
    planes = assert_encodes_as_reference(x, fmt)
    got, wanted = decode(planes, fmt), decode_format(planes, fmt)
    assert_same_bits(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(got.isnan(), wanted.isnan())
    x = torch.where(x.isfinite(), x, 0)
    error = (decode(encode(x, fmt), fmt).double() - x.double()).abs()
    assert (error <= coding_error(fmt, x.double().abs())).all()


@pytest.mark.parametrize("fmt", NEW)
def test_encode_shapes_and_zeros(fmt):
    x = spread_rows(24, 256, 2.0, torch.bfloat16)
    assert_encodes_as_reference(x.reshape(2, 3, 4, 256), fmt)
    assert_encodes_as_reference(x[0], fmt)
    assert_encodes_as_reference(x[:0], fmt)
    assert decode(encode(x[:0], fmt), fmt).shape == (0, 256)
    assert_encodes_as_reference(spread_rows(1, 528, 2.0, torch.bfloat16)[0, 1:513].reshape(1, 512), fmt)  # on 2 bytes
    for zeros in (torch.zeros(3, 128), -torch.zeros(3, 128)):
        rows, scales = assert_encodes_as_reference(zeros, fmt)
        assert not rows.view(torch.uint8).any()
        assert (scales.float() == (1.0 if fmt == FP8 else 2.0**-127)).all()
    buffer = torch.zeros(257, dtype=torch.uint8)
    rows, scales = encode(x[:1], fmt)
    moved = buffer[1 : 1 + rows.numel()].view(rows.dtype).reshape(rows.shape)  # codes that start anywhere
    moved.copy_(rows)
    assert_same_bits(decode((moved, scales), fmt), decode((rows, scales), fmt))


@pytest.mark.parametrize("fmt", NEW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_every_code_and_scale(fmt, dtype):
    column = fmt.columns[1]
    if fmt == FP8:
        scales = torch.exp(torch.randn(256, generator=generator()) * 12)[:, None]
        scales[:4, 0] = torch.tensor([math.nan, math.inf, 2.0**-140, 3e38])
    else:
        scales = torch.arange(256, dtype=torch.uint8)[:, None]
    num_bytes = 256
    rows = torch.arange(num_bytes, dtype=torch.uint8).repeat(256, 1).view(fmt.columns[0].dtype)
    per_row = num_bytes * fmt.columns[0].hidden_per_element // column.hidden_per_element
    scales = scales.repeat(1, per_row).contiguous().view(column.dtype)
    got, wanted = decode((rows, scales), fmt, dtype), decode_format((rows, scales), fmt, dtype)
    assert_same_bits(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(got.isnan(), wanted.isnan()) and got.isnan().any() and got.isinf().any()


# ---- against independent code ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", NEW)
@pytest.mark.parametrize("spread", [0.0, 20.0])
def test_encode_and_decode_equal_ml_dtypes(fmt, spread):
    x = spread_rows(32, 512, spread)
    rows, scales = encode(x, fmt)
    block = fmt.hidden_multiple
    blocks = x.numpy().reshape(-1, block)
    amax = np.abs(blocks).max(axis=1)
    if fmt == FP8:
        wanted_scale = np.maximum(amax / np.float32(448), np.float32(2.0**-100))
        np.testing.assert_array_equal(scales.numpy().ravel(), wanted_scale)
        factor = np.float32(1) / wanted_scale
    else:
        exponent = np.frexp(amax)[1] - 1 - (2 if fmt == MXFP4 else 8)  # frexp's fractions are in [0.5, 1)
        wanted_scale = np.exp2(np.maximum(exponent, -127).astype(np.float64)).astype(ml_dtypes.float8_e8m0fnu)
        np.testing.assert_array_equal(scale_bits(scales).numpy().ravel(), wanted_scale.view(np.uint8))
        wanted_scale = wanted_scale.astype(np.float64)
        factor = 1 / wanted_scale
    scaled = np.clip(blocks * factor[:, None], -LARGEST[fmt], LARGEST[fmt])
    if fmt == MXFP4:
        codes = scaled.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).reshape(32, 512)
        bits = codes.view(np.uint8)
        np.testing.assert_array_equal(rows.numpy(), bits[:, ::2] | bits[:, 1::2] << 4)
    else:
        codes = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).reshape(32, 512)
        np.testing.assert_array_equal(rows.view(torch.uint8).numpy(), codes.view(np.uint8))
    values = codes.astype(np.float32).reshape(-1, block) * wanted_scale[:, None].astype(np.float32)
    np.testing.assert_array_equal(decode((rows, scales), fmt).numpy(), values.reshape(32, 512))
    wanted16 = values.reshape(32, 512).astype(ml_dtypes.bfloat16).view(np.int16)
    np.testing.assert_array_equal(decode((rows, scales), fmt, torch.bfloat16).view(torch.int16).numpy(), wanted16)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_encode_equals_torchao(fmt, dtype):
    pytest.importorskip("torchao", reason="needs torchao")
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    x = spread_rows(64, 512, 2.0, dtype)
    rows, scales = encode(x, fmt)
    element = torch.float4_e2m1fn_x2 if fmt == MXFP4 else torch.float8_e4m3fn
    their_scales, their_rows = to_mx(x, element, 32)
    assert_same_bits(scale_bits(scales), their_scales.view(torch.uint8).reshape(scales.shape), "scales")
    assert_same_bits(rows.view(torch.uint8), their_rows.view(torch.uint8).reshape(rows.shape), "rows")


@pytest.mark.parametrize("rows", [1, 31, 128, 129, 300])
@pytest.mark.parametrize("columns", [1, 4, 6, 16])
def test_scales_in_tile_order(rows, columns):
    bits = torch.randint(256, (rows, columns), dtype=torch.uint8, generator=generator())
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        tiles = swizzle_scales(bits.view(dtype))
        column_tiles = -(-columns // 4)
        wanted = torch.zeros(-(-rows // 128) * column_tiles * 512, dtype=torch.uint8)
        for row in range(rows):
            for column in range(columns):
                tile = row // 128 * column_tiles + column // 4
                wanted[tile * 512 + row % 32 * 16 + row // 32 % 4 * 4 + column % 4] = bits[row, column]
        assert tiles.dtype == dtype and tiles.shape == (-(-rows // 128), column_tiles, 512)
        assert_same_bits(tiles.view(torch.uint8).flatten(), wanted)
        assert_same_bits(unswizzle_scales(tiles, rows, columns).view(torch.uint8), bits)


# ---- through dispatch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", PAYLOAD_FORMATS)
def test_round_trip_of_every_hidden_size(payload):
    for i, hidden in enumerate(HIDDEN):
        if hidden % payload.hidden_multiple == 0:
            schedule = ("general", "phased")[i % 2]
            case = Case(
                payload=payload, hidden=hidden, top_k=9, max_tokens=7, counts="odd", num_rounds=2, schedule=schedule
            )
            ep_a2a.local(2).run(bodies.rounds, case)


@pytest.mark.parametrize("payload", PAYLOAD_FORMATS)
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32", "planes"])
def test_round_trip_of_every_source(payload, source):
    if source == "planes" and not payload.is_encoded:
        pytest.skip("rows of one tensor are no tuple")
    common = {"payload": payload, "source": source, "top_k": 9, "routing": "mixed", "num_rounds": 4}
    ep_a2a.local(3).run(bodies.rounds, Case(**common, counts="some_ranks_none", extra_planes=(4, 1, 36)))
    ep_a2a.local(3).run(bodies.rounds, Case(**common, counts="one_rank_one", extra_planes=(4,), unaligned=True))


@pytest.mark.parametrize("payload", ENCODED)
def test_received_scales_in_tile_order(payload):
    def body(group):
        case = Case(payload=payload, max_tokens=5, top_k=2, num_experts=4)
        with ep_a2a.connect(case.config(), group=group) as a2a:
            x = spread_rows(5, 512, 3.0)
            ids = torch.full((5, 2), 3, dtype=torch.int32)
            received, handle = ep_a2a.dispatch(a2a, x, ids, torch.ones(5, 2))
            if payload == FP8:
                with pytest.raises(TypeError, match=r"float32.*one byte"):
                    received.scales_128x4()
            elif a2a.rank == 1:
                columns = 512 // payload.hidden_multiple
                found = unswizzle_scales(received.scales_128x4(), 10, columns).view(torch.uint8)
                assert_same_bits(found, encode(x, payload)[1].view(torch.uint8).repeat(2, 1))
            ep_a2a.release(a2a, handle)

    ep_a2a.local(2).run(body)


@pytest.mark.parametrize("payload", NEW)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_show_in_their_block(payload, bad):
    x = torch.ones(4, 512)
    x[1, 37] = bad
    planes = assert_encodes_as_reference(x, payload)
    block = payload.hidden_multiple
    wanted = torch.zeros(4, 512, dtype=torch.bool)
    wanted[1, 37 // block * block : 37 // block * block + block] = True
    assert torch.equal(decode(planes, payload).isnan(), wanted)
    assert (decode(planes, payload)[~wanted] == 1).all()


# ---- encoded results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", [FP8, NVFP4])
@pytest.mark.parametrize("how", ["outbox", "rows", "out", "release"])
def test_encoded_combine(combine, how):
    """Bits of the reference, which encodes, decodes and adds in rank order."""
    ep_a2a.local(4).run(bodies.rounds, Case(combine=combine, how=how, num_rounds=3, num_experts=8, top_k=5))


@pytest.mark.parametrize("combine", [FP8, NVFP4])
def test_encoded_combine_of_every_size(combine):
    for hidden in (128, 384, 3584, 7680) + ((16, 48, 2880) if combine == NVFP4 else ()):
        case = Case(hidden=hidden, payload=BF16, combine=combine, max_tokens=5, counts="odd", num_rounds=2, top_k=9)
        ep_a2a.local(2).run(bodies.rounds, case)
    ep_a2a.local(3).run(bodies.rounds, Case(combine=combine, routing="holes", counts="some_ranks_none", num_sms=1))


@pytest.mark.parametrize("combine", [FP8, NVFP4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_encoded_combine_takes_rows_of_any_dtype_and_stays_within_the_bound(combine, dtype):
    ranks, tokens, hidden = 3, 6, 512

    def body(group):
        case = Case(combine=combine, num_experts=ranks, top_k=ranks, max_tokens=tokens, hidden=hidden)
        with ep_a2a.connect(case.config(), group=group) as a2a:
            ids = torch.arange(ranks, dtype=torch.int32).repeat(tokens, 1)
            _, handle = ep_a2a.dispatch(a2a, torch.ones(tokens, hidden), ids, torch.ones(tokens, ranks))
            boxes = [spread_rows(ranks * tokens, hidden, 2.0, dtype) * (1 + r) for r in range(ranks)]
            boxes = [box.to(dtype).reshape(ranks, tokens, hidden) for box in boxes]
            out = ep_a2a.combine(a2a, handle, rows=boxes[a2a.rank])
            masks = [torch.ones(tokens, ranks, dtype=torch.bool)] * ranks
            assert_same_bits(out, reference_combine(boxes, masks, combine)[a2a.rank])
            own = [box[a2a.rank].double() for box in boxes]
            exact, error = sum(own), sum(coding_error(combine, row.abs()) for row in own)
            error += 2.0**-22 * sum(row.abs() for row in own)  # three additions in fp32
            assert_within(out, exact, error + 2.0**-8 * (exact.abs() + error))

    ep_a2a.local(ranks).run(body)


def test_rows_that_are_not_finite_show_after_an_encoded_combine():
    def body(group):
        with ep_a2a.connect(Case(combine=FP8, num_experts=2, top_k=1).config(), group=group) as a2a:
            ids = torch.zeros(2, 1, dtype=torch.int32)
            _, handle = ep_a2a.dispatch(a2a, torch.ones(2, 512), ids, torch.ones(2, 1))
            rows = a2a.scratch().fill_(1.0)
            rows[:, 1, 300] = math.inf
            out = ep_a2a.combine(a2a, handle, rows=rows)
            assert (out[0] == 1).all() and (out[1, :256] == 1).all() and out[1, 256:384].isnan().all()

    ep_a2a.local(2).run(body)


@pytest.mark.parametrize("fmt", ENCODED)
def test_coding_error_holds_and_is_not_wide(fmt):
    used = 0.0
    for scale in (2.0**-140, 2.0**-126, 2.0**-100, 1.0, 2.0**110):
        for spread in (0.0, 1.0, 4.0, 8.0):
            x = (spread_rows(64, 512, spread).clamp(-512, 512).double() * scale).float()
            sweep = torch.linspace(0, 1, 512).repeat(64, 1) * torch.linspace(1, 2, 64)[:, None] * scale
            for values in (x, sweep.float()):
                error = (decode(encode(values, fmt), fmt).double() - values.double()).abs()
                bound = coding_error(fmt, values.double().abs())
                assert (error <= bound).all(), (scale, spread, (error / bound).max())
                used = max(used, float((error / bound).nan_to_num(0).max()))
    assert used > 0.9 and (bound == 0).any(), used


# ---- a whole layer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", PAYLOAD_FORMATS)
@pytest.mark.parametrize("combine", COMBINE_FORMATS)
def test_layer_is_within_the_bound(payload, combine):
    ranks, hidden, intermediate, tokens = 3, 128, 32, 5
    gen = generator(9)
    shapes = (2 * intermediate, hidden), (hidden, intermediate)
    every = [[torch.randn(shape, generator=gen) / shape[1] ** 0.5 for shape in shapes] for _ in range(7)]

    def weights_of(experts):
        return ExpertWeights.quantize(*(torch.stack([every[e][i] for e in experts]) for i in (0, 1)))

    whole = weights_of(range(7))

    def body(group):
        torch.set_num_threads(1)
        case = Case(payload=payload, combine=combine, num_experts=7, top_k=4, hidden=hidden, max_tokens=tokens)
        with ep_a2a.connect(case.config(channels=2), group=group) as a2a:
            layer = MoELayer(a2a, LocalExperts(weights_of(a2a.local_experts), a2a.local_experts.start))
            gen = generator(20 + a2a.rank)
            for channel in (0, 1):
                x = torch.randn(tokens, hidden, generator=gen)
                ids, weights = ROUTINGS["holes"](tokens, 7, 4, gen)
                out = layer(x, ids, weights, channel=channel)
                rows = decode_planes(a2a.config, payload_planes(a2a.config, x))
                reference = reference_moe(a2a.config, rows, ids, weights, whole.decoded, ranks)
                assert out.dtype == combine.result_dtype
                assert_within(out, reference.out, reference.bound)
                assert_within(out, reference.out, reference.likely_bound)
                kept = ids.clone()
                kept[torch.arange(tokens), weights.where(ids >= 0, 0).argmax(dim=1)] = -1
                lost = reference_moe(a2a.config, rows, kept, weights, whole.decoded, ranks).out
                missed = ((lost - reference.out).abs() > reference.bound).any(dim=1)
                assert missed[(ids >= 0).any(dim=1)].all(), "a lost contribution is not seen"

    ep_a2a.local(ranks).run(body)


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_refusals_of_a_round():
    def body(group):
        case = Case(payload=FP8, combine=NVFP4, num_experts=2, top_k=1, max_tokens=4)
        with ep_a2a.connect(case.config(), group=group) as a2a:
            ids, weights = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
            rows, scales = encode(torch.ones(4, 512), FP8)
            for x, error, text in (
                ((rows,), TypeError, r"FP8 \(rows, scales\)$"),
                ((rows, scales, torch.ones(4)), TypeError, r"FP8 \(rows, scales\)$"),
                ((rows.view(torch.uint8), scales), TypeError, "rows is torch.uint8, wanted torch.float8_e4m3fn"),
                ((rows, scales.double()), TypeError, "scales is torch.float64, wanted torch.float32"),
                ((rows, scales[:, :3].contiguous()), ValueError, r"scales is \[4, 3\], wanted \[4, 4\]"),
            ):
                with pytest.raises(error, match=text):
                    ep_a2a.dispatch(a2a, x, ids, weights)
            _, handle = ep_a2a.dispatch(a2a, (rows, scales), ids, weights)
            with pytest.raises(ValueError, match=r"NVFP4 outbox rows are encoded by combine.*rows="):
                a2a.outbox()
            with pytest.raises(TypeError, match="rows=None: NVFP4 outbox rows"):
                ep_a2a.combine(a2a, handle)
            with pytest.raises(TypeError, match="float64"):
                ep_a2a.combine(a2a, handle, rows=torch.ones(2, 4, 512).double())
            with pytest.raises(TypeError, match=r"out is torch\.float32, wanted torch\.bfloat16"):
                ep_a2a.combine(a2a, handle, rows=torch.ones(2, 4, 512), out=torch.ones(4, 512))
            assert (ep_a2a.combine(a2a, handle, rows=torch.ones(2, 4, 512)) == 1).all()
        with pytest.raises(ep_a2a.ClosedError):
            a2a.scratch()

    ep_a2a.local(2).run(body)


def test_refusals_of_the_quantisers():
    rows, scales = encode(torch.ones(2, 256), MXFP8)
    for call, error, text in (
        (lambda: encode(torch.ones(2, 192), FP8), ValueError, r"192.*multiple of 128 for FP8"),
        (lambda: encode(torch.ones(2, 48), MXFP4), ValueError, r"48.*multiple of 32 for MXFP4"),
        (lambda: encode(torch.ones(2, 32), MXFP4, torch.ones(2)), ValueError, "MXFP4 rows have none"),
        (lambda: decode((rows,), MXFP8), ValueError, "1 planes: MXFP8 has rows, scales"),
        (lambda: decode((rows, scales), MXFP4), TypeError, "rows is torch.float8_e4m3fn: MXFP4 wants torch.uint8"),
        (lambda: decode((rows, scales[:, :7].contiguous()), MXFP8), ValueError, r"scales is \[2, 7\].*\[2, 8\]"),
        (lambda: swizzle_scales(torch.ones(2, 2)), TypeError, "float32.*one byte"),
        (lambda: swizzle_scales(scales[0]), ValueError, r"\[8\]: wanted \[rows, columns\]"),
        (
            lambda: unswizzle_scales(swizzle_scales(scales), 129, 8),
            ValueError,
            r"\[1, 2, 512\]: 129 rows.*\[2, 2, 512\]",
        ),
    ):
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize("fmt", ENCODED)
def test_decode_takes_strided_planes(fmt):
    planes = encode(spread_rows(6, 256, 4.0), fmt)
    assert_same_bits(decode([p[::2] for p in planes], fmt), decode(planes, fmt)[::2])
