"""The experts of one rank: received rows in, one reduced row for each of them into the outbox.

ExpertWeights    4-bit weights and biases of the local experts, in the checkpoint's layout; GateOrder of their rows
LocalExperts     applies them to a round
activations      SILU, GELU_TANH, RELU2, swigluoai(...)
"""

from __future__ import annotations

from torch import Tensor

from ep_a2a.experts import activations
from ep_a2a.experts.activations import SILU, Activation
from ep_a2a.experts.grouped import run_grouped
from ep_a2a.experts.plain import INTERMEDIATES, OUTBOX_DTYPES, Received, run_plain
from ep_a2a.experts.weights import ExpertWeights, GateOrder
from ep_a2a.layout import BF16, Format

__all__ = ["Activation", "ExpertWeights", "GateOrder", "LocalExperts", "Received", "activations"]


class LocalExperts:
    """The contiguous run of experts that a rank owns: global ids first_expert, first_expert + 1, ...

    weights       their weights
    first_expert  the global id of the first one: `a2a.local_experts.start`
    activation    between the two products
    intermediate  how its result enters the second product: BF16, or re-quantised to NVFP4 or MXFP4, each row by itself

    Raises ValueError for a negative first_expert, an activation that needs another number of matrices, a format that
    is not known or does not fit the intermediate size.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        first_expert: int,
        activation: Activation = SILU,
        intermediate: Format = BF16,
    ) -> None:
        if first_expert < 0:
            raise ValueError(f"first_expert={first_expert}: must be 0 or more")
        if activation.num_matrices != weights.num_matrices:
            raise ValueError(
                f"{activation} needs w13 with {activation.num_matrices} x intermediate = "
                f"{activation.num_matrices * weights.intermediate} rows, it has {weights.w13.shape[1]}"
            )
        if intermediate not in INTERMEDIATES or weights.intermediate % intermediate.hidden_multiple:
            legal = ", ".join(f"{f} (a multiple of {f.hidden_multiple})" for f in INTERMEDIATES)
            raise ValueError(f"intermediate={intermediate!r} of {weights.intermediate} values: must be {legal}")
        self.weights = weights
        self.first_expert = first_expert
        self.activation = activation
        self.intermediate = intermediate

    def __call__(self, received: Received, outbox: Tensor) -> None:
        """Write into the outbox, for every valid row, the weighted sum over its local experts in ascending k.

        Local; the same bits every run. Rows that are not valid are neither read nor written. On a CPU in plain torch;
        on a GPU by kernels, on the current stream, without synchronisation, so that a graph can hold them: see
        `grouped` for their memory.

        received  planes [num_ranks, max_tokens, ...]; ids that are not local are skipped, equal ids count twice. On a
                  GPU it is what dispatch returned, of the round that is open
        outbox    [num_ranks, max_tokens, H] bfloat16, float16 or float32, strided or not

        Raises TypeError for another outbox dtype, ValueError for shapes or devices that do not fit; on a GPU as
        `grouped.run_grouped` too.
        """
        if outbox.dtype not in OUTBOX_DTYPES:
            raise TypeError(f"outbox is {outbox.dtype}: must be bfloat16, float16 or float32")
        if received.hidden != self.weights.hidden:
            raise ValueError(f"received rows have hidden={received.hidden}, the weights hidden={self.weights.hidden}")
        wanted = (*received.valid.shape, received.hidden)
        if outbox.shape != wanted:
            raise ValueError(f"outbox is {tuple(outbox.shape)}: must be {wanted}")
        devices = (received.rows.device, outbox.device, self.weights.device)
        if len(set(devices)) > 1:
            raise ValueError("rows are on {}, the outbox on {}, the weights on {}: must be one".format(*devices))
        run = run_grouped if outbox.is_cuda else run_plain
        run(self.weights, self.first_expert, received, outbox, self.activation, self.intermediate)
