"""Activations against formulas in NumPy, and plain experts with every activation, bias, order and intermediate against
float64 within the derived bounds; planted mistakes exceed them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from ep_a2a.config import Config
from ep_a2a.experts import Activation, ExpertWeights, GateOrder, LocalExperts
from ep_a2a.experts.activations import GELU_TANH, RELU2, SILU, swigluoai
from ep_a2a.layout import BF16, FP32, MXFP4, NVFP4, Format
from ep_a2a.testing import MoEReference, assert_same_bits, assert_within, encode_format, reference_moe
from ep_a2a.testing.intermediate import quantization_error, quantized

TIGHT = swigluoai(alpha=1.1, beta=0.5, limit=0.75)  # the limit is met often
ACTIVATIONS = (SILU, GELU_TANH, swigluoai(), TIGHT, RELU2)
INTERMEDIATES = (BF16, NVFP4, MXFP4)
NUM_TOKENS, HIDDEN, INNER, NUM_EXPERTS, TOP_K = 6, 128, 64, 4, 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower with threads, by far where other processes run."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x))), 1 / (1 + np.exp(-np.abs(x))))


def gpt_oss(alpha: float, beta: float, limit: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def formula(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        gate, up = np.minimum(gate, limit), np.maximum(np.minimum(up, limit), -limit)
        return gate * sigmoid(alpha * gate) * (up + beta)

    return formula


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x / 2 (1 + tanh v) = x sigmoid(2 v), which does not cancel."""
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


FORMULAS: dict[Activation, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    SILU: lambda gate, up: gate * sigmoid(gate) * up,
    GELU_TANH: lambda gate, up: gelu_tanh(gate) * up,
    swigluoai(): gpt_oss(1.702, 1.0, 7.0),
    TIGHT: gpt_oss(1.1, 0.5, 0.75),
    RELU2: lambda gate, up: np.where(gate < 0, 0 * gate, gate**2),
}


def apply(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate, up) if activation.num_matrices == 2 else activation(gate)


# ---- functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_activation_equals_its_formula(activation: Activation) -> None:
    sizes = torch.tensor([0.0, 1e-30, 1e-3, 0.5, 0.75, 1, 6.999, 7, 7.001, 20, 87, 88.8, 104, 1e3, 1e9, 1e18])
    ends = torch.cat((sizes, -sizes, torch.linspace(-12, 12, 997))).double()
    gate, up = (v.flatten() for v in torch.meshgrid(ends, torch.cat((sizes, -sizes)).double(), indexing="ij"))
    wanted = FORMULAS[activation](gate.numpy(), up.numpy())
    got = apply(activation, gate, up)
    near = 1e-13 * gate.abs() * (1 + up.abs()) if activation is GELU_TANH else torch.zeros(())  # 1 + tanh cancels
    assert ((got - torch.from_numpy(wanted)).abs() <= 1e-12 * got.abs() + near + 1e-300).all()
    single = apply(activation, gate.float(), up.float())
    assert single.dtype == torch.float32
    assert single.isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_nan_and_inf_show_unless_a_limit_holds_them(activation: Activation) -> None:
    nan, inf = math.nan, math.inf
    values = torch.tensor([nan, 1.0, inf, 1.0, 1.0])
    up = torch.tensor([1.0, nan, 1.0, inf, -inf])
    got = apply(activation, values, up)
    assert got[0].isnan()
    if activation.num_matrices == 1:
        assert got[1:].tolist() == [1.0, inf, 1.0, 1.0]
        return
    assert got[1].isnan()
    limit, one = activation.limit, activation(torch.ones(3), torch.tensor([1e9, -1e9, 0]))
    if limit == inf:
        assert got[2] == inf and got[3] == inf and got[4] == -inf
    else:
        assert got[2] == activation(torch.tensor(limit), torch.tensor(1.0))
        assert got[3:].tolist() == one[:2].tolist()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_slopes_and_roundings_hold_and_are_not_idle(activation: Activation) -> None:
    gen = torch.Generator().manual_seed(1)
    curve, alpha = activation.curve, activation.alpha
    x = torch.cat((torch.randn(200_000, generator=gen) * 3, torch.linspace(-110, 30, 50_001))).double()
    reach = torch.rand(x.shape, generator=gen).double() ** 8
    step = reach * torch.where(torch.rand(x.shape, generator=gen) < 0.5, -1.0, 1.0)
    f, moved = curve.value(x, alpha), curve.value(x + step, alpha)
    change, allowed = (moved - f).abs(), curve.slope(x, reach) * reach
    assert (change <= allowed + 1e-15 * (x.abs() + f.abs())).all()
    assert (change / allowed)[f.abs() > 1e-6].max() > 0.95
    single = x.float()
    exact = curve.value(single.double(), alpha)
    units = curve.roundings(single.double(), torch.zeros(()), alpha, exact.abs())
    error = (curve.value(single, alpha).double() - exact).abs()
    assert (error <= units * 2.0**-24 + 2.0**-119 / alpha).all()
    assert (error / (units * 2.0**-24))[exact.abs() > 1e-6].max() > 0.1


def test_swigluoai_is_compared_by_value_and_refuses_what_is_not_a_limit() -> None:
    assert swigluoai() == swigluoai(alpha=1.702, beta=1.0, limit=7.0) != swigluoai(limit=6.0)
    assert repr(swigluoai()) == "swigluoai(alpha=1.702, beta=1.0, limit=7.0)"
    x = torch.linspace(-9, 9, 101)
    assert_same_bits(swigluoai(alpha=1.0, beta=0.0, limit=math.inf)(x, x), SILU(x, x))
    for wrong in ({"alpha": 0.0}, {"limit": 0.0}, {"limit": math.nan}, {"beta": math.inf}, {"alpha": math.inf}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
            swigluoai(**wrong)


# ---- a layer -----------------------------------------------------------------------------------------------------


def make_weights(activation: Activation, biases: bool = True, fmt: Format = NVFP4, seed: int = 2) -> ExpertWeights:
    gen = torch.Generator().manual_seed(seed)
    rows = activation.num_matrices * INNER
    w13 = 1.5 * torch.randn(NUM_EXPERTS, rows, HIDDEN, generator=gen) / HIDDEN**0.5
    w13[..., 1] = -w13[..., 0]  # large equal values in both columns cancel, and leave errors
    w2 = torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=gen) / INNER**0.5
    b13 = torch.randn(NUM_EXPERTS, rows, generator=gen).bfloat16()
    b2 = torch.randn(NUM_EXPERTS, HIDDEN, generator=gen)
    return ExpertWeights.quantize(w13, w2, *((b13, b2) if biases else ()), format=fmt)


def reordered(weights: ExpertWeights, order: GateOrder) -> ExpertWeights:
    """The same weights as a checkpoint of another order has them: row by row, from gate rows first."""
    gate, up = torch.arange(INNER), torch.arange(INNER, 2 * INNER)
    source = {
        GateOrder.GATE_FIRST: [*gate, *up],
        GateOrder.UP_FIRST: [*up, *gate],
        GateOrder.INTERLEAVED: [row for pair in zip(gate, up) for row in pair],
    }[order]
    index = torch.tensor([int(row) for row in source])
    rows = {n: t.view(torch.uint8)[:, index] for n, t in weights.tensors().items() if n in ("w13", "w13_scales")}
    rows["w13_scales"] = rows["w13_scales"].view(weights.w13_scales.dtype)
    if weights.b13 is not None:
        rows["b13"] = weights.b13[:, index]
    return dataclasses.replace(weights, **rows, gate_order=order)


def make_tokens(seed: int = 3) -> SimpleNamespace:
    gen = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=gen)[:TOP_K] for _ in range(NUM_TOKENS)]).int()
    weights = torch.rand(NUM_TOKENS, TOP_K, generator=gen) + 0.2
    rows = torch.randn(NUM_TOKENS, HIDDEN, generator=gen).bfloat16()
    return SimpleNamespace(
        payload=BF16,
        hidden=HIDDEN,
        rows=rows.unsqueeze(0),
        ids=ids.unsqueeze(0),
        weights=weights.unsqueeze(0),
        valid=torch.ones(1, NUM_TOKENS, dtype=torch.bool),
    )


def run(experts: LocalExperts, tokens: SimpleNamespace) -> Tensor:
    outbox = torch.full((1, NUM_TOKENS, HIDDEN), 77.0)
    experts(tokens, outbox)
    return outbox[0]


def reference(
    weights: ExpertWeights, activation: Activation, intermediate: Format, tokens: SimpleNamespace
) -> MoEReference:
    config = Config(
        num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=NUM_TOKENS, payload=BF16, combine=FP32
    )
    planes = tokens.rows[0].float(), tokens.ids[0], tokens.weights[0]
    return reference_moe(config, *planes, weights.decoded, 1, activation, intermediate)


def imitate(weights: ExpertWeights, activation: Activation, intermediate: Format, tokens: SimpleNamespace) -> Tensor:
    """A correct implementation of other habits: sums run from the left, the formulas in NumPy's fp32."""
    out = torch.zeros(NUM_TOKENS, HIDDEN)
    for token in range(NUM_TOKENS):
        for k in range(TOP_K):
            w13, w2, b13, b2 = (t.numpy() for t in weights.decoded(int(tokens.ids[0, token, k])))
            z = np.c_[b13, w13 * tokens.rows[0, token].float().numpy()].cumsum(axis=1, dtype=np.float32)[:, -1]
            m = torch.from_numpy(FORMULAS[activation](z[:INNER], z[-INNER:]).astype(np.float32))
            q = m.bfloat16().double() if intermediate == BF16 else decoded(m, intermediate)
            y = np.c_[w2 * q.float().numpy(), b2].cumsum(axis=1, dtype=np.float32)[:, -1]
            out[token] += tokens.weights[0, token, k] * torch.from_numpy(y)
    return out


def decoded(m: Tensor, fmt: Format) -> Tensor:
    """NVFP4 or MXFP4 and back, from the definition, in float64."""
    packed, scales, *g = encode_format(m, fmt)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(m.shape)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[(codes & 7).long()]
    values = torch.where(codes > 7, -values, values)
    values = values * scales.double().repeat_interleave(16 if fmt == NVFP4 else 32, dim=-1)
    return values * g[0].double().unsqueeze(-1) if g else values


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("intermediate", INTERMEDIATES, ids=repr)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_correct_layers_are_within_both_bounds(activation: Activation, intermediate: Format, biases: bool) -> None:
    weights, tokens = make_weights(activation, biases, NVFP4 if biases else MXFP4), make_tokens()
    wanted = reference(weights, activation, intermediate, tokens)
    for got in (
        run(LocalExperts(weights, 0, activation, intermediate), tokens),
        imitate(weights, activation, intermediate, tokens),
    ):
        assert_within(got, wanted.out, wanted.bound)
        assert_within(got, wanted.out, wanted.likely_bound)
    if intermediate == BF16:
        assert ((got.double() - wanted.out).abs() / wanted.likely_bound).max() > 0.02, "a bound this wide tests nothing"


@pytest.mark.parametrize("kind", ["bound", "likely_bound"])
@pytest.mark.parametrize("intermediate", [NVFP4, MXFP4], ids=repr)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_codes_that_flip_stay_within_the_bounds(activation: Activation, intermediate: Format, kind: str) -> None:
    """An exact layer but for first products that are off by all that fp32 may do, or by what it is likely to do."""
    gen = torch.Generator().manual_seed(7)
    used = 0.0
    for seed in range(4):
        weights, tokens = make_weights(activation, seed=seed), make_tokens(seed)
        tokens.rows[..., :2] = 2048.0
        wanted = reference(weights, activation, intermediate, tokens)
        out = torch.zeros_like(wanted.out)
        for token, k in np.ndindex(NUM_TOKENS, TOP_K):
            w13, w2, b13, b2 = (t.double() for t in weights.decoded(int(tokens.ids[0, token, k])))
            x = tokens.rows[0, token].double()
            noise = torch.randn(b13.shape, generator=gen).double()
            unit = noise.sign() * HIDDEN if kind == "bound" else noise * HIDDEN**0.5
            z = w13 @ x + b13 + unit * 2.0**-24 * (w13.abs() @ x.abs() + b13.abs())
            q = decoded(activation(*z.float().unsqueeze(0).chunk(activation.num_matrices, dim=1)), intermediate)[0]
            out[token] += float(tokens.weights[0, token, k]) * (w2 @ q + b2)
        bound = getattr(wanted, kind)
        assert_within(out, wanted.out, bound)
        used = max(used, float(((out - wanted.out).abs() / bound).max()))
    assert used > 0.01, "no code flipped, or the bound is wide"


@pytest.mark.parametrize("intermediate", INTERMEDIATES, ids=repr)
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a.num_matrices == 2], ids=repr)
def test_gate_orders_give_the_same_bits(activation: Activation, intermediate: Format) -> None:
    weights, tokens = make_weights(activation, fmt=MXFP4 if intermediate == MXFP4 else NVFP4), make_tokens()
    wanted = run(LocalExperts(weights, 0, activation, intermediate), tokens)
    for order in GateOrder:
        assert_same_bits(
            run(LocalExperts(reordered(weights, order), 0, activation, intermediate), tokens), wanted, order.name
        )
    w13, w2 = torch.randn(1, 32, 16, generator=torch.Generator().manual_seed(1)), torch.zeros(1, 16, 16)
    b13 = torch.arange(32.0).unsqueeze(0)
    encoded = ExpertWeights.quantize(w13, w2, b13, gate_order=GateOrder.INTERLEAVED)
    assert encoded.decoded(0)[2].tolist() == [*range(0, 32, 2), *range(1, 32, 2)]
    assert_same_bits(encoded.decoded(0)[0][16], ExpertWeights.quantize(w13, w2).decoded(0)[0][1])


def test_mxfp4_weights_decode_as_ml_dtypes_says_from_the_layout_of_gpt_oss() -> None:
    """[E, 2I, H/32, 16] bytes, [E, 2I, H/32] exponents, rows gate, up, gate, up."""
    gen = torch.Generator().manual_seed(6)
    blocks = torch.randint(256, (2, 128, 3, 16), generator=gen, dtype=torch.uint8)
    exponents = torch.randint(110, 135, (2, 128, 3), generator=gen, dtype=torch.uint8)
    codes2, scales2 = blocks[:, :96, :2].flatten(2), exponents[:, :96, :2].contiguous().view(torch.float8_e8m0fnu)
    scales = exponents.view(torch.float8_e8m0fnu)
    weights = ExpertWeights(
        blocks.flatten(2), scales, None, codes2, scales2, None, format=MXFP4, gate_order=GateOrder.INTERLEAVED
    )
    assert (weights.num_experts, weights.hidden, weights.intermediate, weights.num_matrices) == (2, 96, 64, 2)
    for expert in range(2):
        bytes_ = blocks[expert].numpy()
        codes = np.stack((bytes_ & 15, bytes_ >> 4), -1).reshape(128, 3, 32).view(ml_dtypes.float4_e2m1fn)
        scale = exponents[expert].numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        wanted = (codes.astype(np.float32) * scale[..., None]).reshape(128, 96)
        w13, w2, b13, b2 = weights.decoded(expert)
        np.testing.assert_array_equal(w13.numpy(), np.concatenate((wanted[::2], wanted[1::2])))
        np.testing.assert_array_equal(w2.numpy(), wanted[:96, :64])
        assert not b13.any() and not b2.any()


def mistakes(
    weights: ExpertWeights, activation: Activation, intermediate: Format
) -> dict[str, tuple[ExpertWeights, Activation, Format]]:
    """What one wrong weight, parameter or format would make of a layer; only those that the activation has."""
    change = dataclasses.replace
    found = {
        "b13 forgotten": (change(weights, b13=None), activation, intermediate),
        "b2 forgotten": (change(weights, b2=None), activation, intermediate),
    }
    found |= {f"kept as {other}": (weights, activation, other) for other in INTERMEDIATES if other != intermediate}
    others = {}
    if activation.num_matrices == 2:
        for order in (GateOrder.UP_FIRST, GateOrder.INTERLEAVED):
            found[f"taken for {order.name}"] = (change(weights, gate_order=order), activation, intermediate)
        others["another function"] = GELU_TANH if activation == SILU else SILU
    else:
        others["not squared"] = change(activation, curve=change(activation.curve, value=lambda x, alpha: x.relu()))
    if activation.limit < math.inf:
        others["another limit"] = change(activation, limit=0.875 * activation.limit)
        others["no limit"] = change(activation, limit=math.inf)
        others["no beta"] = change(activation, beta=0.0)
        others["no alpha"] = change(activation, alpha=1.0)
    return found | {name: (weights, other, intermediate) for name, other in others.items()}


@pytest.mark.parametrize("intermediate", INTERMEDIATES, ids=repr)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_planted_mistakes_exceed_the_worst_case_bound(activation: Activation, intermediate: Format) -> None:
    weights, tokens = make_weights(activation), make_tokens()
    tokens.rows[0, 1] *= 8  # one token meets the widest limit
    wanted = reference(weights, activation, intermediate, tokens)
    assert_within(run(LocalExperts(weights, 0, activation, intermediate), tokens), wanted.out, wanted.likely_bound)
    for name, (wrong_weights, wrong, stored) in mistakes(weights, activation, intermediate).items():
        got = run(LocalExperts(wrong_weights, 0, wrong, stored), tokens)
        with pytest.raises(AssertionError, match=rf"{name}\["):
            assert_within(got, wanted.out, wanted.bound, name)


@pytest.mark.parametrize("intermediate", [NVFP4, MXFP4], ids=repr)
def test_a_single_wrong_code_exceeds_the_bound(intermediate: Format) -> None:
    """One code of an intermediate, moved to its neighbour where no boundary is near."""
    weights, tokens = make_weights(SILU), make_tokens()
    wanted = reference(weights, SILU, intermediate, tokens)
    got = run(LocalExperts(weights, 0, SILU, intermediate), tokens).double()
    expert, weight = int(tokens.ids[0, 0, 0]), float(tokens.weights[0, 0, 0])
    w13, w2, b13, _ = (t.double() for t in weights.decoded(expert))
    m = SILU(*(w13 @ tokens.rows[0, 0].double() + b13).chunk(2))
    step = 0.5 * m[:16].abs().max() / 8  # the smallest one, or less
    moved = got.clone()
    moved[0] += weight * step * w2[:, 0]
    with pytest.raises(AssertionError, match=r"out\[0, "):
        assert_within(moved, wanted.out, wanted.likely_bound)


# ---- the error of a re-quantised intermediate --------------------------------------------------------------------


def rows_to_quantize(kind: str, gen: torch.Generator) -> Tensor:
    m = torch.randn(16, 64, generator=gen).double()
    if kind == "wide":
        m *= torch.exp(6 * torch.randn(16, 64, generator=gen)).double()
    if kind == "small":
        m *= 1e-5
    if kind == "on boundaries":  # codes, scales and global scale lie on or beside the edges of their roundings
        m = (m * 8).round() / 4
        m[:, ::16] = 6.0 * (1 + torch.arange(4) / 16 + torch.arange(16).unsqueeze(1) % 2 * 1e-7)
        m[:, 0] = 2688.0
        m[:, 32] = 8.0 * (1 + torch.arange(-8, 8) * 2.0**-24)
    if kind == "zeros":
        m[:8] = 0
        m[8:, 16:] *= 1e-9
    return m


@pytest.mark.parametrize("relative", [0.0, 1e-7, 1e-4, 1e-2, 1.0, 4.0])
@pytest.mark.parametrize("kind", ["random", "wide", "small", "on boundaries", "zeros"])
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=repr)
def test_quantised_values_move_no_farther_than_said(fmt: Format, kind: str, relative: float) -> None:
    gen = torch.Generator().manual_seed(5)
    m = rows_to_quantize(kind, gen)
    assert torch.equal(quantized(m, fmt).float(), decoded(m.float(), fmt).float())
    share = torch.rand(m.shape, generator=gen).double().clamp(min=0.5 if relative > 1 else 0)  # or all may be 0
    reach = relative * m.abs().amax(dim=-1, keepdim=True) * share
    allowed, unmoved = quantization_error(m, reach, fmt), decoded(m.float(), fmt)
    used = torch.zeros_like(m)
    for trial in range(90):
        direction = torch.rand(m.shape, generator=gen).double() * 2 - 1
        if trial % 3:
            direction = direction.sign() if trial % 3 == 1 else direction.sign()[:, :1] * m.sign()
        moved = (decoded((m + reach * direction).float(), fmt) - unmoved).abs()
        assert (moved <= allowed).all(), trial
        used = torch.maximum(used, moved / allowed.clamp(min=1e-300))
    if relative in (1e-4, 1e-2) and kind == "random":
        assert used.max() > 0.9, "a bound this wide tests nothing"
    if kind == "random" and relative == 1e-7:
        assert (allowed > 1e-5).double().mean() < 0.01, "far from a boundary nothing moves"


def test_nan_in_an_intermediate_shows() -> None:
    m = torch.ones(2, 32).double()
    m[1, 3] = math.nan
    error = quantization_error(m, 1e-6 * m.abs(), NVFP4)
    assert error[1].isnan()[:16].all() and not error[0].isnan().any()
    weights, tokens = make_weights(RELU2), make_tokens()
    tokens.rows[0, 2, 5] = math.nan
    wanted = reference(weights, RELU2, NVFP4, tokens)
    got = run(LocalExperts(weights, 0, RELU2, NVFP4), tokens)
    assert_within(got, wanted.out, wanted.likely_bound)
    assert got[2].isnan().all() and got[[0, 1, 3, 4, 5]].isfinite().all()


# ---- what is refused, what is kept ---------------------------------------------------------------------------------


def test_biases_orders_and_formats_are_checked() -> None:
    weights = make_weights(SILU)
    with pytest.raises(ValueError, match=r"relu2 needs w13 with 1 x intermediate = 64 rows, it has 128"):
        LocalExperts(weights, 0, RELU2)
    with pytest.raises(ValueError, match=r"silu needs w13 with 2 x intermediate = 128 rows, it has 64"):
        LocalExperts(make_weights(RELU2), 0)
    with pytest.raises(ValueError, match=r"intermediate=FP32 of 64 values: must be BF16"):
        LocalExperts(weights, 0, SILU, FP32)
    with pytest.raises(ValueError, match="format=BF16: must be one of NVFP4, MXFP4"):
        dataclasses.replace(weights, format=BF16)
    with pytest.raises(ValueError, match="format=FP32: must be one of NVFP4, MXFP4"):
        ExpertWeights.quantize(torch.zeros(1, 64, 32), torch.zeros(1, 32, 32), format=FP32)
    with pytest.raises(TypeError, match=r"w13_scales is torch\.float8_e4m3fn: must be torch\.float8_e8m0fnu for MXFP4"):
        dataclasses.replace(weights, format=MXFP4)
    with pytest.raises(TypeError, match=r"w13_global is torch\.float32: must be None for MXFP4"):
        dataclasses.replace(make_weights(SILU, fmt=MXFP4), w13_global=weights.w13_global)
    scales, codes = torch.ones(1, 64, 1).to(torch.float8_e8m0fnu), torch.zeros(1, 64, 24, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"hidden=48, intermediate=32: both must be multiples of 32"):
        ExpertWeights(codes, scales, None, codes[:, :48, :16], scales, None, format=MXFP4)
    with pytest.raises(ValueError, match=r"intermediate=MXFP4 of 48 values: must be .*MXFP4 \(a multiple of 32\)"):
        LocalExperts(ExpertWeights.quantize(torch.zeros(1, 96, 32), torch.zeros(1, 32, 48)), 0, SILU, MXFP4)
    with pytest.raises(TypeError, match=r"b2 is torch\.float16: must be torch\.float32 or torch\.bfloat16 or None"):
        dataclasses.replace(weights, b2=weights.b2.half())
    with pytest.raises(ValueError, match=r"b13 is \(4, 64\): must be \(4, 128\)"):
        dataclasses.replace(weights, b13=weights.b13[:, :64])
    with pytest.raises(ValueError, match=r"b2 is \(3, 128\): must be \(4, 128\)"):
        dataclasses.replace(weights, b2=weights.b2[:3])


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=repr)
def test_biases_order_and_format_are_saved(fmt: Format, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors")
    from safetensors.torch import save_file

    weights = reordered(make_weights(SILU, fmt=fmt), GateOrder.INTERLEAVED)
    weights.save(tmp_path / "experts.safetensors")
    loaded = ExpertWeights.load(tmp_path / "experts.safetensors")
    assert (loaded.gate_order, loaded.format) == (GateOrder.INTERLEAVED, fmt)
    assert loaded.tensors().keys() == weights.tensors().keys() >= {"b13", "b2"}
    for name, tensor in weights.tensors().items():
        assert_same_bits(loaded.tensors()[name], tensor, name)
    if fmt == MXFP4:
        return
    save_file(weights.tensors(), tmp_path / "bare.safetensors")
    assert ExpertWeights.load(tmp_path / "bare.safetensors").gate_order == GateOrder.GATE_FIRST
    save_file(weights.tensors(), tmp_path / "odd.safetensors", {"gate_order": "SIDEWAYS"})
    with pytest.raises(ValueError, match=r"gate_order SIDEWAYS; known are NVFP4.* and GATE_FIRST, UP_FIRST"):
        ExpertWeights.load(tmp_path / "odd.safetensors")
