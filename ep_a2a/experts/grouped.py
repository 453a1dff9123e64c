"""Local experts by the kernels of `experts.cu`: no synchronisation, so a CUDA graph can hold them; correct, not fast.

The numbers are those of `plain`, each product one chain of fp32 sums in the order of its columns. Pairs are grouped by
expert on the device (`route.groups`), in tiles of 8 slots; launches and memory are for the worst case that the shapes
allow, work for the counts of the round. Memory, from torch's allocator for the time of the call:
R * max_tokens * K slots (and padding) times I values, 2 bytes each, or 4 where the intermediate is re-quantised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_a2a import abi, route
from ep_a2a.experts.activations import GELU_TANH, RELU2, SILU, Activation
from ep_a2a.experts.weights import ExpertWeights, GateOrder
from ep_a2a.layout import BF16, EXPERT_TILE_ROWS, Format
from ep_a2a.received import Received

_CURVES = [SILU.curve, GELU_TANH.curve, RELU2.curve]  # in the order of enum Curve


def run_grouped(
    weights: ExpertWeights,
    first_expert: int,
    received: object,
    outbox: Tensor,
    activation: Activation,
    intermediate: Format,
) -> None:
    """Apply the local experts to all valid rows of the open round, as `plain.run_plain` does.

    Local; current stream; no synchronisation; may be captured in a graph; the same bits every run. Weights that are not
    contiguous or do not start on a multiple of 4 bytes are copied in every call.

    Raises TypeError where `received` is not what a dispatch returned, ValueError for an activation without a kernel or
    too many experts or slots; RoundError (the round is not open), StickyError, ClosedError.
    """
    if not isinstance(received, Received):
        raise TypeError(
            f"received is a {type(received).__name__}: these kernels need the Received that dispatch returns"
        )
    if activation.curve not in _CURVES:
        raise ValueError(f"activation {activation}: there are kernels for the curves of silu, gelu_tanh and relu2")
    channel, groups = route.groups(received, range(first_expert, first_expert + weights.num_experts), EXPERT_TILE_ROWS)
    inner = weights.intermediate
    order = weights.gate_order if weights.num_matrices == 2 else GateOrder.GATE_FIRST
    dtype = torch.bfloat16 if intermediate == BF16 else torch.float32
    values = route._empty((groups.params.num_slots, inner), dtype, outbox.device)
    tensors = {name: _dense(tensor) for name, tensor in weights.tensors().items()}
    params = abi.ExpertsParams(
        coding=abi.CODING.get(received.payload, 0),
        number=abi.NUMBER.get(received.rows.dtype, 0),
        weights_coding=abi.CODING[weights.format],
        intermediate_coding=abi.CODING.get(intermediate, 0),
        curve=_CURVES.index(activation.curve),
        num_matrices=weights.num_matrices,
        gate_row=inner if order is GateOrder.UP_FIRST else 0,
        up_row={GateOrder.GATE_FIRST: inner, GateOrder.UP_FIRST: 0, GateOrder.INTERLEAVED: 1}[order],
        row_step=2 if order is GateOrder.INTERLEAVED else 1,
        to_number=abi.NUMBER[outbox.dtype],
        alpha=activation.alpha,
        beta=activation.beta,
        limit=activation.limit,
        intermediate=values.data_ptr(),
        to=outbox.data_ptr(),
        to_strides=tuple(outbox.stride()),
        w13=_matrix(tensors, "w13", "b13"),
        w2=_matrix(tensors, "w2", "b2"),
        route=groups.params,
    )
    channel.experts(params)


def _matrix(tensors: dict[str, Tensor], name: str, bias_name: str) -> abi.ExpertMatrix:
    codes, bias = tensors[name], tensors.get(bias_name)
    found = (tensors.get(n) for n in (f"{name}_scales", f"{name}_global", bias_name))
    scales, global_scale, bias_at = (None if tensor is None else tensor.data_ptr() for tensor in found)
    return abi.ExpertMatrix(
        codes=codes.data_ptr(),
        scales=scales,
        global_scale=global_scale,
        bias=bias_at,
        num_rows=codes.shape[1],
        num_columns=codes.shape[2] * 2,
        bias_number=0 if bias is None else abi.NUMBER[bias.dtype],
    )


def _dense(tensor: Tensor) -> Tensor:
    """`tensor` as the kernels read it: contiguous, on a multiple of 4 bytes."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 4 else tensor
