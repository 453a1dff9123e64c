"""Local experts in plain torch: the slow path that runs everywhere and that the kernels are compared with.

For every (row, local expert) pair: rows and weights decoded to fp32, two matrix products in fp32 with their biases, the
activation in between, its result rounded to bf16 or to 4 bits (straight from fp32; NVFP4 with a global scale for each
row), times the routing weight; the pairs of a row are added in ascending k in fp32, and the sum is rounded once, into
the outbox. Only valid rows of the outbox are written.

Rows enter the products in tiles of 32, padded with zeros, so that every product has the same shape whatever the load.
The bits of a row are the same in every run of a process with one setting of torch (threads, matmul precision). On a CPU
they have also been the same whatever other rows there were and wherever in a tile a row stood; BLAS libraries do not
promise that, and nothing here relies on it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ep_a2a.experts.activations import SILU, Activation
from ep_a2a.experts.weights import ExpertWeights
from ep_a2a.layout import BF16, MXFP4, NVFP4, Format
from ep_a2a.testing.formats import decode_format, encode_format

TILE_ROWS = 32
INTERMEDIATES = (BF16, NVFP4, MXFP4)
OUTBOX_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Received(Protocol):
    """What experts read of a round: planes [source rank, max_tokens, ...], strided views or not."""

    @property
    def payload(self) -> Format: ...
    @property
    def hidden(self) -> int: ...
    @property
    def rows(self) -> Tensor: ...  # and scales: [..., H / hidden_per_element] of the payload's columns
    @property
    def scales(self) -> Tensor | None: ...
    @property
    def global_scale(self) -> Tensor | None: ...  # NVFP4: fp32 [...]
    @property
    def ids(self) -> Tensor: ...  # int32 [..., K]; any value where the expert is not here
    @property
    def weights(self) -> Tensor: ...  # fp32 [..., K]
    @property
    def valid(self) -> Tensor: ...  # bool [...]: this row was routed here in this round


def run_plain(
    weights: ExpertWeights,
    first_expert: int,
    received: Received,
    outbox: Tensor,
    activation: Activation,
    intermediate: Format,
) -> None:
    """Apply the local experts to all valid rows; see the head of this module. Local; synchronises with the device.

    Needs fp32 memory for (pairs + valid rows) * H values and for one decoded expert.
    """
    valid = received.valid
    rows = decode_rows(received, valid)
    ids = received.ids[valid] - first_expert  # garbage may wrap around, but not into the range below
    here = (ids >= 0) & (ids < weights.num_experts)
    pair_of = here.flatten().cumsum(0).reshape(here.shape) - 1  # pairs are numbered by row, then by k
    routing = received.weights[valid].float()
    contributions = rows.new_empty(int(here.sum()), received.hidden)
    for expert in sorted(set(ids[here].tolist())):
        row, k = (ids == expert).nonzero(as_tuple=True)
        y = expert_product(rows[row], weights.decoded(expert), activation, intermediate)
        contributions[pair_of[row, k]] = y * routing[row, k].unsqueeze(1)
    total = torch.zeros_like(rows)
    for k in range(ids.shape[1]):
        row = here[:, k].nonzero().flatten()
        total[row] += contributions[pair_of[row, k]]
    outbox[valid] = total.to(outbox.dtype)


def decode_rows(received: Received, valid: Tensor) -> Tensor:
    """The valid rows in fp32, [number of valid rows, H], by source rank, then token. Local."""
    planes = []
    for name in received.payload.plane_names:
        plane: Tensor | None = getattr(received, name)
        if plane is None:
            raise ValueError(f"{received.payload} rows need the plane {name}, got None")
        bits = plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane  # torch cannot index all small dtypes
        planes.append(bits[valid].view(plane.dtype))
    return decode_format(planes, received.payload)


def expert_product(
    rows: Tensor,
    expert: tuple[Tensor, Tensor, Tensor, Tensor],
    activation: Activation = SILU,
    intermediate: Format = BF16,
) -> Tensor:
    """An expert (w13, w2, b13, b2, as `decoded`) on rows [n, H] fp32 -> [n, H] fp32, in tiles of 32 rows. Local."""
    w13, w2, b13, b2 = expert
    y = torch.empty_like(rows)
    for start in range(0, rows.shape[0], TILE_ROWS):
        part = rows[start : start + TILE_ROWS]
        tile = rows.new_zeros(TILE_ROWS, rows.shape[1])
        tile[: part.shape[0]] = part
        m = activation(*(tile @ w13.T + b13).chunk(activation.num_matrices, dim=1))
        m = decode_format(encode_format(m, intermediate), intermediate)
        y[start : start + TILE_ROWS] = (m @ w2.T + b2)[: part.shape[0]]
    return y
