"""What dispatch must deliver and what combine must return, bit for bit, computed from the inputs of all ranks.

dispatch   a token goes once to each distinct rank that owns one of its legal ids; its row there has the index that it
           has at its source. Ids outside [0, num_experts) go nowhere; the ids plane carries them unchanged.
combine    acc = 0 in fp32; for the token's ranks in ascending order acc += float(outbox row); one rounding to the
           combine format, to nearest, ties to even. A token that went nowhere is 0. Rows for an encoded combine go
           through its encoder and decoder first, and the result is bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_a2a.layout import Format, Shape, local_experts
from ep_a2a.testing.formats import decode_format, encode_format


@dataclass(frozen=True)
class Expected:
    """What one rank must hold after dispatch; the contents of rows that are not valid mean nothing (here: zeros)."""

    planes: dict[str, Tensor]  # each [num_ranks, max_tokens, ...], by source rank
    valid: Tensor  # [num_ranks, max_tokens] bool
    num_tokens: Tensor  # [num_ranks] int32, tokens that each source dispatched in this round


def payload_planes(config: Shape, x: Tensor) -> dict[str, Tensor]:
    """The planes in which rows travel, by name: rows, and scales and global_scale where the format has them. Local.

    x  [T, H] bfloat16, float16 or float32
    """
    return dict(zip(config.payload.plane_names, encode_format(x, config.payload), strict=True))


def decode_planes(config: Shape, planes: Mapping[str, Tensor]) -> Tensor:
    """The fp32 values [..., H] that `payload_planes` (or a rank's received planes) stand for. Local."""
    return decode_format([planes[name] for name in config.payload.plane_names], config.payload)


def destinations(ids: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """To which ranks each token goes: ids int32 [T, K], any values -> bool [T, num_ranks]. Local."""
    owned = [(e.start, e.stop) for e in (local_experts(rank, num_experts, num_ranks) for rank in range(num_ranks))]
    mask = [((ids >= start) & (ids < stop)).any(dim=1) for start, stop in owned]
    return torch.stack(mask, dim=1)


def reference_dispatch(config: Shape, inputs: Sequence[Mapping[str, Tensor]], rank: int) -> Expected:
    """What `rank` must hold after all ranks dispatched. Local; slow.

    config  num_experts, top_k and max_tokens are used
    inputs  for each source rank its planes by name: "ids" int32 [T, K], and any others ("weights", "rows", "scales",
            "global_scale", "extra0", ...) as [T, ...]; T may differ between ranks, the names may not
    rank    the receiver

    Returns `Expected`, with a plane for each name in `inputs`.

    Raises ValueError for more than max_tokens tokens, another top_k, or planes that do not fit together.
    """
    num_ranks = len(inputs)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank={rank}: inputs hold {num_ranks} ranks")
    valid = torch.zeros(num_ranks, config.max_tokens, dtype=torch.bool)
    planes = {
        name: torch.zeros(num_ranks, config.max_tokens, *plane.shape[1:], dtype=plane.dtype)
        for name, plane in inputs[0].items()
    }
    for source, columns in enumerate(inputs):
        ids = columns["ids"]
        num_tokens = ids.shape[0]
        if num_tokens > config.max_tokens or ids.shape[1:] != (config.top_k,):
            raise ValueError(
                f"rank {source}: ids are {tuple(ids.shape)}, max_tokens={config.max_tokens}, top_k={config.top_k}"
            )
        if columns.keys() != planes.keys() or any(c.shape[0] != num_tokens for c in columns.values()):
            shapes = {name: tuple(c.shape) for name, c in columns.items()}
            raise ValueError(f"rank {source}: planes {shapes}; all need {num_tokens} rows and the names {list(planes)}")
        goes_here = destinations(ids, config.num_experts, num_ranks)[:, rank]
        valid[source, :num_tokens] = goes_here
        for name, column in columns.items():
            for token in goes_here.nonzero().flatten().tolist():
                planes[name][source, token] = column[token]
    counts = torch.tensor([columns["ids"].shape[0] for columns in inputs], dtype=torch.int32)
    return Expected(planes, valid, counts)


def reference_combine(
    outboxes: Sequence[Tensor], masks: Sequence[Tensor], combine: Format | None = None
) -> list[Tensor]:
    """What combine must return on every rank, bit for bit. Local; slow.

    outboxes  of each rank: [num_ranks, max_tokens, H] in the combine format, first index = rank that gets the row back
    masks     of each rank: bool [T, num_ranks], where its tokens went (`destinations`)
    combine   the combine format where it is encoded; None = that of the outboxes

    Returns for each rank [T, H] in the combine format, bf16 where that is encoded. Outbox rows that no mask names are
    not read.
    """
    if len(outboxes) != len(masks):
        raise ValueError(f"{len(outboxes)} outboxes and {len(masks)} masks: one of each for every rank")
    results = []
    for source, mask in enumerate(masks):
        acc = torch.zeros(mask.shape[0], outboxes[source].shape[-1], dtype=torch.float32)
        for rank, outbox in enumerate(outboxes):
            rows = decode_format(encode_format(outbox[source], combine), combine) if combine else outbox[source]
            for token in mask[:, rank].nonzero().flatten().tolist():
                acc[token] += rows[token].float()
        results.append(acc.to(combine.result_dtype if combine else outboxes[source].dtype))
    return results
