"""The float64 MoE reference against loops over scalars, and its bounds: correct layers inside, losses outside."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ep_a2a.config import Config
from ep_a2a.layout import BF16, FP16, FP32, Format, local_experts
from ep_a2a.testing import ROUTINGS, assert_within, reference_moe, reference_part, reference_sum


def moe_config(**changes: object) -> Config:
    return Config(**({"num_experts": 6, "top_k": 3, "hidden": 32, "max_tokens": 8} | changes))


def moe_case(
    config: Config, num_tokens: int, intermediate: int, routing: str, seed: int = 12
) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_tokens, config.hidden, generator=gen)
    ids, weights = ROUTINGS[routing](num_tokens, config.num_experts, config.top_k, gen)
    h, i = config.hidden, intermediate
    experts = [
        (torch.randn(2 * i, h, generator=gen) / h**0.5, torch.randn(h, i, generator=gen) / i**0.5)
        for _ in range(config.num_experts)
    ]
    return rows, ids, weights, experts


@pytest.mark.parametrize("routing", ["uniform", "holes", "duplicates", "nothing"])
def test_moe_equals_a_loop_over_scalars(routing: str) -> None:
    config = moe_config()
    rows, ids, weights, experts = moe_case(config, 5, 16, routing)
    ids[2, 1] = 6  # no such expert
    got = reference_moe(config, rows, ids, weights, experts.__getitem__, num_ranks=4)
    wanted = np.zeros((5, 32))
    for token in range(5):
        a = rows[token].double().numpy()
        for k in range(3):
            if 0 <= ids[token, k] < 6:
                w13, w2 = (w.double().numpy() for w in experts[int(ids[token, k])])
                gate, up = w13[:16] @ a, w13[16:] @ a
                wanted[token] += float(weights[token, k]) * (w2 @ (gate / (1 + np.exp(-gate)) * up))
    assert got.out.dtype == torch.float64
    np.testing.assert_allclose(got.out.numpy(), wanted, rtol=1e-12, atol=1e-14)
    assert (got.bound >= got.likely_bound).all()
    assert (got.likely_bound > 0).all()


def imitate(
    config: Config, rows: Tensor, ids: Tensor, weights: Tensor, experts: list[tuple[Tensor, Tensor]], num_ranks: int
) -> Tensor:
    """A correct implementation with coarse habits: every product sum runs from the left, one fp32 rounding a step."""
    dtype = config.combine.columns[0].dtype
    total = torch.zeros(rows.shape[0], config.hidden)
    for rank in range(num_ranks):
        partial = torch.zeros_like(total)
        for token in range(rows.shape[0]):
            for k in range(ids.shape[1]):
                expert = int(ids[token, k])
                if expert in local_experts(rank, config.num_experts, num_ranks):
                    w13, w2 = experts[expert]
                    z = (w13 * rows[token]).numpy().cumsum(axis=1, dtype=np.float32)[:, -1]
                    gate, up = torch.from_numpy(z).chunk(2)
                    m = (gate / (1 + torch.exp(-gate)) * up).bfloat16().float()
                    y = (w2 * m).numpy().cumsum(axis=1, dtype=np.float32)[:, -1]
                    partial[token] += weights[token, k] * torch.from_numpy(y)
        total += partial.to(dtype).float()
    return total.to(dtype)


@pytest.mark.parametrize("combine", [BF16, FP16, FP32])
@pytest.mark.parametrize("routing", ["uniform", "all_to_one", "duplicates", "holes"])
def test_a_correct_layer_is_within_both_bounds(combine: Format, routing: str) -> None:
    config = moe_config(combine=combine, hidden=256)
    rows, ids, weights, experts = moe_case(config, 4, 128, routing)
    reference = reference_moe(config, rows, ids, weights, experts.__getitem__, num_ranks=3)
    got = imitate(config, rows, ids, weights, experts, num_ranks=3)
    assert_within(got, reference.out, reference.bound)
    assert_within(got, reference.out, reference.likely_bound)
    used = (got.double() - reference.out).abs() / reference.likely_bound
    assert ids.max() < 0 or used.max() > 0.02, "a bound this wide tests nothing"


def test_equal_roundings_stay_within_the_worst_case_bound() -> None:
    """Rows and weights of equal values round alike everywhere: errors add up instead of cancelling."""
    config = moe_config(hidden=512, combine=FP32)
    _, ids, weights, _ = moe_case(config, 4, 256, "uniform")
    rows = torch.full((4, 512), 0.731)
    experts = [(torch.full((512, 512), 0.037 + 0.01 * e), torch.full((512, 256), 0.0613)) for e in range(6)]
    reference = reference_moe(config, rows, ids, weights, experts.__getitem__, num_ranks=2)
    got = imitate(config, rows, ids, weights, experts, num_ranks=2)
    assert_within(got, reference.out, reference.bound)
    assert ((got.double() - reference.out).abs() / reference.bound).max() > 0.1


def test_both_bf16_roundings_at_their_worst() -> None:
    """Two partials of two ranks that nearly cancel, each rounded the wrong way twice: in the middle and in its outbox.

    257 -> 256, times 257/256 is 257 -> 256; and -259 -> -260, times 263/260 is a little above 263 -> -264.
    """
    config = moe_config(num_experts=2, top_k=2)
    rows = torch.zeros(1, 32)
    rows[0, 0] = 1
    experts = []
    for gate, up in ((257.0, 1.0), (259.0, -1.0)):
        w13, w2 = torch.zeros(32, 32), torch.zeros(32, 16)
        w13[0, 0], w13[16, 0], w2[:, 0] = gate, up, 1
        experts.append((w13, w2))
    ids = torch.tensor([[0, 1]], dtype=torch.int32)
    weights = torch.tensor([[257 / 256, 263.001 / 260]])
    reference = reference_moe(config, rows, ids, weights, experts.__getitem__, num_ranks=2)
    got = imitate(config, rows, ids, weights, experts, num_ranks=2)
    assert got[0, 0].item() == -8.0
    error = (got.double() - reference.out).abs()
    assert_within(got, reference.out, reference.bound)
    assert (error > 0.97 * reference.bound).all()


@pytest.mark.parametrize(("hidden", "intermediate", "top_k", "num_experts"), [(1024, 256, 22, 24), (512, 1024, 8, 12)])
def test_what_is_lost_or_twice_exceeds_the_bounds(hidden: int, intermediate: int, top_k: int, num_experts: int) -> None:
    """A lost row exceeds the worst-case bound too; one lost contribution, even the lightest, the likely bound."""
    config = Config(num_experts=num_experts, top_k=top_k, hidden=hidden, max_tokens=2)
    rows, ids, weights, experts = moe_case(config, 2, intermediate, "uniform")

    def layer(ids: Tensor, weights: Tensor = weights) -> Tensor:
        return reference_moe(config, rows, ids, weights, experts.__getitem__, num_ranks=4).out.bfloat16()

    reference = reference_moe(config, rows, ids, weights, experts.__getitem__, num_ranks=4)
    assert_within(layer(ids), reference.out, reference.likely_bound)
    lost_row = layer(ids)
    lost_row[1] = 0
    with pytest.raises(AssertionError, match=r"out\[1, \d+\]: wanted"):
        assert_within(lost_row, reference.out, reference.bound)
    mixed_up = layer(ids).flip(0)
    with pytest.raises(AssertionError):
        assert_within(mixed_up, reference.out, reference.bound)
    heaviest, lightest = weights[0].argmax(), weights[0].argmin()
    for k, bound in ((heaviest, reference.bound), (lightest, reference.likely_bound)):
        lost = ids.clone()
        lost[0, k] = -1
        with pytest.raises(AssertionError):
            assert_within(layer(lost), reference.out, bound)
        twice = weights.clone()
        twice[0, k] *= 2
        with pytest.raises(AssertionError):
            assert_within(layer(ids, twice), reference.out, bound)


def test_lost_rank_exceeds_the_bounds() -> None:
    config = moe_config(hidden=512, num_experts=8, top_k=8)
    rows, ids, weights, experts = moe_case(config, 4, 256, "uniform")
    reference = reference_moe(config, rows, ids, weights, experts.__getitem__, num_ranks=8)
    for rank in range(8):
        without = ids.masked_fill(ids == rank, -1)
        got = reference_moe(config, rows, without, weights, experts.__getitem__, num_ranks=8).out.float()
        wrong = (got.double() - reference.out).abs() > reference.likely_bound
        assert wrong.any(dim=1).all(), rank


def test_parts_need_only_their_own_experts_and_add_up() -> None:
    config = moe_config()
    rows, ids, weights, experts = moe_case(config, 4, 16, "uniform")
    whole = reference_moe(config, rows, ids, weights, experts.__getitem__, num_ranks=4)
    parts = []
    for rank in range(4):
        own = {e: experts[e] for e in local_experts(rank, 6, 4)}
        parts.append(reference_part(config, rows, ids, weights, own.__getitem__, 4, rank))
    summed = reference_sum(config, parts)
    assert all(torch.equal(getattr(summed, n), getattr(whole, n)) for n in ("out", "bound", "likely_bound"))
    with pytest.raises(ValueError, match=r"topk_ids \(4, 3\), topk_weights \(4, 2\)"):
        reference_moe(config, rows, ids, weights[:, :2], experts.__getitem__, num_ranks=4)


def test_a_row_with_nan_shows_and_leaves_the_others() -> None:
    config = moe_config()
    rows, ids, weights, experts = moe_case(config, 4, 16, "uniform")
    clean = reference_moe(config, rows, ids, weights, experts.__getitem__, num_ranks=2)
    rows[2, 7] = math.nan
    got = reference_moe(config, rows, ids, weights, experts.__getitem__, num_ranks=2)
    assert got.out[2].isnan().all()
    assert torch.equal(got.out[[0, 1, 3]], clean.out[[0, 1, 3]])
    assert_within(got.out.float(), got.out, got.likely_bound)
    with pytest.raises(AssertionError, match=r"out\[2, 0\]: wanted nan"):
        assert_within(clean.out.float(), got.out, got.likely_bound)
    with pytest.raises(AssertionError, match="got nan"):
        assert_within(got.out.float(), clean.out, clean.likely_bound)
