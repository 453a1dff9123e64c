"""What a bench of rounds measures: cases, their inputs, the bytes they move, and whether what came is right.

Inputs are made on the device that runs them, for all ranks at once from one seed, so that every rank and every variant
sees the same ids, and popular experts are the same for all sources. Checks compare whole planes there, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ep_a2a
from ep_a2a import layout, quant, testing

OPERATIONS = ("dispatch", "combine", "pair")
PAYLOADS = {fmt.name.lower(): fmt for fmt in layout.PAYLOAD_FORMATS}
TIMEOUT_S, FIRST_TIMEOUT_S = 20.0, 60.0  # a round that hangs costs no more time
NUM_VALUES = 8  # of a rank's results: sums over 32 ranks stay below 256, which bf16 and fp16 hold exactly


@dataclass(frozen=True)
class Case:
    """One shape and routing of a world, before it is measured."""

    ranks: int
    tokens: int
    hidden: int
    top_k: int
    num_experts: int
    payload: str
    routing: str
    num_sms: int | None = None

    def __str__(self) -> str:
        return f"EP{self.ranks}, {self.tokens} tokens, {self.routing}"

    @property
    def format(self) -> layout.Format:
        """In which tokens travel."""
        return PAYLOADS[self.payload]

    def config(self) -> ep_a2a.Config:
        """What ranks connect with."""
        return ep_a2a.Config(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens=self.tokens,
            payload=self.format,
            num_sms=self.num_sms,
            timeout_s=TIMEOUT_S,
            first_timeout_s=FIRST_TIMEOUT_S,
        )

    def fields(self) -> dict[str, Any]:
        """Those of a row."""
        names = ("ranks", "tokens", "hidden", "top_k", "payload", "routing", "num_sms")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Inputs:
    """What all ranks dispatch, and where it goes."""

    x: Tensor  # bf16 [R, T, H], of which the payload's planes are made
    planes: dict[str, Tensor]  # each [R, T, ...]: the payload's, then ids int32 [R, T, K] and weights fp32 [R, T, K]
    goes: Tensor  # bool [R, T, R]: source rank, token, destination rank
    num_value_planes: int

    def of(self, rank: int, encoded: bool) -> tuple[Any, Tensor, Tensor]:
        """x, ids and weights of a rank, each in memory of its own, aligned as torch's allocator does."""
        *values, ids, weights = (plane[rank].clone() for plane in self.planes.values())
        x = self.x[rank].clone() if not encoded else tuple(values) if self.num_value_planes > 1 else values[0]
        return x, ids, weights

    def encoding_bytes(self) -> int:
        """What is read more where the values come in bf16."""
        values = list(self.planes.values())[: self.num_value_planes]
        return self.x.nbytes - sum(plane.nbytes for plane in values)


def make(case: Case, device: str) -> Inputs:
    """The inputs of a case, equal in every process."""
    generator = torch.Generator(device).manual_seed(case.tokens * 131 + case.ranks)
    shape, routing = (case.ranks, case.tokens), testing.ROUTINGS[case.routing]
    ids, weights = routing(case.ranks * case.tokens, case.num_experts, case.top_k, generator)
    x = torch.randn(*shape, case.hidden, generator=generator, device=device, dtype=torch.bfloat16)
    values = dict(zip(case.format.plane_names, quant.encode(x, case.format)))
    planes = values | {"ids": ids.view(*shape, -1), "weights": weights.view(*shape, -1)}
    goes = testing.destinations(ids, case.num_experts, case.ranks).view(*shape, case.ranks)
    return Inputs(x, planes, goes, len(values))


@dataclass(frozen=True)
class Traffic:
    """Bytes that all ranks must read and write, at least."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Both."""
        return self.read + self.written


def traffic(case: Case, goes: Tensor) -> dict[str, Traffic]:
    """Of each operation: a source row is read once and written to each distinct rank, padded; results come back."""
    planes = layout.planes(case.format, case.hidden, case.top_k)
    tokens, pairs = case.ranks * case.tokens, int(goes.sum())
    source = sum(plane.source_bytes + plane.tail_bytes for plane in planes)
    sent = Traffic(tokens * source, pairs * sum(plane.row_bytes for plane in planes))
    back = Traffic(pairs * 2 * case.hidden, tokens * 2 * case.hidden)
    return {"dispatch": sent, "combine": back, "pair": Traffic(sent.read + back.read, sent.written + back.written)}


# ---- checks ------------------------------------------------------------------------------------------------------


def results(rank: int, source: int, like: Tensor) -> Tensor:
    """What `rank` answers to the tokens of `source`: small integers [T, H] in fp32, other ones at every place."""
    token, column = (torch.arange(n, dtype=torch.int32, device=like.device) for n in like.shape)
    return ((3 * rank + 5 * source + 7 * token[:, None] + column) % NUM_VALUES).float()


def fill_outboxes(a2as: Sequence[ep_a2a.A2A]) -> None:
    """Write results for all rows; they stay there."""
    for a2a in a2as:
        for source, box in enumerate(a2a.outbox()):
            box.copy_(results(a2a.rank, source, box))


def poison(received: ep_a2a.Received) -> None:
    """Make all that an earlier round left differ from what is sent."""
    for name in (*received.payload.plane_names, "ids", "weights"):
        plane = getattr(received, name)
        bits(plane, plane)[0].fill_(-1)


def check_received(received: ep_a2a.Received, inputs: Inputs, rank: int) -> None:
    """Rows, ids and weights of all sources are those that were sent to this rank, bit for bit; no others are valid."""
    here = inputs.goes[..., rank]
    if (received.num_tokens != here.shape[1]).any():
        raise AssertionError(f"rank {rank}: {received.num_tokens.tolist()} tokens of the sources, not {here.shape[1]}")
    expect_none((received.valid != here).sum(), f"rank {rank}: rows are valid that should not be, or the reverse")
    for name, sent in inputs.planes.items():
        got, wanted = bits(getattr(received, name), sent)
        wrong = got != wanted
        wrong = wrong.any(dim=2) if wrong.dim() == 3 else wrong
        expect_none((wrong & here).sum(), f"rank {rank}: rows of plane {name} differ from what was sent")


def check_out(out: Tensor, inputs: Inputs, rank: int) -> None:
    """The sums of what all ranks answered to the tokens of this one."""
    wanted = torch.zeros(out.shape, device=out.device)
    for peer in range(inputs.goes.shape[2]):
        wanted += inputs.goes[rank, :, peer, None] * results(peer, rank, out)
    expect_none((out.float() != wanted).any(dim=1).sum(), f"rank {rank}: rows of the combined result differ")


def expect_none(count: Tensor, what: str) -> None:
    """Raise AssertionError with the number unless it is 0."""
    if int(count):
        raise AssertionError(f"{what}: {int(count)}")


def bits(got: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Both as integers, as wide as their rows allow."""
    if got.dim() == 2:  # one number a row
        return got.view(torch.int32), wanted.view(torch.int32)
    as_bytes = got.view(torch.uint8)
    wide = as_bytes.shape[-1] % 4 == 0
    dtype = torch.int32 if wide else torch.int8
    return as_bytes.view(dtype), wanted.view(torch.uint8).view(dtype)
