"""The reference itself: NVFP4 against independent code, routings, dispatch and combine against plain loops."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep_a2a.config import Config
from ep_a2a.layout import BF16, NVFP4
from ep_a2a.testing import (
    ROUTINGS,
    assert_same_bits,
    assert_within,
    decode_nvfp4,
    decode_planes,
    destinations,
    encode_nvfp4,
    payload_planes,
    reference_combine,
    reference_dispatch,
)

NAN_SCALE = 0x7F


def bits(t: Tensor) -> np.ndarray:
    """The bits of a tensor as unsigned integers, so that -0 and NaN compare as what they are."""
    return t.contiguous().view(torch.uint8).numpy()


def encode_numpy(x: np.ndarray, g: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """NVFP4 of fp32 rows [T, H] with NumPy and ml_dtypes, block by block: (codes [T, H], scale bytes, g)."""
    num_rows, hidden = x.shape
    codes = np.zeros((num_rows, hidden), np.uint8)
    scale_bytes = np.zeros((num_rows, hidden // 16), np.uint8)
    row_g = np.ones(num_rows, np.float32)
    one, six = np.float32(1), np.float32(6)
    for t in range(num_rows):
        if g is not None:
            row_g[t] = g[t]
        elif (top := np.max(np.abs(x[t][np.isfinite(x[t])]), initial=np.float32(0))) > 0:
            row_g[t] = max(top / np.float32(2688), np.float32(2.0**-100))
        for b in range(hidden // 16):
            block = x[t, b * 16 : b * 16 + 16]
            if not np.isfinite(block).all():
                scale_bytes[t, b] = NAN_SCALE
                continue
            quotient = min(np.max(np.abs(block)) / six / row_g[t], np.float32(448))
            scale = np.asarray(quotient, np.float32).astype(ml_dtypes.float8_e4m3fn)
            scale_bytes[t, b] = scale.view(np.uint8)
            if float(scale) > 0:
                r = one / row_g[t] / scale.astype(np.float32)
                scaled = np.clip(block * r, -six, six).astype(np.float32)
                codes[t, b * 16 : b * 16 + 16] = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes, scale_bytes, row_g


def unpack(packed: Tensor) -> np.ndarray:
    p = packed.numpy()
    return np.stack((p & 15, p >> 4), axis=-1).reshape(*p.shape[:-1], -1)


def check_encode(x: Tensor, g: Tensor | None = None) -> None:
    packed, scales, row_g = encode_nvfp4(x, g)
    codes, scale_bytes, wanted_g = encode_numpy(x.float().numpy(), None if g is None else g.numpy())
    np.testing.assert_array_equal(bits(row_g), wanted_g.view(np.uint8).reshape(bits(row_g).shape))
    np.testing.assert_array_equal(bits(scales), scale_bytes)
    np.testing.assert_array_equal(unpack(packed), codes)
    assert packed.is_contiguous() and scales.is_contiguous() and row_g.is_contiguous()


# ---- NVFP4 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spread", [0.0, 3.0, 12.0])
def test_encode_equals_ml_dtypes(dtype: torch.dtype, spread: float) -> None:
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(64, 512, generator=gen) * torch.exp(spread * torch.randn(64, 512 // 16, generator=gen)).repeat(
        1, 16
    ).reshape(64, 16, 32).transpose(1, 2).reshape(64, 512)
    check_encode(x.clamp(-6e4, 6e4).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("given", [True, False])
def test_encode_equals_torchao(dtype: torch.dtype, given: bool) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    gen = torch.Generator().manual_seed(2)
    x = torch.randn(256, 2048, generator=gen) * torch.exp(2 * torch.randn(256, 1, generator=gen))
    x = (x * torch.exp2(torch.randint(-5, 1, (256, 128), generator=gen)).repeat_interleave(16, 1)).to(dtype)
    own = torch.exp(torch.randn(256, generator=gen)) * 2e-3
    packed, scales, g = encode_nvfp4(x, own if given else None)
    their_scales, their_packed = nvfp4_quantize(x, 16, g.unsqueeze(1))
    same_rule = scales.float() >= 2.0**-6  # below, torchao lifts the scale to 2^-6
    assert same_rule.float().mean() > 0.9 and (not given or (scales.float() == 448).any())
    np.testing.assert_array_equal(bits(scales)[same_rule], bits(their_scales.reshape(scales.shape))[same_rule])
    blocks = (256, 128, 8)
    np.testing.assert_array_equal(
        packed.reshape(blocks).numpy()[same_rule], their_packed.reshape(blocks).numpy()[same_rule]
    )


def test_all_codes_and_all_scales_decode() -> None:
    """Every byte of two codes under every scale byte, against ml_dtypes' own tables."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(32).reshape(256, 32).view(torch.float8_e4m3fn)
    g = torch.full((256,), 1.7e-3)
    got = decode_nvfp4(packed, scales, g)
    codes = unpack(packed).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    factor = bits(scales).view(ml_dtypes.float8_e4m3fn).astype(np.float32).repeat(16, axis=1)
    wanted = codes * factor * np.float32(1.7e-3)
    np.testing.assert_array_equal(np.isnan(got.numpy()), np.isnan(wanted))
    number = ~np.isnan(wanted)
    assert number.sum() == 254 * 512
    np.testing.assert_array_equal(got.numpy().view(np.uint32)[number], wanted.view(np.uint32)[number])


def test_all_codes_by_hand() -> None:
    """The sixteen codes, low nibble first, written down."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    packed, scales, g = encode_nvfp4(torch.tensor(values), 1.0)
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert bits(scales).tolist() == [0x38] and g.item() == 1.0
    np.testing.assert_array_equal(bits(decode_nvfp4(packed, scales, g)), bits(torch.tensor(values)))


def test_ties_go_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor(ties + [6.0] + [-t for t in ties] + [-6.0])
    packed, scales, g = encode_nvfp4(x, 1.0)
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert decode_nvfp4(packed, scales, g).tolist() == wanted + [-w for w in wanted]
    above = torch.nextafter(x, 10 * x.sign())
    below = torch.nextafter(x, torch.zeros(()))
    above[7] = above[15] = 6.0
    below[7] = below[15] = 6.0
    up, down = (decode_nvfp4(*encode_nvfp4(side, 1.0))[:7].tolist() for side in (above, below))
    assert up == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] and down == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]


def test_scale_ties_saturation_and_subnormals() -> None:
    """Scales around every e4m3 value and every tie between two, the subnormal ones and the largest included."""
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (e4m3[1:] + e4m3[:-1]) / 2
    wanted_scales = torch.cat((e4m3, ties, torch.nextafter(ties, torch.tensor(1e9)), torch.tensor([449.0, 1e4])))
    x = torch.zeros(len(wanted_scales), 16)
    x[:, 3] = wanted_scales * 6
    x[:, 4] = -wanted_scales
    check_encode(x, torch.ones(len(wanted_scales)))
    scales = encode_nvfp4(x, 1.0)[1].float().flatten()
    assert scales[:127].tolist() == e4m3.tolist() and scales[-2:].tolist() == [448.0, 448.0]
    assert scales[127].item() == 0.0 and scales[128].item() == 2 * 2.0**-9  # ties of 0|1 and 1|2 steps


def test_saturation_keeps_the_sign() -> None:
    x = torch.full((1, 16), 1e6)
    x[0, 1::2] = -1e6
    packed, scales, g = encode_nvfp4(x, 1.0)
    assert packed.tolist() == [[0xF7] * 8] and scales.float().tolist() == [[448.0]]
    assert decode_nvfp4(packed, scales, g)[0, :2].tolist() == [2688.0, -2688.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_block_that_is_not_finite_shows(bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    clean = encode_nvfp4(x)
    x[1, 40] = bad
    packed, scales, g = encode_nvfp4(x)
    check_encode(x)
    assert bits(scales)[1, 2] == NAN_SCALE and packed[1, 16:24].tolist() == [0] * 8
    shown = decode_nvfp4(packed, scales, g).isnan()
    assert shown[1, 32:48].all() and shown.sum() == 16
    for got, wanted in zip((packed, scales, g), clean, strict=True):
        np.testing.assert_array_equal(bits(got)[[0, 2]], bits(wanted)[[0, 2]])


def test_rows_without_a_finite_value_and_rows_of_zeros() -> None:
    x = torch.zeros(4, 32)
    x[0] = math.nan
    x[1] = -0.0
    x[2, 5] = 1e-40
    packed, scales, g = encode_nvfp4(x)
    check_encode(x)
    assert g.tolist() == [1.0, 1.0, 2.0**-100, 1.0] and bits(scales)[0].tolist() == [NAN_SCALE] * 2
    assert packed[1:].unique().tolist() == [0]  # a zero scale has no signs
    assert decode_nvfp4(packed, scales, g)[1:].tolist() == torch.zeros(3, 32).tolist()


def test_minus_zero_stays_in_a_block_with_a_scale() -> None:
    x = torch.full((1, 16), -0.0)
    x[0, 0], x[0, 1] = 6.0, -1e-9
    decoded = decode_nvfp4(*encode_nvfp4(x, 1.0))
    assert decoded[0, 1:].signbit().all() and (decoded[0, 1:] == 0).all()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(width=32), min_size=48, max_size=48), st.sampled_from([None, 2.0**-100, 1e-3, 1.0, 3e38]))
def test_encode_of_any_floats_equals_ml_dtypes(values: list[float], g: float | None) -> None:
    with np.errstate(all="ignore"):
        check_encode(torch.tensor(values).reshape(1, 48), None if g is None else torch.full((1,), g))


@settings(max_examples=80, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.binary(min_size=4, max_size=4), st.floats(2.0**-60, 2.0**60, width=32))
def test_what_was_encoded_encodes_to_the_same_values(packed: bytes, scales: bytes, g: float) -> None:
    """Decoded values lie on the grid: encoding them again under a code of 6 gives the same values."""
    p = torch.tensor(list(packed), dtype=torch.uint8).reshape(1, 32)
    p[0, ::8] = p[0, ::8] & 0xF0 | 7  # the largest magnitude in every block fixes the block's scale
    s = (torch.tensor(list(scales), dtype=torch.uint8) % 126 + 1).reshape(1, 4).view(torch.float8_e4m3fn)
    g = 2.0 ** round(math.log2(g))  # a power of two: no rounding in between
    values = decode_nvfp4(p, s, torch.tensor([g]))
    packed2, scales2, _ = encode_nvfp4(values, torch.tensor([g]))
    np.testing.assert_array_equal(bits(scales2), bits(s))
    np.testing.assert_array_equal(bits(packed2), bits(p))


def test_decode_rounds_to_the_output_dtype_last() -> None:
    gen = torch.Generator().manual_seed(4)
    planes = encode_nvfp4(torch.randn(8, 256, generator=gen))
    exact = decode_nvfp4(*planes)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        np.testing.assert_array_equal(bits(decode_nvfp4(*planes, dtype=dtype)), bits(exact.to(dtype)))


def test_encode_takes_any_leading_shape_and_strides() -> None:
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    wide = torch.zeros(3, 2, 96).bfloat16()
    wide[..., :64] = x.transpose(0, 1)
    for got, wanted in zip(encode_nvfp4(wide[..., :64].transpose(0, 1)), encode_nvfp4(x), strict=True):
        assert got.shape[:2] == (2, 3)[: got.dim()]
        np.testing.assert_array_equal(bits(got), bits(wanted))
    assert [t.shape for t in encode_nvfp4(x[0, 0])] == [(32,), (4,), ()]
    assert [t.shape for t in encode_nvfp4(x[:0])] == [(0, 3, 32), (0, 3, 4), (0, 3)]


def test_nvfp4_refuses_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"\(2, 24\).*multiple of 16"):
        encode_nvfp4(torch.zeros(2, 24))
    with pytest.raises(TypeError, match="float64"):
        encode_nvfp4(torch.zeros(2, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        encode_nvfp4(torch.zeros(2, 32), torch.ones(3))
    for g in (0.0, -1.0, math.inf, math.nan, 2.0**-101):
        with pytest.raises(ValueError, match=r"2\^-100"):
            encode_nvfp4(torch.zeros(2, 32), g)
    packed, scales, g1 = encode_nvfp4(torch.zeros(2, 32))
    with pytest.raises(ValueError, match=r"\(2, 16\).*\(2, 1\)"):
        decode_nvfp4(packed, scales[:, :1], g1)
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        decode_nvfp4(packed, scales, g1.unsqueeze(1))
    with pytest.raises(TypeError, match="uint8"):
        decode_nvfp4(packed.int(), scales, g1)


# ---- routings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("shape", [(0, 8, 2), (1, 1, 1), (37, 64, 22), (200, 16, 4), (5, 32, 32)])
def test_routings_keep_their_promises(name: str, shape: tuple[int, int, int]) -> None:
    num_tokens, num_experts, top_k = shape
    ids, weights = ROUTINGS[name](*shape, torch.Generator().manual_seed(6))
    again, weights_again = ROUTINGS[name](*shape, torch.Generator().manual_seed(6))
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ids.shape == weights.shape == (num_tokens, top_k) and ids.is_contiguous()
    assert torch.equal(ids, again) and torch.equal(weights, weights_again)
    assert (weights > 0).all() and torch.allclose(weights.sum(1), torch.ones(num_tokens))
    assert ((ids >= -1) & (ids < num_experts)).all()
    assert name in ("holes", "one_expert", "nothing") or (ids >= 0).all()
    if name != "duplicates":
        for row in ids.tolist():
            legal = [i for i in row if i >= 0]
            assert len(legal) == len(set(legal))


def test_routings_have_the_shape_their_name_says() -> None:
    gen = torch.Generator().manual_seed(7)
    drawn = {name: fn(400, 64, 4, gen)[0] for name, fn in ROUTINGS.items()}
    load = {name: torch.bincount(ids[ids >= 0].long(), minlength=64) for name, ids in drawn.items()}
    assert load["uniform"].min() > 5 and load["uniform"].max() < 60
    assert load["zipf"].max() > 200 and load["zipf"].max() > 4 * load["zipf"].median()
    assert sorted(load["all_to_one"].tolist())[-5:] == [0, 400, 400, 400, 400]
    assert sorted(load["one_expert"].tolist())[-2:] == [0, 400] and (drawn["one_expert"][:, :-1] == -1).all()
    assert load["few_ranks"][16:].sum() == 0 and load["few_ranks"][:16].min() > 0
    assert load["empty_ranks"][:32].sum() == 0 and load["empty_ranks"][32:].min() > 0
    assert 0.3 < (drawn["holes"] < 0).float().mean() < 0.5 and (drawn["holes"] < 0).all(1).any()
    assert (drawn["nothing"] == -1).all()
    assert (drawn["duplicates"][:, 0] == drawn["duplicates"][:, -1]).all()


@pytest.mark.parametrize(("num_experts", "top_k", "num_ranks"), [(512, 22, 8), (512, 22, 16), (256, 8, 8), (20, 12, 1)])
def test_all_to_one_is_one_rank(num_experts: int, top_k: int, num_ranks: int) -> None:
    targets = set()
    for seed in range(20):
        ids, _ = ROUTINGS["all_to_one"](5, num_experts, top_k, torch.Generator().manual_seed(seed))
        goes = destinations(ids, num_experts, num_ranks)
        assert (goes.sum(dim=1) == 1).all() and (goes == goes[0]).all()
        targets.add(int(goes[0].int().argmax()))
    assert len(targets) > 1 or num_ranks == 1


@pytest.mark.parametrize("name", ROUTINGS)
def test_more_choices_than_experts(name: str) -> None:
    gen = torch.Generator().manual_seed(8)
    if name in ("duplicates", "one_expert", "nothing"):
        assert ROUTINGS[name](10, 3, 5, gen)[0].shape == (10, 5)
    else:
        with pytest.raises(ValueError, match=r"top_k=5.*3 experts"):
            ROUTINGS[name](10, 3, 5, gen)
    with pytest.raises(ValueError, match="num_experts=0"):
        ROUTINGS[name](10, 0, 1, gen)


# ---- dispatch and combine ----------------------------------------------------------------------------------------


def test_dispatch_delivers_each_token_once_to_each_of_its_ranks() -> None:
    config = Config(num_experts=7, top_k=3, hidden=32, max_tokens=5)  # ranks own 3, 2 and 2 experts
    ids = [
        torch.tensor([[0, 1, 2], [3, -1, 6], [5, 5, 4], [7, -2, -1]], dtype=torch.int32),
        torch.zeros(0, 3, dtype=torch.int32),
        torch.tensor([[6, 0, 2**31 - 1]], dtype=torch.int32),
    ]
    inputs = [
        {"ids": i, "extra0": torch.arange(2 * len(i), dtype=torch.uint8).reshape(-1, 2) + 1}
        | payload_planes(config, torch.randn(len(i), 32, generator=torch.Generator().manual_seed(9)))
        for i in ids
    ]
    goes_to = [[{0}, {1, 2}, {1, 2}, set()], [], [{0, 2}]]
    for rank in range(3):
        expected = reference_dispatch(config, inputs, rank)
        assert expected.num_tokens.tolist() == [4, 0, 1]
        for source in range(3):
            for token in range(5):
                wanted = token < len(goes_to[source]) and rank in goes_to[source][token]
                assert expected.valid[source, token].item() == wanted, (rank, source, token)
                for name, plane in expected.planes.items():
                    sent = inputs[source][name][token] if wanted else torch.zeros_like(plane[0, 0])
                    assert_same_bits(plane[source, token], sent.to(plane.dtype), f"{name}[{source}, {token}]")
    assert expected.planes["rows"].shape == (3, 5, 16) and expected.planes["global_scale"].shape == (3, 5)


def test_dispatch_refuses_with_the_numbers() -> None:
    config = Config(num_experts=4, top_k=2, hidden=32, max_tokens=2)
    with pytest.raises(ValueError, match=r"rank 1: ids are \(3, 2\), max_tokens=2"):
        reference_dispatch(config, [{"ids": torch.zeros(n, 2)} for n in (1, 3)], 0)
    with pytest.raises(ValueError, match="rank=2"):
        reference_dispatch(config, [{"ids": torch.zeros(1, 2)}] * 2, 2)
    with pytest.raises(ValueError, match="need 1 rows"):
        reference_dispatch(config, [{"ids": torch.zeros(1, 2), "rows": torch.zeros(2, 4)}], 0)


def test_planes_decode_to_the_rows() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10)).bfloat16()
    for payload in (NVFP4, BF16):
        config = Config(num_experts=4, top_k=2, hidden=64, max_tokens=4, payload=payload)
        planes = payload_planes(config, x)
        assert list(planes) == (["rows", "scales", "global_scale"] if payload == NVFP4 else ["rows"])
        assert (decode_planes(config, planes) - x.float()).abs().max() <= (0.5 if payload == NVFP4 else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_combine_is_the_ordered_fp32_sum(dtype: torch.dtype) -> None:
    """Against a loop over single elements in NumPy's fp32; rows nobody asked for hold NaN and must not be read."""
    gen = torch.Generator().manual_seed(11)
    outboxes = [torch.randn(3, 4, 8, generator=gen).to(dtype) for _ in range(3)]
    masks = [torch.rand(n, 3, generator=gen) < 0.6 for n in (4, 0, 3)]
    masks[0][1] = False
    for rank, outbox in enumerate(outboxes):
        for source, mask in enumerate(masks):
            outbox[source, len(mask) :] = math.nan
            outbox[source, : len(mask)][~mask[:, rank]] = math.nan
    results = reference_combine(outboxes, masks)
    assert [r.shape for r in results] == [(4, 8), (0, 8), (3, 8)] and results[0][1].tolist() == [0.0] * 8
    for source, mask in enumerate(masks):
        for token in range(len(mask)):
            for column in range(8):
                acc = np.float32(0)
                for rank in range(3):
                    if mask[token, rank]:
                        acc = np.float32(acc + np.float32(outboxes[rank][source, token, column].item()))
                assert results[source][token, column].item() == torch.tensor(acc).to(dtype).item()


def test_combine_depends_on_the_order_of_ranks() -> None:
    values = [1.0, 2.0**-24, 2.0**-24]  # from the left each small one is lost, from the right they count
    mask = [torch.ones(1, 3, dtype=torch.bool)] * 3
    forward = reference_combine([torch.full((3, 1, 8), v) for v in values], mask)
    backward = reference_combine([torch.full((3, 1, 8), v) for v in reversed(values)], mask)
    assert forward[0][0, 0].item() == 1.0
    assert backward[0][0, 0].item() == 1.0 + 2.0**-23


# ---- comparisons -----------------------------------------------------------------------------------------------------


def test_comparisons_name_the_place() -> None:
    a = torch.tensor([[1.0, 2.0], [0.0, 4.0]]).bfloat16()
    b = a.clone()
    assert_same_bits(a, b)
    assert_same_bits(a[:0], b[:0])
    b[1, 0] = -0.0
    with pytest.raises(AssertionError, match=r"rows\[1, 0\]: wanted -0.0, got 0.0; 1 of 4"):
        assert_same_bits(a, b, "rows")
    with pytest.raises(AssertionError, match=r"\(2, 2\).*\(1, 2\)"):
        assert_same_bits(a, b[:1])
    with pytest.raises(AssertionError, match="bfloat16"):
        assert_same_bits(a, b.float())
    with pytest.raises(AssertionError, match=r"\(2, 1\)"):
        assert_within(a, a.double(), torch.ones(2, 1).double())
    with pytest.raises(AssertionError, match=r"out\[0, 1\]: wanted 2.5 within 0.25, got 2.0"):
        assert_within(a, a.double() + torch.tensor([0.25, 0.5]), torch.full((2, 2), 0.25).double())
