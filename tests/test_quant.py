"""The NVFP4 kernels: the bits of the reference and of independent code, and values that are not finite show."""

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
from ep_a2a import BF16, FP32, NVFP4
from ep_a2a.quant import decode, encode
from ep_a2a.testing import assert_same_bits, decode_planes
from ep_a2a.testing import decode_nvfp4 as reference_decode
from ep_a2a.testing import encode_nvfp4 as reference_encode
from tests import bodies
from tests.bodies import Case

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAN_SCALE = 0x7F


def encode_nvfp4(x: Tensor, g: Tensor | None = None) -> tuple[Tensor, ...]:
    return encode(x, NVFP4, g)


def decode_nvfp4(packed: Tensor, scales: Tensor, g: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return decode((packed, scales, g), NVFP4, dtype)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_encodes_as_reference(x: Tensor, g: Tensor | None = None) -> None:
    found, wanted = encode_nvfp4(x, g), reference_encode(x, g)
    if g is not None:
        wanted = (*wanted[:2], g)  # comes back as given
    for name, one, other in zip(("packed", "scales", "global_scale"), found, wanted, strict=True):
        assert_same_bits(one, other, name)
        assert one.is_contiguous()


def spread_rows(num_rows: int, hidden: int, spread: float, dtype: torch.dtype, seed: int = 3) -> Tensor:
    """Rows whose blocks differ in size by factors of about exp(spread)."""
    gen = generator(seed)
    blocks = torch.randn(num_rows, hidden // 16, 16, generator=gen)
    blocks *= torch.exp(spread * torch.randn(num_rows, hidden // 16, 1, generator=gen))
    return blocks.reshape(num_rows, hidden).clamp(-6e4, 6e4).to(dtype)


# ---- against the reference ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [16, 48, 512, 2048, 2880, 4096, 7168])
@pytest.mark.parametrize("spread", [0.0, 3.0, 12.0])
def test_encode(dtype, hidden, spread):
    assert_encodes_as_reference(spread_rows(17, hidden, spread, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [2.0**-100, 1e-6, 0.37, 1.0, 3e4, 3e38])
def test_encode_with_a_global_scale(dtype, g):
    x = spread_rows(9, 512, 4.0, dtype)
    assert_encodes_as_reference(x, torch.tensor(g))
    assert_encodes_as_reference(x, (g * (1 + torch.rand(9, generator=generator()))).clamp(max=3.4e38))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encode_every_value_of_16_bits(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_encodes_as_reference(every.reshape(128, 512))  # NaN and Inf among them
    finite = torch.where(every.float().isfinite(), every, torch.zeros_like(every))
    assert_encodes_as_reference(finite.reshape(128, 512))
    assert_encodes_as_reference(finite[torch.randperm(2**16, generator=generator())].reshape(256, 256))
    assert_encodes_as_reference(finite.reshape(128, 512), torch.tensor(1.0))


def test_encode_ties():
    magnitudes = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 5.5])
    for step in (0.0, 2.0**-22, -(2.0**-22)):
        row = magnitudes * (1 + step)
        row[14] = 6  # the block scale stays 1
        x = torch.stack([row, -row])
        assert_encodes_as_reference(x, torch.tensor(1.0))
        scales = encode_nvfp4(x, torch.tensor(1.0))[1]
        assert (scales.float() == 1).all()


def test_encode_scale_ties_and_subnormals():
    every = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (every[:-1] + every[1:]) / 2
    wanted = torch.cat([every, between, between * (1 + 2.0**-20), between * (1 - 2.0**-20), torch.tensor([448.0, 1e6])])
    x = (wanted * 6)[:, None].expand(-1, 16).contiguous()
    assert_encodes_as_reference(x, torch.tensor(1.0))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(width=32), min_size=64, max_size=64), st.sampled_from([None, 2.0**-100, 1e-3, 1.0, 3e38]))
def test_encode_any_floats(values, g):
    assert_encodes_as_reference(torch.tensor(values).reshape(2, 32), None if g is None else torch.tensor(g))


def test_encode_shapes():
    x = spread_rows(24, 64, 2.0, torch.bfloat16)
    assert_encodes_as_reference(x.reshape(2, 3, 4, 64))
    assert_encodes_as_reference(x[0])
    assert_encodes_as_reference(x[:0])
    assert_encodes_as_reference(torch.zeros(3, 64))
    assert_encodes_as_reference(-torch.zeros(3, 64))
    assert_encodes_as_reference(x.reshape(4, 6, 64), torch.rand(4, 6, generator=generator()) + 0.1)
    unaligned = spread_rows(1, 528, 2.0, torch.bfloat16)[0, 1:513].reshape(1, 512)  # starts on 2 bytes
    assert_encodes_as_reference(unaligned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [2.0**-100, 2.0**-20, 0.37, 1.0, 3e4, 1e30])
def test_decode_every_code_and_scale(dtype, g):
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # all pairs of codes ...
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)  # ... by all scales
    rows = torch.tensor(g).expand(256).contiguous()
    for given_scale in (torch.tensor(g), torch.tensor([g]), rows):
        got = decode_nvfp4(codes, scales, given_scale, dtype)
        wanted = reference_decode(codes, scales, rows, dtype)
        assert_same_bits(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert torch.equal(got.isnan(), wanted.isnan()) and got.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_of_all_widths(dtype):
    for hidden in (16, 48, 512, 2880, 7168):
        planes = reference_encode(spread_rows(5, hidden, 3.0, torch.float32))
        assert_same_bits(decode_nvfp4(*planes, dtype), reference_decode(*planes, dtype), f"hidden {hidden}")
    deep = [plane.reshape(5, 1, *plane.shape[1:]) for plane in planes]
    assert_same_bits(decode_nvfp4(*deep, dtype), reference_decode(*deep, dtype))
    empty = [plane[:0] for plane in planes]
    assert decode_nvfp4(*empty, dtype).shape == (0, 7168)


# ---- against independent code ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.0, 6.0])
def test_encode_equals_ml_dtypes(dtype, spread):
    x = spread_rows(64, 512, spread, dtype)
    packed, scales, g = encode_nvfp4(x)
    blocks = x.float().numpy().reshape(64, 32, 16)
    row_g = (np.abs(blocks).max(axis=(1, 2)) / np.float32(2688)).astype(np.float32)
    np.testing.assert_array_equal(g.numpy(), row_g)
    quotient = np.minimum(np.abs(blocks).max(axis=2) / np.float32(6) / row_g[:, None], np.float32(448))
    scale = quotient.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy(), scale.view(np.uint8))
    scale = scale.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = blocks * (np.float32(1) / row_g[:, None] / scale)[..., None]
        codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = np.where(scale[..., None] > 0, codes, 0).reshape(64, 512)
    np.testing.assert_array_equal(packed.numpy(), codes[:, ::2] | codes[:, 1::2] << 4)


def test_decode_equals_ml_dtypes():
    planes = encode_nvfp4(spread_rows(32, 512, 3.0, torch.float32))
    packed = planes[0].numpy()
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(32, 512).view(ml_dtypes.float4_e2m1fn)
    scales = planes[1].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exact = codes.astype(np.float32) * scales.repeat(16, axis=1)
    wanted = exact * planes[2].numpy()[:, None]
    np.testing.assert_array_equal(decode_nvfp4(*planes).numpy(), wanted)
    rounded = decode_nvfp4(*planes, torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(rounded, wanted.astype(ml_dtypes.bfloat16).view(np.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_encode_equals_torchao(dtype):
    pytest.importorskip("torchao", reason="needs torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    x = spread_rows(128, 1024, 1.0, dtype)
    packed, scales, g = encode_nvfp4(x)
    their_scales, their_packed = nvfp4_quantize(x, 16, g.unsqueeze(1))
    same_rule = scales.float() >= 2.0**-6  # below, torchao lifts the scale to 2^-6
    assert same_rule.float().mean() > 0.99
    their_scales = their_scales.reshape(scales.shape).view(torch.uint8)
    assert_same_bits(scales.view(torch.uint8)[same_rule], their_scales[same_rule], "scales")
    assert_same_bits(packed.reshape(128, 64, 8)[same_rule], their_packed.reshape(128, 64, 8)[same_rule], "packed")


# ---- what is refused, what shows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.ones(2, 24),), ValueError, r"24.*16"),
        ((torch.ones(2, 32).double(),), TypeError, "float64"),
        ((torch.ones(32, 2).t(),), ValueError, "contiguous"),
        ((torch.ones(2, 32), torch.ones(3)), ValueError, r"global_scale.*\[3\].*2"),
        ((torch.ones(2, 32), torch.ones(2).double()), TypeError, "global_scale.*float64"),
        (([1.0] * 16,), TypeError, "list"),
    ],
)
def test_encode_refuses(arguments, error, text):
    with pytest.raises(error, match=text):
        encode_nvfp4(*arguments)


def test_decode_refuses():
    packed, scales, g = encode_nvfp4(torch.ones(2, 32))
    for arguments, error, text in (
        ((packed.view(torch.int8), scales, g), TypeError, "int8.*uint8"),
        ((packed, scales.view(torch.uint8), g), TypeError, "uint8.*float8_e4m3fn"),
        ((packed, scales[:, :1].contiguous(), g), ValueError, "2, 1"),
        ((packed, scales, torch.ones(3)), ValueError, r"\[3\]"),
        ((packed, scales, g, torch.float64), TypeError, "float64"),
    ):
        with pytest.raises(error, match=text):
            decode_nvfp4(*arguments)


@pytest.mark.parametrize("payload", [NVFP4, BF16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_show_where_they_were_sent(payload, dtype, bad):
    def body(group):
        case = Case(payload=payload, combine=FP32, num_experts=4, top_k=1, max_tokens=4)
        with ep_a2a.connect(case.config(), group=group) as a2a:
            x = torch.ones(4, 512, dtype=dtype)
            x[1, 37] = bad
            ids = torch.full((4, 1), 3, dtype=torch.int32)
            received, handle = ep_a2a.dispatch(a2a, x, ids, torch.ones(4, 1))
            if a2a.rank == 1:
                values = decode_planes(a2a.config, bodies.received_planes(received))
                shows = values.isnan() if payload == NVFP4 or math.isnan(bad) else values == bad
                wanted = torch.zeros(2, 4, 512, dtype=torch.bool)
                wanted[:, 1, slice(32, 48) if payload == NVFP4 else 37] = True
                assert torch.equal(shows, wanted) and values[~wanted].isfinite().all()
                assert payload == BF16 or (received.scales.view(torch.uint8)[:, 1, 2] == NAN_SCALE).all()
                a2a.outbox().copy_(values)
            out = ep_a2a.combine(a2a, handle)
            assert not out[1, 37].isfinite() and out[[0, 2, 3]].isfinite().all()
            bodies.one_round(a2a, case, 1)

    ep_a2a.local(2).run(body)


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, 2.0**-101, float("nan"), float("inf"), -float("inf")])
def test_a_global_scale_that_is_none_shows(scale):
    rows, scales, g = encode(torch.ones(2, 32), NVFP4, torch.tensor(scale))
    assert (scales.view(torch.uint8) == 0x7F).all()
    assert (rows == 0).all()
    assert decode((rows, scales, g), NVFP4).isnan().all()
