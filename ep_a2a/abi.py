"""The mirror of `cuda/abi.h`: its structs, as ctypes has them, and its numbers. What each field means stands there."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

import torch

from ep_a2a.layout import FP8, MAX_PLANES, MXFP4, MXFP8, NVFP4

PHASE_DISPATCH, PHASE_COMBINE, PHASE_RELEASE = 1, 2, 3
NUM_BAD_INPUTS = 3
NUMBER = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
CODING = {NVFP4: 1, MXFP4: 2, FP8: 3, MXFP8: 4}  # 0 for the formats that are numbers as they are
NO_BAD_ROUTING = 2**64 - 1


class ChannelState(ctypes.Structure):
    _fields_ = [
        ("half_rounds", c_uint64),
        ("sticky", c_uint64),
        ("bad_routing", c_uint64),
        ("timeout_ns", c_uint64),
        ("first_timeout_ns", c_uint64),
        ("send_counter", c_uint32),
        ("pull_counter", c_uint32),
        ("num_tokens", c_int32),
        ("num_failures", c_uint32),
        ("reserved", c_uint8 * 72),
    ]


class Status(ctypes.Structure):
    _fields_ = [
        ("failure", c_uint32),
        ("phase", c_uint32),
        ("culprit", c_uint32),
        ("late_in", c_uint32),
        ("reported_by", c_uint32),
        ("reserved", c_uint32),
        ("epoch_wanted", c_uint64),
        ("epoch_seen", c_uint64),
        ("waited_ns", c_uint64),
    ]


class InputRecord(ctypes.Structure):
    _fields_ = [
        ("present", c_uint32),
        ("token", c_int32),
        ("position", c_int32),
        ("value", c_int32),
        ("limit", c_int32),
        ("reserved", c_int32),
    ]


class Channel(ctypes.Structure):
    _fields_ = [
        ("peers", c_void_p),
        ("state", c_void_p),
        ("status", c_void_p),
        ("inputs", c_void_p),
        ("rank", c_uint32),
        ("num_ranks", c_uint32),
        ("max_tokens", c_uint32),
        ("bitmap_words", c_uint32),
        ("mask_words", c_uint32),
        ("flag_parts", c_uint32),
        ("num_experts", c_uint32),
        ("reserved", c_uint32),
        ("dispatch_flags_offset", c_uint64),
        ("end_flags_offset", c_uint64),
        ("abort_words_offset", c_uint64),
        ("bitmap_offset", c_uint64),
        ("source_counts_offset", c_uint64),
        ("masks_offset", c_uint64),
    ]


class Plane(ctypes.Structure):
    _fields_ = [
        ("offset", c_uint64),
        ("row_bytes", c_uint32),
        ("tile_offset", c_uint32),
    ]


class Divisor(ctypes.Structure):
    _fields_ = [
        ("multiplier", c_uint32),
        ("shift", c_uint32),
    ]


class RowSource(ctypes.Structure):
    _fields_ = [
        ("rows", c_void_p),
        ("tail", c_void_p),
        ("num_bytes", c_uint32),
        ("align_bytes", c_uint32),
        ("tail_stride", c_uint32),
        ("reserved", c_uint32),
    ]


class DispatchParams(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("num_planes", c_uint32),
        ("num_rows", c_uint32),
        ("top_k", c_uint32),
        ("experts_per_rank", c_uint32),
        ("num_longer_ranks", c_uint32),
        ("per_longer_rank", Divisor),
        ("per_rank", Divisor),
        ("phased", c_uint32),
        ("num_ctas", c_uint32),
        ("shares_log2", c_uint32),
        ("share_ranks", c_uint32),
        ("flags_apart", c_uint32),
        ("num_threads", c_uint32),
        ("shared_bytes", c_uint32),
        ("waits", c_uint32),
        ("ids_plane", c_uint32),
        ("whole_planes", c_uint32),
        ("narrow_planes", c_uint32),
        ("is_large", c_uint32),
        ("topk_ids", c_void_p),
        ("num_tokens", c_void_p),
        ("channel", Channel),
        ("planes", Plane * MAX_PLANES),
        ("sources", RowSource * MAX_PLANES),
    ]


class WaitParams(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("phase", c_uint32),
        ("signals", c_uint32),
        ("waits", c_uint32),
        ("channel", Channel),
    ]


class OutboxParams(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("num_ctas", c_uint32),
        ("num_threads", c_uint32),
        ("hidden", c_uint32),
        ("number", c_uint32),
        ("num_rows", c_uint32),
        ("outbox_offset", c_uint64),
        ("outbox_row_bytes", c_uint32),
        ("coding", c_uint32),
        ("scales_offset", c_uint32),
        ("row_scale_offset", c_uint32),
        ("rows", c_void_p),
        ("out", c_void_p),
        ("channel", Channel),
    ]


class RowTarget(ctypes.Structure):
    _fields_ = [
        ("rows", c_void_p),
        ("num_bytes", c_uint32),
        ("align_bytes", c_uint32),
    ]


class RouteParams(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("num_segments", c_uint32),
        ("words_per_segment", c_uint32),
        ("top_k", c_uint32),
        ("first_expert", c_uint32),
        ("num_experts", c_uint32),
        ("ids_plane", c_uint32),
        ("pad_multiple", c_uint32),
        ("group_rows", c_uint32),
        ("num_slots", c_uint32),
        ("num_ctas", c_uint32),
        ("num_threads", c_uint32),
        ("segment_starts", c_void_p),
        ("counter", c_void_p),
        ("counts", c_void_p),
        ("expert_offsets", c_void_p),
        ("row_index", c_void_p),
        ("k", c_void_p),
        ("weights", c_void_p),
        ("global_scale", c_void_p),
        ("pair_slots", c_void_p),
        ("topk_ids", c_void_p),
        ("channel", Channel),
        ("planes", Plane * MAX_PLANES),
        ("targets", RowTarget * MAX_PLANES),
    ]


class OrderParams(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("num_ctas", c_uint32),
        ("num_threads", c_uint32),
        ("hidden", c_uint32),
        ("top_k", c_uint32),
        ("rows_number", c_uint32),
        ("to_number", c_uint32),
        ("to_row_bytes", c_uint32),
        ("pair_slots", c_void_p),
        ("weights", c_void_p),
        ("rows", c_void_p),
        ("to", c_void_p),
        ("channel", Channel),
    ]


class ExpertMatrix(ctypes.Structure):
    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("global_scale", c_void_p),
        ("bias", c_void_p),
        ("num_rows", c_uint32),
        ("num_columns", c_uint32),
        ("bias_number", c_uint32),
        ("reserved", c_uint32),
    ]


class ExpertsParams(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("num_ctas", c_uint32),
        ("coding", c_uint32),
        ("number", c_uint32),
        ("weights_coding", c_uint32),
        ("intermediate_coding", c_uint32),
        ("curve", c_uint32),
        ("num_matrices", c_uint32),
        ("gate_row", c_uint32),
        ("up_row", c_uint32),
        ("row_step", c_uint32),
        ("to_number", c_uint32),
        ("alpha", c_float),
        ("beta", c_float),
        ("limit", c_float),
        ("reserved", c_uint32),
        ("intermediate", c_void_p),
        ("to", c_void_p),
        ("to_strides", c_uint64 * 3),
        ("w13", ExpertMatrix),
        ("w2", ExpertMatrix),
        ("route", RouteParams),
    ]


class QuantParams(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_uint32),
        ("number", c_uint32),
        ("coding", c_uint32),
        ("num_rows", c_uint32),
        ("hidden", c_uint32),
        ("given_scale", c_uint32),
        ("scale_stride", c_uint32),
        ("reserved", c_uint32),
        ("values", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("global_scale", c_void_p),
    ]


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    ChannelState,
    Status,
    InputRecord,
    Channel,
    Plane,
    Divisor,
    RowSource,
    DispatchParams,
    WaitParams,
    OutboxParams,
    RowTarget,
    RouteParams,
    OrderParams,
    ExpertMatrix,
    ExpertsParams,
    QuantParams,
)


def mirrored_abi() -> dict[str, int]:
    """Size of every struct and offset of every field as Python has them, by the names that the library prints."""
    found: dict[str, int] = {}
    for struct in STRUCTS:
        found[struct.__name__] = ctypes.sizeof(struct)
        for name, *_ in struct._fields_:
            found[f"{struct.__name__}.{name}"] = getattr(struct, name).offset
    return found


def with_size(params: ctypes.Structure) -> Any:
    """`params` with its `struct_bytes` set."""
    params.struct_bytes = ctypes.sizeof(params)
    return params
