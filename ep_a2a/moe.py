"""A Mixture-of-Experts layer over all ranks: dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ep_a2a import api
from ep_a2a.errors import EpError
from ep_a2a.experts import LocalExperts

if TYPE_CHECKING:
    from ep_a2a.api import A2A, Received


class Experts(Protocol):
    """Anything that turns received rows into outbox rows, such as `LocalExperts`."""

    def __call__(self, received: Received, outbox: Tensor) -> None:
        """Write the result of every valid row of `received` into `outbox` [num_ranks, max_tokens, H]."""


class MoELayer:
    """Routed experts as one call; several layers may share an `A2A`.

    a2a      from `connect`
    experts  of this rank

    Raises TypeError where `experts` cannot be called, ValueError where `LocalExperts` are not those of this rank.
    """

    def __init__(self, a2a: A2A, experts: Experts) -> None:
        if not callable(experts):
            raise TypeError(
                f"experts is a {type(experts).__name__}: it must be callable, as LocalExperts(weights, ...) is"
            )
        if isinstance(experts, LocalExperts):
            mine, first = a2a.local_experts, experts.first_expert
            given = range(first, first + experts.weights.num_experts)
            if given != mine:
                raise ValueError(
                    f"experts {given.start} to {given.stop - 1} are given, rank {a2a.rank} has {mine.start} to "
                    f"{mine.stop - 1} (a2a.local_experts)"
                )
        self.a2a = a2a
        self.experts = experts

    def __call__(
        self,
        x: Tensor | tuple[Tensor, ...],
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_tokens: Tensor | None = None,
        extra: Sequence[Tensor] = (),
        channel: int = 0,
    ) -> Tensor:
        """Send the tokens to their experts, through them, and back. Collective: one round on `channel`.

        x             [T, H] rows, or the planes of encoded rows, as `dispatch` takes them
        topk_ids      int32 [T, K] global experts, -1 = not routed
        topk_weights  fp32 [T, K]
        num_tokens    int32 on the device, how many of the T tokens count; None = all
        extra         uint8 [T, bytes] for each of `config.extra_planes`, which the experts find in `received.extra`
        channel       which independent round

        Returns [T, H] in the combine format; bf16 where that is encoded.

        Raises what `dispatch` and `combine` raise. When the experts raise, the round is released first, so that the
        object can go on where all ranks ended the round alike; a rank that combines meanwhile sees RoundMismatch.
        """
        rows = self.a2a.scratch(channel) if self.a2a.config.combine.is_encoded else None
        received, handle = api.dispatch(
            self.a2a, x, topk_ids, topk_weights, num_tokens=num_tokens, extra=extra, channel=channel
        )
        try:
            self.experts(received, self.a2a.outbox(channel) if rows is None else rows)
        except Exception as error:
            try:
                api.release(self.a2a, handle)
            except EpError as failed:
                raise error from failed  # the cause of it all first; a sticky error is raised again by the next call
            raise
        return api.combine(self.a2a, handle, rows=rows)
