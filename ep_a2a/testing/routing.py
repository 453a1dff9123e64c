"""Routings for tests and benches: which experts each token asks for, and with which weights.

Every generator has the same signature, so that a test can run through `ROUTINGS`:

    (num_tokens, num_experts, top_k, generator) -> ids int32 [T, K], weights fp32 [T, K]

All are seeded by the `torch.Generator`, and lie on its device. The ids of a token are distinct except in
`duplicates`; -1 stands only in `holes`, `one_expert` and `nothing`, and carries a weight like any other place, which
must have no effect. Weights are positive and sum to 1 over a token. Distinct ids need top_k <= num_experts, else
ValueError.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

Routing = Callable[[int, int, int, Generator], tuple[Tensor, Tensor]]

ZIPF_EXPONENT = 1.2
HOLE_SHARE = 0.3  # of the places
EMPTY_TOKEN_SHARE = 0.125  # of the tokens, on top


def uniform(num_tokens: int, num_experts: int, top_k: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Every expert is as likely as any other."""
    _check(num_tokens, num_experts, top_k, distinct_experts=num_experts)
    ids = _rand(num_tokens, num_experts, generator).topk(top_k, dim=1).indices
    return ids.int(), _weights(num_tokens, top_k, generator)


def zipf(num_tokens: int, num_experts: int, top_k: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Expert popularity falls as 1 / rank^1.2, in a random order of experts; a token draws without replacement."""
    _check(num_tokens, num_experts, top_k, distinct_experts=num_experts)
    device = generator.device
    popularity = torch.arange(1, num_experts + 1, device=device).double().log() * -ZIPF_EXPONENT
    popularity = popularity[torch.randperm(num_experts, generator=generator, device=device)]
    noise = _rand(num_tokens, num_experts, generator, torch.float64).clamp_(min=1e-300)
    ids = (popularity - noise.log().neg().log()).topk(top_k, dim=1).indices  # Gumbel noise: the k largest are a draw
    return ids.int(), _weights(num_tokens, top_k, generator)


def all_to_one(num_tokens: int, num_experts: int, top_k: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Every token asks for the same neighbouring experts: those of one rank, where ranks own a multiple of that run.

    The run is the power of two that is not below top_k: 32 experts for top-22.
    """
    _check(num_tokens, num_experts, top_k, distinct_experts=num_experts)
    run = 1 << (top_k - 1).bit_length()
    first = run * int(_randint(max(1, num_experts // run), (1,), generator))
    ids = torch.arange(first, first + top_k, device=generator.device).expand(num_tokens, top_k).contiguous()
    return ids.int(), _weights(num_tokens, top_k, generator)


def one_expert(num_tokens: int, num_experts: int, top_k: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Every token asks for one and the same expert, in its last place; its other places are -1."""
    _check(num_tokens, num_experts, top_k)
    ids = torch.full((num_tokens, top_k), -1, dtype=torch.int32, device=generator.device)
    ids[:, -1] = _randint(num_experts, (1,), generator)
    return ids, _weights(num_tokens, top_k, generator)


def few_ranks(num_tokens: int, num_experts: int, top_k: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Uniform over the first quarter of the experts (or the first top_k): the ranks behind it receive nothing."""
    _check(num_tokens, num_experts, top_k, distinct_experts=num_experts)
    return uniform(num_tokens, max(top_k, -(-num_experts // 4)), top_k, generator)


def empty_ranks(num_tokens: int, num_experts: int, top_k: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Uniform over the last half of the experts (or the last top_k): the ranks before it receive nothing."""
    _check(num_tokens, num_experts, top_k, distinct_experts=num_experts)
    num_used = max(top_k, num_experts // 2)
    ids, weights = uniform(num_tokens, num_used, top_k, generator)
    return ids + (num_experts - num_used), weights


def holes(num_tokens: int, num_experts: int, top_k: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Uniform, with about a third of the places -1, and about one token in eight routed nowhere."""
    ids, weights = uniform(num_tokens, num_experts, top_k, generator)
    gone = _rand(num_tokens, top_k, generator) < HOLE_SHARE
    gone |= _rand(num_tokens, 1, generator) < EMPTY_TOKEN_SHARE
    return ids.masked_fill(gone, -1), weights


def nothing(num_tokens: int, num_experts: int, top_k: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """No token goes anywhere: all ids are -1."""
    _check(num_tokens, num_experts, top_k)
    ids = torch.full((num_tokens, top_k), -1, dtype=torch.int32, device=generator.device)
    return ids, _weights(num_tokens, top_k, generator)


def duplicates(num_tokens: int, num_experts: int, top_k: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Uniform with replacement; where top_k > 1 the first and the last id of a token are equal."""
    _check(num_tokens, num_experts, top_k)
    ids = _randint(num_experts, (num_tokens, top_k), generator)
    ids[:, -1] = ids[:, 0]
    return ids, _weights(num_tokens, top_k, generator)


ROUTINGS: dict[str, Routing] = {
    routing.__name__: routing
    for routing in (uniform, zipf, all_to_one, one_expert, few_ranks, empty_ranks, holes, nothing, duplicates)
}


def _weights(num_tokens: int, top_k: int, generator: Generator) -> Tensor:
    weights = _rand(num_tokens, top_k, generator) + 0.1
    return weights / weights.sum(dim=1, keepdim=True)


def _rand(num_rows: int, num_columns: int, generator: Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(num_rows, num_columns, generator=generator, dtype=dtype, device=generator.device)


def _randint(below: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randint(below, shape, generator=generator, dtype=torch.int32, device=generator.device)


def _check(num_tokens: int, num_experts: int, top_k: int, distinct_experts: int | None = None) -> None:
    if num_tokens < 0 or num_experts < 1 or top_k < 1:
        raise ValueError(
            f"num_tokens={num_tokens}, num_experts={num_experts}, top_k={top_k}: must be at least 0, 1 and 1"
        )
    if distinct_experts is not None and top_k > distinct_experts:
        raise ValueError(f"top_k={top_k}: distinct ids, but there are {distinct_experts} experts; see `duplicates`")
