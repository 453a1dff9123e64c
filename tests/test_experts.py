"""Weights, the plain experts and the layer, with the rounds that dispatch would deliver made by the reference."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import ep_a2a
from ep_a2a.config import Config
from ep_a2a.errors import RoundMismatch
from ep_a2a.experts import ExpertWeights, LocalExperts
from ep_a2a.experts.plain import expert_product
from ep_a2a.layout import BF16, FP8, FP16, FP32, NVFP4, Format, local_experts
from ep_a2a.moe import MoELayer
from ep_a2a.testing import (
    ROUTINGS,
    assert_same_bits,
    assert_within,
    decode_planes,
    destinations,
    payload_planes,
    reference_combine,
    reference_dispatch,
    reference_moe,
)

POISON = 77.0


@dataclass
class Round:
    """The planes of a rank, laid out with padding between rows as in receive memory."""

    payload: Format
    hidden: int
    rows: Tensor
    scales: Tensor | None
    global_scale: Tensor | None
    ids: Tensor
    weights: Tensor
    valid: Tensor


def padded(plane: Tensor) -> Tensor:
    """A strided view with the values of `plane` and eight elements of something else behind every row."""
    wide = torch.full((*plane.shape[:-1], plane.shape[-1] + 8), 0x5B, dtype=torch.uint8).to(plane.dtype)
    wide[..., : plane.shape[-1]] = plane
    return wide[..., : plane.shape[-1]]


def make_round(config: Config, inputs: list[dict[str, Tensor]], rank: int) -> Round:
    """What `rank` sees after dispatch; rows that are not valid hold garbage."""
    expected = reference_dispatch(config, inputs, rank)
    planes = dict(expected.planes)
    gone = ~expected.valid
    planes["ids"][gone] = config.num_experts - 1
    planes["weights"][gone] = float("nan")
    planes["rows"].view(torch.uint8)[gone] = 0x77
    for name in ("rows", "scales", "ids", "weights"):
        if name in planes:
            planes[name] = padded(planes[name])
    return Round(
        payload=config.payload,
        hidden=config.hidden,
        rows=planes["rows"],
        scales=planes.get("scales"),
        global_scale=planes.get("global_scale"),
        ids=planes["ids"],
        weights=planes["weights"],
        valid=expected.valid,
    )


def make_weights(num_experts: int, hidden: int, intermediate: int, seed: int = 1) -> ExpertWeights:
    gen = torch.Generator().manual_seed(seed)
    return ExpertWeights.quantize(
        torch.randn(num_experts, 2 * intermediate, hidden, generator=gen) / hidden**0.5,
        torch.randn(num_experts, hidden, intermediate, generator=gen) / intermediate**0.5,
    )


def slice_weights(weights: ExpertWeights, experts: range) -> ExpertWeights:
    tensors = {name: tensor[experts.start : experts.stop] for name, tensor in weights.tensors().items()}
    return dataclasses.replace(weights, **tensors)


def make_inputs(config: Config, counts: list[int], routing: str, seed: int = 2) -> list[dict[str, Tensor]]:
    gen = torch.Generator().manual_seed(seed)
    inputs = []
    for count in counts:
        ids, weights = ROUTINGS[routing](count, config.num_experts, config.top_k, gen)
        x = torch.randn(count, config.hidden, generator=gen).bfloat16()
        inputs.append(payload_planes(config, x) | {"ids": ids, "weights": weights})
    return inputs


# ---- weights -----------------------------------------------------------------------------------------------------


def test_quantized_weights_decode_as_ml_dtypes_says() -> None:
    weights = make_weights(3, 64, 32)
    for expert in range(3):
        for which, decoded in zip(("w13", "w2"), weights.decoded(expert)):
            packed = getattr(weights, which)[expert].numpy()
            codes = np.stack((packed & 15, packed >> 4), -1).reshape(decoded.shape)
            scales = getattr(weights, which + "_scales")[expert].view(torch.uint8).numpy()
            g = getattr(weights, which + "_global")[expert].numpy()
            wanted = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales.view(
                ml_dtypes.float8_e4m3fn
            ).astype(np.float32).repeat(16, axis=1)
            np.testing.assert_array_equal(decoded.numpy(), wanted * g)


def test_quantize_keeps_each_value_within_its_block() -> None:
    gen = torch.Generator().manual_seed(3)
    w13, w2 = torch.randn(2, 64, 32, generator=gen), torch.randn(2, 32, 32, generator=gen) * 1e-3
    w13[1, 5, 3] = 50.0  # one outlier must not disturb the other expert
    weights = ExpertWeights.quantize(w13, w2)
    assert weights.w13_global.tolist() == [(w / 2688).item() for w in w13.abs().amax(dim=(1, 2))]
    for expert in range(2):
        for original, decoded in zip((w13[expert], w2[expert]), weights.decoded(expert)):
            blocks = original.reshape(-1, 16)
            error = (decoded.reshape(-1, 16) - blocks).abs()
            # half the widest step (1 of 6), plus the rounding of the block scale (1 of 16)
            assert (error <= blocks.abs().amax(dim=1, keepdim=True) * (1 / 6 + 1 / 16)).all()
    assert (weights.num_experts, weights.hidden, weights.intermediate) == (2, 32, 32)
    assert weights.bytes == 2 * ((64 * 32 + 32 * 32) * 9 // 16 + 8)


def test_weights_of_zeros_and_of_no_experts() -> None:
    zeros = ExpertWeights.quantize(torch.zeros(1, 32, 16), torch.zeros(1, 16, 16))
    assert zeros.w13_global.tolist() == [1.0]
    assert all((w == 0).all() for w in zeros.decoded(0))
    none = ExpertWeights.quantize(torch.zeros(0, 32, 16), torch.zeros(0, 16, 16))
    assert none.num_experts == 0
    with pytest.raises(IndexError, match="expert 0"):
        none.decoded(0)
    with pytest.raises(IndexError, match="expert -1"):
        zeros.decoded(-1)


def test_weights_refuse_with_the_numbers() -> None:
    good = make_weights(2, 64, 32)

    def changed(**fields: object) -> ExpertWeights:
        return dataclasses.replace(good, **fields)

    with pytest.raises(TypeError, match=r"w13 is torch\.int8"):
        changed(w13=good.w13.view(torch.int8))
    with pytest.raises(TypeError, match="w2_global is float"):
        changed(w2_global=1.0)
    with pytest.raises(ValueError, match=r"w13_scales is \(2, 64, 3\): must be \(2, 64, 4\)"):
        changed(w13_scales=good.w13_scales[..., :3])
    with pytest.raises(ValueError, match=r"w2_global is \(1,\): must be \(2,\)"):
        changed(w2_global=good.w2_global[:1])
    with pytest.raises(ValueError, match=r"w13 is \(2, 62, 32\): must be \(2, 64, 32\)"):
        changed(w13=good.w13[:, :62])
    with pytest.raises(ValueError, match="hidden=60"):
        changed(w13=good.w13[..., :30])
    with pytest.raises(ValueError, match=r"w13 is \(64, 32\)"):
        changed(w13=good.w13[0])
    with pytest.raises(ValueError, match=r"w13 is \(1, 33, 16\)"):
        ExpertWeights.quantize(torch.zeros(1, 33, 16), torch.zeros(1, 16, 16))
    w13 = torch.ones(2, 32, 16)
    w13[1, 0, 3] = float("nan")
    with pytest.raises(ValueError, match="w13, expert 1: 1 of 512 weights are not finite"):
        ExpertWeights.quantize(w13, torch.zeros(2, 16, 16))


def test_weights_save_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors")
    weights = make_weights(2, 64, 32)
    weights.save(tmp_path / "experts.safetensors")
    loaded = ExpertWeights.load(tmp_path / "experts.safetensors")
    assert loaded.tensors().keys() == weights.tensors().keys()
    for name, tensor in weights.tensors().items():
        assert_same_bits(loaded.tensors()[name], tensor, name)
    from safetensors.torch import save_file

    save_file({"w13": weights.w13}, str(tmp_path / "part.safetensors"))
    with pytest.raises(ValueError, match=r"lacks w13_scales, .*; it holds w13"):
        ExpertWeights.load(tmp_path / "part.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        weights.save(tmp_path / "other.safetensors")


# ---- plain experts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("payload", "combine"), [(NVFP4, BF16), (NVFP4, FP32), (BF16, FP16)])
def test_a_whole_round_is_within_the_bounds(routing: str, payload: Format, combine: Format) -> None:
    """Reference dispatch, plain experts on every rank, reference combine, against float64; 7 experts on 3 ranks."""
    config = Config(num_experts=7, top_k=4, hidden=128, max_tokens=9, payload=payload, combine=combine)
    weights = make_weights(7, 128, 64)
    counts = [5, 0, 9]
    inputs = make_inputs(config, counts, routing)
    dtype = combine.columns[0].dtype
    outboxes = []
    for rank in range(3):
        received = make_round(config, inputs, rank)
        owned = local_experts(rank, 7, 3)
        outbox = padded(torch.full((3, 9, 128), POISON, dtype=dtype))
        LocalExperts(slice_weights(weights, owned), owned.start)(received, outbox)
        assert (outbox[~received.valid] == POISON).all(), "a row that is not valid was written"
        assert not (outbox[received.valid] == POISON).any(), "a valid row was left alone"
        outboxes.append(outbox)
    masks = [destinations(i["ids"], 7, 3) for i in inputs]
    for rank, out in enumerate(reference_combine(outboxes, masks)):
        rows = decode_planes(config, inputs[rank])
        reference = reference_moe(
            config, rows, inputs[rank]["ids"], inputs[rank]["weights"], weights.decoded, num_ranks=3
        )
        assert_within(out, reference.out, reference.bound)
        assert_within(out, reference.out, reference.likely_bound)


def one_row(ids: list[int], weights: list[float], payload: Format = BF16, hidden: int = 64) -> Round:
    config = Config(num_experts=8, top_k=len(ids), hidden=hidden, max_tokens=1, payload=payload)
    planes = payload_planes(config, torch.randn(1, hidden, generator=torch.Generator().manual_seed(4)))
    planes = {name: plane.unsqueeze(0) for name, plane in planes.items()}
    return Round(
        payload=payload,
        hidden=hidden,
        rows=planes["rows"],
        scales=planes.get("scales"),
        global_scale=planes.get("global_scale"),
        ids=torch.tensor([[ids]], dtype=torch.int32),
        weights=torch.tensor([[weights]]),
        valid=torch.ones(1, 1, dtype=torch.bool),
    )


def run(experts: LocalExperts, received: Round, dtype: torch.dtype = torch.float32) -> Tensor:
    outbox = torch.full((*received.valid.shape, received.hidden), POISON, dtype=dtype)
    experts(received, outbox)
    return outbox


def test_the_sum_runs_in_ascending_k() -> None:
    """1, then twice a little that is lost beside it; from the other end it would count."""
    experts = LocalExperts(make_weights(4, 64, 32), 0)
    big, small = 1.0, 2.0**-25
    forward = run(experts, one_row([2, 1, 1, 1], [big, small, small, small]))
    backward = run(experts, one_row([1, 1, 1, 2], [small, small, small, big]))
    y = {e: run(experts, one_row([e], [1.0])) for e in (1, 2)}
    wanted_forward, wanted_backward = torch.zeros_like(y[1]), torch.zeros_like(y[1])
    for e, w in ((2, big), (1, small), (1, small), (1, small)):
        wanted_forward = wanted_forward + y[e] * w
    for e, w in ((1, small), (1, small), (1, small), (2, big)):
        wanted_backward = wanted_backward + y[e] * w
    assert_same_bits(forward, wanted_forward)
    assert_same_bits(backward, wanted_backward)
    assert not torch.equal(forward, backward)


def test_ids_that_are_not_here_are_skipped_whatever_they_are() -> None:
    experts = LocalExperts(make_weights(2, 64, 32), 3)
    wanted = run(experts, one_row([3, 4], [0.5, 0.25]))
    nan = float("nan")
    ids = [-1, 3, 2, -(2**31), 2**31 - 1, 4, 5, 0]
    got = run(experts, one_row(ids, [nan, 0.5, nan, nan, nan, 0.25, nan, nan]))
    assert_same_bits(got, wanted)
    assert run(experts, one_row([0, -1], [1.0, 1.0])).tolist() == torch.zeros(1, 1, 64).tolist()


def test_equal_ids_are_two_contributions() -> None:
    experts = LocalExperts(make_weights(2, 64, 32), 0)
    assert_same_bits(run(experts, one_row([1, 1], [0.5, 0.5])), run(experts, one_row([1], [1.0])))


def test_the_sum_is_rounded_once() -> None:
    experts = LocalExperts(make_weights(4, 64, 32), 0)
    received = one_row([0, 1, 2], [0.3, 0.3, 0.4], NVFP4)
    exact = run(experts, received)
    for dtype in (torch.bfloat16, torch.float16):
        assert_same_bits(run(experts, received, dtype), exact.to(dtype))


def test_the_intermediate_is_rounded_to_bf16() -> None:
    weights = make_weights(1, 64, 32)
    received = one_row([0], [1.0])
    w13, w2 = (w.double() for w in weights.decoded(0)[:2])
    gate, up = (received.rows[0].double() @ w13.T).chunk(2, dim=1)
    m = torch.nn.functional.silu(gate) * up
    got = run(LocalExperts(weights, 0), received)[0].double()
    assert (got - m.bfloat16().double() @ w2.T).abs().max() < 1e-6
    assert (got - m @ w2.T).abs().max() > 1e-4


def test_same_bits_every_run_and_beside_other_rows() -> None:
    """A row's bits do not change with the rows beside it nor with its place in a tile (seen, not promised)."""
    gen = torch.Generator().manual_seed(5)
    expert = make_weights(1, 512, 256).decoded(0)
    rows = torch.randn(71, 512, generator=gen)
    all_at_once = expert_product(rows, expert)
    assert_same_bits(expert_product(rows, expert), all_at_once)
    order = torch.randperm(71, generator=gen)
    assert_same_bits(expert_product(rows[order], expert), all_at_once[order])
    for count in (1, 2, 31, 32, 33):
        assert_same_bits(expert_product(rows[:count], expert), all_at_once[:count])


def test_nan_shows_in_its_own_row() -> None:
    config = Config(num_experts=4, top_k=2, hidden=64, max_tokens=4)
    inputs = make_inputs(config, [4], "uniform")
    experts = LocalExperts(make_weights(4, 64, 32), 0)
    clean = run(experts, make_round(config, inputs, 0))
    inputs[0]["scales"].view(torch.uint8)[1, 2] = 0x7F
    got = run(experts, make_round(config, inputs, 0))
    assert got[0, 1].isnan().all()
    assert_same_bits(got[0, [0, 2, 3]], clean[0, [0, 2, 3]])


def test_experts_of_a_rank_without_any() -> None:
    received = one_row([0], [1.0])
    received.valid[:] = False
    none = ExpertWeights.quantize(torch.zeros(0, 64, 64), torch.zeros(0, 64, 32))
    assert (run(LocalExperts(none, 0), received) == POISON).all()


def test_experts_refuse_with_the_numbers() -> None:
    experts = LocalExperts(make_weights(2, 64, 32), 0)
    received = one_row([0], [1.0])
    with pytest.raises(TypeError, match="float64"):
        run(experts, received, torch.float64)
    with pytest.raises(ValueError, match=r"outbox is \(1, 2, 64\): must be \(1, 1, 64\)"):
        experts(received, torch.zeros(1, 2, 64))
    with pytest.raises(ValueError, match=r"hidden=96.*hidden=64"):
        run(experts, one_row([0], [1.0], hidden=96))
    with pytest.raises(ValueError, match="outbox on meta"):
        experts(received, torch.zeros(1, 1, 64, device="meta"))
    with pytest.raises(ValueError, match="first_expert=-1"):
        LocalExperts(experts.weights, -1)
    received = one_row([0], [1.0], NVFP4)
    received.scales = None
    with pytest.raises(ValueError, match="NVFP4 rows need the plane scales"):
        run(experts, received)


# ---- the layer ---------------------------------------------------------------------------------------------------


class Calls:
    """Stands for the module `api`: writes down what the layer calls, in order."""

    def __init__(self, release_error: Exception | None = None) -> None:
        self.log: list[tuple[object, ...]] = []
        self.release_error = release_error

    def dispatch(self, a2a: object, x: object, ids: object, weights: object, **options: object) -> tuple[str, str]:
        self.log.append(("dispatch", a2a, x, ids, weights, options))
        return "received", "handle"

    def combine(self, a2a: object, handle: object, rows: object) -> str:
        self.log.append(("combine", a2a, handle, rows))
        return "out"

    def release(self, a2a: object, handle: object) -> None:
        self.log.append(("release", a2a, handle))
        if self.release_error is not None:
            raise self.release_error


def layer_with(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, experts: object, combine: Format = BF16
) -> tuple[object, object]:
    from ep_a2a import moe

    monkeypatch.setattr(moe, "api", calls)
    a2a = SimpleNamespace(config=SimpleNamespace(combine=combine))
    if combine.is_encoded:
        a2a.scratch = lambda channel: f"scratch {channel}"
    else:
        a2a.outbox = lambda channel: f"outbox {channel}"
    return moe.MoELayer(a2a, experts), a2a


@pytest.mark.parametrize("combine", [BF16, FP8])
def test_layer_dispatches_runs_and_combines(monkeypatch: pytest.MonkeyPatch, combine: Format) -> None:
    calls = Calls()
    layer, a2a = layer_with(monkeypatch, calls, lambda *planes: calls.log.append(("experts", *planes)), combine)
    assert layer("x", "ids", "weights", num_tokens="count", channel=3) == "out"
    options = {"num_tokens": "count", "extra": (), "channel": 3}
    assert calls.log == [
        ("dispatch", a2a, "x", "ids", "weights", options),
        ("experts", "received", "scratch 3" if combine is FP8 else "outbox 3"),
        ("combine", a2a, "handle", "scratch 3" if combine is FP8 else None),
    ]


@pytest.mark.parametrize("release_error", [None, RoundMismatch("rank 1 combined")])
def test_layer_ends_the_round_when_the_experts_raise(
    monkeypatch: pytest.MonkeyPatch, release_error: Exception | None
) -> None:
    def broken(received: object, outbox: object) -> None:
        raise ZeroDivisionError("experts")

    calls = Calls(release_error)
    layer, a2a = layer_with(monkeypatch, calls, broken)
    with pytest.raises(ZeroDivisionError, match="experts") as caught:
        layer("x", "ids", "weights")
    assert [call[0] for call in calls.log] == ["dispatch", "release"]
    assert calls.log[1] == ("release", a2a, "handle")
    assert caught.value.__cause__ is release_error


# ---- experts of a layer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_experts", "first_expert", "text"),
    [
        (1, 2, "experts 2 to 2 are given, rank 1 has 2 to 3"),
        (2, 0, "experts 0 to 1 are given, rank 1 has 2 to 3"),
    ],
)
def test_a_layer_refuses_the_experts_of_another_rank(num_experts, first_expert, text):
    config = ep_a2a.Config(num_experts=4, top_k=1, hidden=64, max_tokens=2)
    with ep_a2a.connect(config, ep_a2a.local(2)) as a2as:
        with pytest.raises(ValueError, match=text):
            MoELayer(a2as[1], LocalExperts(make_weights(num_experts, 64, 32), first_expert))
        with pytest.raises(TypeError, match="experts is a ExpertWeights: it must be callable"):
            MoELayer(a2as[1], make_weights(2, 64, 32))
        MoELayer(a2as[1], LocalExperts(make_weights(2, 64, 32), 2))
