"""Grouped experts: every format against float64 within the derived bounds, on rounds that dispatch delivered; what is
written and what is not; the same bits every run; the launches of a round replayed in others, as a CUDA graph does."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ep_a2a
from ep_a2a import Config, PeerTimeout, RoundError, StickyError, experts, route
from ep_a2a.experts import ExpertWeights, GateOrder, LocalExperts
from ep_a2a.experts.activations import GELU_TANH, RELU2, SILU, Activation, swigluoai
from ep_a2a.experts.grouped import run_grouped
from ep_a2a.layout import BF16, FP8, FP16, FP32, MXFP4, MXFP8, NVFP4, PAYLOAD_FORMATS, Format
from ep_a2a.moe import MoELayer
from ep_a2a.testing import (
    ROUTINGS,
    MoEReference,
    assert_same_bits,
    assert_within,
    decode_planes,
    payload_planes,
    reference_moe,
)
from tests import bodies

POISON = 77.0
NAN = math.nan
TIGHT = swigluoai(alpha=1.1, beta=0.5, limit=0.75)  # the limit is met often
ACTIVATIONS = (SILU, GELU_TANH, swigluoai(), TIGHT, RELU2)
INTERMEDIATES = (BF16, NVFP4, MXFP4)


@pytest.fixture(autouse=True)
def _garbage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What experts and routing allocate starts as NaN and as slots that are none, and ends where it ends."""
    made: list[tuple[Tensor, int]] = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small are slower with threads

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        memory = torch.full((num_bytes + 512,), 0x7F, dtype=torch.uint8, device=device)
        made.append((memory, num_bytes))
        return memory[256 : 256 + num_bytes].view(dtype).reshape(shape)

    monkeypatch.setattr(route, "_empty", empty)
    yield
    torch.set_num_threads(num_threads)
    for memory, num_bytes in made:
        assert (memory[:256] == 0x7F).all() and (memory[256 + num_bytes :] == 0x7F).all()


def config_of(payload: Format = BF16, **fields: Any) -> Config:
    small = {"num_experts": 4, "top_k": 3, "hidden": 128, "max_tokens": 6, "combine": FP32}
    patient = {"timeout_s": bodies.PATIENCE_S, "first_timeout_s": bodies.PATIENCE_S}
    return Config(payload=payload, **{**small, **patient, **fields})


def make_weights(
    config: Config, inner: int = 64, num_matrices: int = 2, biases: bool = True, fmt: Format = NVFP4, seed: int = 2
) -> ExpertWeights:
    gen = torch.Generator().manual_seed(seed)
    num_experts, hidden, rows = config.num_experts, config.hidden, num_matrices * inner
    w13 = 1.5 * torch.randn(num_experts, rows, hidden, generator=gen) / hidden**0.5
    w2 = torch.randn(num_experts, hidden, inner, generator=gen) / inner**0.5
    b13, b2 = torch.randn(num_experts, rows, generator=gen).bfloat16(), torch.randn(num_experts, hidden, generator=gen)
    return ExpertWeights.quantize(w13, w2, *((b13, b2) if biases else ()), format=fmt)


def reordered(weights: ExpertWeights, order: GateOrder) -> ExpertWeights:
    """The same weights as a checkpoint of another order has them: row by row, from gate rows first."""
    inner = weights.intermediate
    gate, up = range(inner), range(inner, 2 * inner)
    source = {
        GateOrder.GATE_FIRST: [*gate, *up],
        GateOrder.UP_FIRST: [*up, *gate],
        GateOrder.INTERLEAVED: [row for pair in zip(gate, up) for row in pair],
    }[order]
    rows = {n: t.view(torch.uint8)[:, source] for n, t in weights.tensors().items() if n in ("w13", "w13_scales")}
    rows["w13_scales"] = rows["w13_scales"].view(weights.w13_scales.dtype)
    if weights.b13 is not None:
        rows["b13"] = weights.b13[:, source]
    return dataclasses.replace(weights, **rows, gate_order=order)


def slice_weights(weights: ExpertWeights, owned: range) -> ExpertWeights:
    return dataclasses.replace(weights, **{n: t[owned.start : owned.stop] for n, t in weights.tensors().items()})


Tokens = tuple[Tensor, Tensor, Tensor]


def make_tokens(config: Config, count: int, routing: str = "uniform", seed: int = 3) -> Tokens:
    gen = torch.Generator().manual_seed(seed)
    ids, weights = ROUTINGS[routing](count, config.num_experts, config.top_k, gen)
    return torch.randn(count, config.hidden, generator=gen).bfloat16(), ids, weights


def reference(
    config: Config,
    tokens: Tokens,
    weights: ExpertWeights,
    activation: Activation = SILU,
    intermediate: Format = BF16,
    num_ranks: int = 1,
) -> MoEReference:
    rows = decode_planes(config, payload_planes(config, tokens[0]))
    return reference_moe(config, rows, *tokens[1:], weights.decoded, num_ranks, activation, intermediate)


def one_rank(config: Config, body: Callable[[ep_a2a.A2A], None]) -> None:
    """`body` on a rank of its own."""

    def run(group: Any) -> None:
        with ep_a2a.connect(config, group=group) as a2a:
            body(a2a)

    ep_a2a.local(1).run(run)


def run_grouped_once(
    config: Config,
    tokens: Tokens,
    weights: ExpertWeights,
    activation: Activation = SILU,
    intermediate: Format = BF16,
    first_expert: int = 0,
    outbox: Tensor | None = None,
) -> Tensor:
    """The outbox rows of all tokens of one rank."""
    box = torch.full((1, config.max_tokens, config.hidden), POISON) if outbox is None else outbox

    def body(a2a: ep_a2a.A2A) -> None:
        received, handle = ep_a2a.dispatch(a2a, *tokens)
        run_grouped(weights, first_expert, received, box, activation, intermediate)
        assert (box[~received.valid] == POISON).all(), "a row that is not valid was written"
        assert not (box[received.valid] == POISON).any(), "a valid row was left alone"
        ep_a2a.release(a2a, handle)

    one_rank(config, body)
    return box[0, : tokens[1].shape[0]]


def both_bounds(got: Tensor, wanted: MoEReference, name: str) -> None:
    assert_within(got, wanted.out, wanted.bound, name)
    assert_within(got, wanted.out, wanted.likely_bound, name)


# ---- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=repr)
@pytest.mark.parametrize("payload", PAYLOAD_FORMATS, ids=repr)
def test_all_formats_activations_orders_biases_and_intermediates(payload: Format, fmt: Format) -> None:
    config = config_of(payload)
    tokens = make_tokens(config, 6)

    def body(a2a: ep_a2a.A2A) -> None:
        received, handle = ep_a2a.dispatch(a2a, *tokens)
        for activation, biases, intermediate in itertools.product(ACTIVATIONS, (True, False), INTERMEDIATES):
            weights = make_weights(config, 64, activation.num_matrices, biases, fmt)
            wanted, first = reference(config, tokens, weights, activation, intermediate), None
            for order in GateOrder if activation.num_matrices == 2 else [GateOrder.GATE_FIRST]:
                name = f"{activation}, {intermediate}, biases {biases}, {order.name}"
                outbox = torch.full((1, 6, 128), POISON)
                run_grouped(
                    reordered(weights, order) if order != GateOrder.GATE_FIRST else weights,
                    0,
                    received,
                    outbox,
                    activation,
                    intermediate,
                )
                first = outbox[0] if first is None else first
                assert_same_bits(outbox[0], first, name)
            both_bounds(first, wanted, name)
            if intermediate == BF16:
                used = ((first.double() - wanted.out).abs() / wanted.likely_bound).max()
                assert used > 0.02, "a bound this wide tests nothing"
        ep_a2a.release(a2a, handle)

    one_rank(config, body)


SHAPES = {
    "H2048 K22": (config_of(NVFP4, num_experts=32, top_k=22, hidden=2048), 64, NVFP4, SILU, BF16),
    "H7168 K8": (config_of(FP8, num_experts=12, top_k=8, hidden=7168), 64, NVFP4, SILU, NVFP4),
    "H2880 K4": (config_of(MXFP4, num_experts=6, top_k=4, hidden=2880), 96, MXFP4, swigluoai(), BF16),
    "two slices, five chunks": (config_of(BF16, hidden=64), 1056, MXFP4, SILU, MXFP4),
    "parts of vectors": (config_of(NVFP4, hidden=48), 16, NVFP4, RELU2, NVFP4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    config, inner, fmt, activation, intermediate = SHAPES[name]
    tokens = make_tokens(config, 3)
    weights = make_weights(config, inner, activation.num_matrices, True, fmt)
    got = run_grouped_once(config, tokens, weights, activation, intermediate)
    both_bounds(got, reference(config, tokens, weights, activation, intermediate), name)


def test_the_sum_runs_in_ascending_k_and_is_rounded_once() -> None:
    """1, then thrice a little that is lost beside it; from the other end it would count."""
    config = config_of(top_k=4, max_tokens=5)
    weights, x = make_weights(config), torch.randn(1, 128).bfloat16().expand(4, 128).contiguous()
    small = 2.0**-25
    ids = torch.tensor([[2, 1, 1, 1], [1, 1, 1, 2], [2, -1, -1, -1], [-1, -1, -1, 1]], dtype=torch.int32)
    scale = torch.tensor([[1, small, small, small], [small, small, small, 1], [1.0] * 4, [1.0] * 4])
    tokens = x, ids, scale
    got = run_grouped_once(config, tokens, weights)
    y = {2: got[2], 1: got[3]}
    for row in (0, 1):
        wanted = torch.zeros(128)
        for expert, weight in zip(ids[row].tolist(), scale[row].tolist()):
            wanted = wanted + y[expert] * weight
        assert_same_bits(got[row], wanted)
    assert not torch.equal(got[0], got[1])
    for dtype in (torch.bfloat16, torch.float16):
        box = torch.full((1, 5, 128), POISON, dtype=dtype)
        assert_same_bits(run_grouped_once(config, tokens, weights, outbox=box), got.to(dtype))


def test_nan_shows_in_its_own_rows() -> None:
    for payload, activation in ((BF16, TIGHT), (NVFP4, GELU_TANH), (MXFP8, RELU2)):
        config = config_of(payload)
        x, *routed = make_tokens(config, 6)
        weights = make_weights(config, num_matrices=activation.num_matrices)
        clean = run_grouped_once(config, (x, *routed), weights, activation)
        broken = x.clone()
        broken[2, 5] = NAN
        got = run_grouped_once(config, (broken, *routed), weights, activation)
        assert got[2].isnan().all()
        others = [0, 1, 3, 4, 5]
        assert_same_bits(got[others], clean[others])
        for row in (7, weights.w13.shape[1] - 7):  # one of gate, one of up: no clamp hides it
            b13 = weights.b13.clone()
            b13[1, row] = NAN
            got = run_grouped_once(config, (x, *routed), dataclasses.replace(weights, b13=b13), activation)
            assert_same_bits(got.isnan().all(dim=1), (routed[0] == 1).any(dim=1))
            assert_same_bits(got.isnan().any(dim=1), (routed[0] == 1).any(dim=1))


# ---- rows, slots and places --------------------------------------------------------------------------------------


class Grouped:
    """What `LocalExperts` does on a GPU, here; the outbox is poisoned before and looked at behind it."""

    def __init__(self, weights: ExpertWeights, first_expert: int, **how: Any) -> None:
        self.arguments = weights, first_expert
        self.how = {"activation": SILU, "intermediate": BF16} | how

    def __call__(self, received: ep_a2a.Received, outbox: Tensor) -> None:
        boxes = [outbox, outbox.clone()]
        for box in boxes:
            box.fill_(POISON)
            run_grouped(*self.arguments, received, box, **self.how)
        valid = received.valid
        assert (outbox[~valid] == POISON).all(), "a row that is not valid was written"
        assert not (outbox[valid] == POISON).any(), "a valid row was left alone"
        assert_same_bits(*boxes)


@pytest.mark.parametrize("combine", [BF16, FP16, FP32, FP8], ids=repr)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_layers_of_three_ranks(routing: str, combine: Format) -> None:
    """7 experts on 3 ranks; rounds of other counts, so that rows of earlier ones lie behind them, and none."""
    config = config_of(NVFP4, num_experts=7, top_k=4, max_tokens=40, combine=combine)
    weights = make_weights(config, 32)
    counts = [[40, 0, 9], [3, 33, 0], [0, 0, 0]]

    def body(group: Any) -> None:
        with ep_a2a.connect(config, group=group) as a2a:
            owned = a2a.local_experts
            layer = MoELayer(a2a, Grouped(slice_weights(weights, owned), owned.start))
            for round_, count in enumerate(counts):
                tokens = make_tokens(config, count[a2a.rank], routing, 10 * round_ + a2a.rank)
                wanted = reference(config, tokens, weights, num_ranks=3)
                both_bounds(layer(*tokens), wanted, f"rank {a2a.rank}, round {round_}")
            a2a.check()

    ep_a2a.local(3).run(body)


def test_more_ranks_than_experts() -> None:
    config = config_of(num_experts=2, top_k=2, max_tokens=5)
    weights = make_weights(config)

    def body(group: Any) -> None:
        with ep_a2a.connect(config, group=group) as a2a:
            owned = a2a.local_experts
            assert len(owned) == int(a2a.rank < 2)
            layer = MoELayer(a2a, Grouped(slice_weights(weights, owned), owned.start))
            tokens = make_tokens(config, 5, seed=a2a.rank)
            both_bounds(layer(*tokens), reference(config, tokens, weights, num_ranks=3), f"rank {a2a.rank}")

    ep_a2a.local(3).run(body)


def test_all_pairs_that_the_memory_can_hold_in_one_expert() -> None:
    config = config_of(num_experts=3, top_k=4, max_tokens=19)
    weights = make_weights(config)

    def body(group: Any) -> None:
        with ep_a2a.connect(config, group=group) as a2a:
            owned = a2a.local_experts
            layer = MoELayer(a2a, Grouped(slice_weights(weights, owned), owned.start))
            x, _, w = make_tokens(config, 19, "duplicates", a2a.rank)
            ids = torch.full((19, 4), 1, dtype=torch.int32)
            both_bounds(layer(x, ids, w), reference(config, (x, ids, w), weights, num_ranks=2), f"rank {a2a.rank}")

    ep_a2a.local(2).run(body)


def test_experts_of_a_part_of_the_rank() -> None:
    """Only experts 1 and 2 of 4 are applied; a row without them is zero."""
    config = config_of(NVFP4, top_k=2)
    weights, (x, ids, w) = make_weights(config), make_tokens(config, 6)
    ids[0] = torch.tensor([0, 3])
    part = slice_weights(weights, range(1, 3))
    got = run_grouped_once(config, (x, ids, w), part, first_expert=1)
    wanted = reference(config, (x, torch.where((ids == 1) | (ids == 2), ids, -1), w), weights)
    both_bounds(got, wanted, "a part")
    assert got[0].tolist() == [0.0] * 128
    none = run_grouped_once(config, (x, ids, w), slice_weights(weights, range(0)))
    assert_same_bits(none, torch.zeros(6, 128))


def test_outboxes_with_strides() -> None:
    config = config_of(MXFP8)
    weights, tokens = make_weights(config), make_tokens(config, 5)
    exact = run_grouped_once(config, tokens, weights)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wide = torch.full((1, 6, 136), POISON, dtype=dtype)
        assert_same_bits(run_grouped_once(config, tokens, weights, outbox=wide[..., :128]), exact.to(dtype))
        assert (wide[..., 128:] == POISON).all()
        turned = torch.full((128, 6, 2), POISON, dtype=dtype)
        assert_same_bits(run_grouped_once(config, tokens, weights, outbox=turned.permute(2, 1, 0)[:1]), exact.to(dtype))
        assert (turned[..., 1] == POISON).all()


def test_weights_that_lie_anyhow() -> None:
    config = config_of()
    weights, tokens = make_weights(config), make_tokens(config, 6)

    def moved(tensor: Tensor) -> Tensor:
        """The same values one element behind a multiple of 16 bytes, experts two places apart."""
        size = tensor[0].numel()
        memory = torch.zeros(2 * tensor.shape[0] * size + 1, dtype=tensor.dtype)
        view = memory[1:].view(tensor.shape[0], 2, *tensor.shape[1:])[:, 0]
        return view.copy_(tensor)

    anyhow = dataclasses.replace(weights, **{name: moved(t) for name, t in weights.tensors().items()})
    assert_same_bits(run_grouped_once(config, tokens, anyhow), run_grouped_once(config, tokens, weights))
    dense = {name: moved(t.unsqueeze(0))[0] for name, t in weights.tensors().items()}
    assert all(t.is_contiguous() for t in dense.values()) and dense["w13"].data_ptr() % 4
    dense = dataclasses.replace(weights, **dense)
    assert_same_bits(run_grouped_once(config, tokens, dense), run_grouped_once(config, tokens, weights))


@pytest.mark.parametrize("num_sms", [1, 3, None])
def test_the_same_bits_whoever_works(num_sms: int | None) -> None:
    config = config_of(FP16, num_experts=12, top_k=6, max_tokens=20, num_sms=num_sms)
    weights, tokens = make_weights(config, 160), make_tokens(config, 20, "zipf")
    assert_same_bits(
        run_grouped_once(config, tokens, weights, intermediate=NVFP4),
        run_grouped_once(dataclasses.replace(config, num_sms=None), tokens, weights, intermediate=NVFP4),
    )


# ---- launches that are replayed ------------------------------------------------------------------------------------


def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The parameters of the experts' launches, which hold those of the routing; their tensors stay alive."""
    found: list[Any] = []
    experts_of = ep_a2a.channel.Channel.experts

    def experts(channel: Any, params: Any) -> None:
        experts_of(channel, params)
        found.append(params)

    kept: list[Tensor] = []
    empty = route._empty
    monkeypatch.setattr(route, "_empty", lambda *a: kept.append(empty(*a)) or kept[-1])
    monkeypatch.setattr(ep_a2a.channel.Channel, "experts", experts)
    return found


def test_a_captured_round_serves_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = captured(monkeypatch)
    config = config_of(NVFP4, top_k=2)
    weights, box = make_weights(config), torch.full((1, 6, 128), POISON)

    def body(a2a: ep_a2a.A2A) -> None:
        for round_, count in enumerate((2, 6, 0, 5)):
            tokens = make_tokens(config, count, "holes", round_)
            received, handle = ep_a2a.dispatch(a2a, *tokens)
            box.fill_(POISON)
            if round_ == 0:
                run_grouped(weights, 0, received, box, SILU, NVFP4)
            else:
                a2a.library.route(found[0].route, 0)
                a2a.library.experts(found[0], 0)
            wanted = reference(config, tokens, weights, intermediate=NVFP4)
            valid = received.valid[0, :count]
            assert_within(box[0, :count][valid], wanted.out[valid], wanted.likely_bound[valid])
            assert (box[~received.valid] == POISON).all()
            ep_a2a.release(a2a, handle)

    one_rank(config, body)
    assert len(found) == 1


def test_after_an_aborted_dispatch_nothing_is_read_or_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, slots and indices are garbage; the counts of the aborted round are 0."""
    found = captured(monkeypatch)
    config = config_of(NVFP4, timeout_s=0.3)
    weights = make_weights(config)

    def body(group: Any) -> None:
        a2a = ep_a2a.connect(config, group=group)
        owned, box = a2a.local_experts, torch.full((2, 6, 128), POISON)
        received, handle = ep_a2a.dispatch(a2a, *make_tokens(config, 6))
        if a2a.rank == 1:
            ep_a2a.release(a2a, handle)
            return  # and comes no more
        part = slice_weights(weights, owned)
        run_grouped(part, owned.start, received, box, SILU, NVFP4)
        assert not (box[received.valid] == POISON).any()
        ep_a2a.release(a2a, handle)
        with pytest.raises(PeerTimeout):
            ep_a2a.dispatch(a2a, *make_tokens(config, 6))
        bodies.poison(received, 1)
        box.fill_(POISON)
        a2a.library.route(found[0].route, 0)
        a2a.library.experts(found[0], 0)
        assert (box == POISON).all()
        with pytest.raises(StickyError):
            run_grouped(part, owned.start, received, box, SILU, NVFP4)

    ep_a2a.local(2).run(body)


# ---- what is refused, what is chosen -------------------------------------------------------------------------------


def test_refusals() -> None:
    config = config_of()
    weights, box = make_weights(config), torch.full((1, 6, 128), POISON)
    with pytest.raises(TypeError, match=r"received is a object: .* need the Received that dispatch returns"):
        run_grouped(weights, 0, object(), box, SILU, BF16)

    def body(a2a: ep_a2a.A2A) -> None:
        received, handle = ep_a2a.dispatch(a2a, *make_tokens(config, 6))
        own = dataclasses.replace(SILU, name="mine", curve=dataclasses.replace(SILU.curve, value=lambda x, a: x))
        with pytest.raises(ValueError, match="activation mine: there are kernels for"):
            run_grouped(weights, 0, received, box, own, BF16)
        ep_a2a.release(a2a, handle)
        with pytest.raises(RoundError, match="holds no rows that may be read"):
            run_grouped(weights, 0, received, box, SILU, BF16)
        assert (box == POISON).all()

    one_rank(config, body)


def test_local_experts_choose_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    config = config_of()
    weights, tokens = make_weights(config), make_tokens(config, 6)
    local, calls = LocalExperts(weights, 0, TIGHT, NVFP4), []
    monkeypatch.setattr(experts, "run_grouped", lambda *arguments: calls.append(arguments))

    def body(a2a: ep_a2a.A2A) -> None:
        received, handle = ep_a2a.dispatch(a2a, *tokens)
        box = torch.zeros(1, 6, 128)
        local(received, box)
        assert not calls and box.abs().sum() > 0
        there = box.as_subclass(OnGpu)
        local(received, there)
        assert calls[0][:2] == (weights, 0) and calls[0][3] is there and calls[0][4:] == (TIGHT, NVFP4)
        ep_a2a.release(a2a, handle)

    one_rank(config, body)
