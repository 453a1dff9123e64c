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


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Fields in order, from types and the names that have them."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class ChannelState(ctypes.Structure):
    _fields_ = _fields(
        (c_uint64, "half_rounds sticky bad_routing timeout_ns first_timeout_ns"),
        (c_uint32, "send_counter pull_counter"),
        (c_int32, "num_tokens"),
        (c_uint32, "num_failures"),
        (c_uint8 * 72, "reserved"),
    )


class Status(ctypes.Structure):
    _fields_ = _fields(
        (c_uint32, "failure phase culprit late_in reported_by reserved"),
        (c_uint64, "epoch_wanted epoch_seen waited_ns"),
    )


class InputRecord(ctypes.Structure):
    _fields_ = _fields((c_uint32, "present"), (c_int32, "token position value limit reserved"))


class Channel(ctypes.Structure):
    _fields_ = _fields(
        (c_void_p, "peers state status inputs"),
        (c_uint32, "rank num_ranks max_tokens bitmap_words mask_words flag_parts num_experts reserved"),
        (c_uint64, "dispatch_flags_offset end_flags_offset abort_words_offset bitmap_offset source_counts_offset"),
        (c_uint64, "masks_offset"),
    )


class Plane(ctypes.Structure):
    _fields_ = _fields((c_uint64, "offset"), (c_uint32, "row_bytes tile_offset"))


class Divisor(ctypes.Structure):
    _fields_ = _fields((c_uint32, "multiplier shift"))


class RowSource(ctypes.Structure):
    _fields_ = _fields((c_void_p, "rows tail"), (c_uint32, "num_bytes align_bytes tail_stride reserved"))


class DispatchParams(ctypes.Structure):
    _fields_ = _fields(
        (c_uint32, "struct_bytes num_planes num_rows top_k experts_per_rank num_longer_ranks"),
        (Divisor, "per_longer_rank per_rank"),
        (c_uint32, "phased num_ctas shares_log2 share_ranks flags_apart num_threads shared_bytes waits ids_plane"),
        (c_uint32, "whole_planes narrow_planes is_large coding number"),
        (c_void_p, "topk_ids num_tokens"),
        (Channel, "channel"),
        (Plane * MAX_PLANES, "planes"),
        (RowSource * MAX_PLANES, "sources"),
    )


class WaitParams(ctypes.Structure):
    _fields_ = _fields((c_uint32, "struct_bytes phase signals waits"), (Channel, "channel"))


class OutboxParams(ctypes.Structure):
    _fields_ = _fields(
        (c_uint32, "struct_bytes num_ctas num_threads hidden number num_rows"),
        (c_uint64, "outbox_offset"),
        (c_uint32, "outbox_row_bytes coding scales_offset row_scale_offset"),
        (c_void_p, "rows out"),
        (Channel, "channel"),
    )


class RowTarget(ctypes.Structure):
    _fields_ = _fields((c_void_p, "rows"), (c_uint32, "num_bytes align_bytes"))


class RouteParams(ctypes.Structure):
    _fields_ = _fields(
        (c_uint32, "struct_bytes num_segments words_per_segment top_k first_expert num_experts ids_plane"),
        (c_uint32, "pad_multiple group_rows num_slots num_ctas num_threads"),
        (c_void_p, "segment_starts counter counts expert_offsets row_index k weights global_scale pair_slots"),
        (c_void_p, "topk_ids"),
        (Channel, "channel"),
        (Plane * MAX_PLANES, "planes"),
        (RowTarget * MAX_PLANES, "targets"),
    )


class OrderParams(ctypes.Structure):
    _fields_ = _fields(
        (c_uint32, "struct_bytes num_ctas num_threads hidden top_k rows_number to_number to_row_bytes"),
        (c_void_p, "pair_slots weights rows to"),
        (Channel, "channel"),
    )


class ExpertMatrix(ctypes.Structure):
    _fields_ = _fields(
        (c_void_p, "codes scales global_scale bias"),
        (c_uint32, "num_rows num_columns bias_number reserved"),
    )


class ExpertsParams(ctypes.Structure):
    _fields_ = _fields(
        (c_uint32, "struct_bytes num_ctas coding number weights_coding intermediate_coding curve num_matrices"),
        (c_uint32, "gate_row up_row row_step to_number"),
        (c_float, "alpha beta limit"),
        (c_uint32, "reserved"),
        (c_void_p, "intermediate to"),
        (c_uint64 * 3, "to_strides"),
        (ExpertMatrix, "w13 w2"),
        (RouteParams, "route"),
    )


class QuantParams(ctypes.Structure):
    _fields_ = _fields(
        (c_uint32, "struct_bytes number coding num_rows hidden given_scale scale_stride reserved"),
        (c_void_p, "values codes scales global_scale"),
    )


STRUCTS = [struct for struct in ctypes.Structure.__subclasses__() if struct.__module__ == __name__]


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
