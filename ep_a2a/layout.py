"""Every offset, stride and size, and who of a CTA's threads serves which plane. Nothing else computes an address.

Words used here and everywhere else:

rank, peer      a process (or thread) of the expert-parallel group; another one of them
expert          a global id in [0, num_experts); each rank owns a contiguous run of them
token, row      a line of `x` on its source rank; the same line where it was received
plane           one column of what travels for a token (activations, scales, ids, weights, extras)
encoded         values as codes of 4 or 8 bits and scales of their blocks
region          the symmetric memory of one rank; a channel is an independent set of planes, flags and epoch in it
outbox          the plane into which experts put results and from which the sources fetch them
state           memory of one rank and channel that no peer ever sees
`num_*` counts, `*_bytes` sizes and strides, `*_offset` distance in bytes from the start of a channel or a state.

A plane is `[source rank, max_tokens, row_bytes]`: a token's row at every destination has the index it has at its
source, so placement needs no counter and is the same in every run. A bitmap says which rows are valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, Protocol

import torch

MAX_RANKS = 128
MAX_TOP_K = 32  # one lane of a warp for each id of a token
MAX_EXTRA_PLANES = 4
MAX_PLANES = 4 + MAX_EXTRA_PLANES
MAX_TOKENS = 2**24 - 1  # a flag carries the token count in 24 bits
MAX_HIDDEN = 2**17

SECTOR_BYTES = 32  # rows are padded to whole memory sectors: 88-byte rows cost 8 % on an H200
PLANE_ALIGN_BYTES = 1024  # on multiples of 128 alone a large dispatch is slower on an H200
REGION_ALIGN_BYTES = 4096
VECTOR_BYTES = 16  # what one thread stores at once
STATE_HEADER_BYTES = 128  # struct ChannelState in abi.h

WARP_LANES = 32
MAX_FLAG_PARTS = 8  # of a rank's rows in a dispatch: so many CTAs, of those that share tiles, raise flags of their own


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def alignment(bits: int) -> int:
    """The largest power of two up to 16 that divides a number."""
    return (bits | VECTOR_BYTES) & -(bits | VECTOR_BYTES)


@dataclass(frozen=True)
class Column:
    """A plane of a payload format: one element of `dtype` for every `hidden_per_element` values of a token."""

    name: str
    dtype: torch.dtype
    hidden_per_element: int


@dataclass(frozen=True)
class Format:
    """How a token's values are stored: a list of planes, and whether a fp32 scale of the whole row follows the ids.

    One column holds the values as they are; two hold codes and the scales of their blocks (`cuda/codec.cuh`).
    """

    name: str
    columns: tuple[Column, ...]
    hidden_multiple: int
    row_scale: bool = False

    @cached_property
    def is_encoded(self) -> bool:
        """Whether codes and scales stand for the values."""
        return len(self.columns) > 1

    @cached_property
    def plane_names(self) -> tuple[str, ...]:
        """The planes that hold values: "rows", then "scales" and "global_scale" where the format has them."""
        return (*(column.name for column in self.columns), *(("global_scale",) if self.row_scale else ()))

    @cached_property
    def result_dtype(self) -> torch.dtype:
        """Of what combine returns."""
        return torch.bfloat16 if self.is_encoded else self.columns[0].dtype

    def __hash__(self) -> int:
        return hash(self.name)  # enough, and quick: formats are keys of tables

    def __repr__(self) -> str:
        return self.name


def _encoded(name: str, codes: torch.dtype, scales: torch.dtype, block: int, row_scale: bool = False) -> Format:
    """A format of codes, two to a uint8, and a scale for each block."""
    columns = Column("rows", codes, 2 if codes == torch.uint8 else 1), Column("scales", scales, block)
    return Format(name, columns, block, row_scale)


NVFP4 = _encoded("NVFP4", torch.uint8, torch.float8_e4m3fn, 16, row_scale=True)
MXFP4 = _encoded("MXFP4", torch.uint8, torch.float8_e8m0fnu, 32)
FP8 = _encoded("FP8", torch.float8_e4m3fn, torch.float32, 128)
MXFP8 = _encoded("MXFP8", torch.float8_e4m3fn, torch.float8_e8m0fnu, 32)
BF16 = Format(name="BF16", columns=(Column("rows", torch.bfloat16, 1),), hidden_multiple=8)
FP16 = Format(name="FP16", columns=(Column("rows", torch.float16, 1),), hidden_multiple=8)
FP32 = Format(name="FP32", columns=(Column("rows", torch.float32, 1),), hidden_multiple=8)

PAYLOAD_FORMATS = (NVFP4, MXFP4, FP8, MXFP8, BF16, FP16)
COMBINE_FORMATS = (BF16, FP16, FP32, FP8, NVFP4)


class Shape(Protocol):
    """The part of `Config` that decides the layout."""

    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def payload(self) -> Format: ...
    @property
    def combine(self) -> Format: ...
    @property
    def extra_planes(self) -> tuple[int, ...]: ...
    @property
    def channels(self) -> int: ...


@dataclass(frozen=True)
class Plane:
    """One plane of the receive memory; `tail_bytes` follow the `source_bytes` that come from a tensor's row."""

    name: str
    dtype: torch.dtype
    source_bytes: int
    tail_bytes: int
    carries_payload: bool

    @property
    def row_bytes(self) -> int:
        return round_up(self.source_bytes + self.tail_bytes, SECTOR_BYTES)


def planes(payload: Format, hidden: int, top_k: int, extra_planes: Sequence[int] = ()) -> tuple[Plane, ...]:
    """The planes of a payload, in the order in which they lie in memory."""
    found = [
        Plane(c.name, c.dtype, hidden // c.hidden_per_element * c.dtype.itemsize, 0, carries_payload=True)
        for c in payload.columns
    ]
    found.append(Plane("ids", torch.int32, 4 * top_k, 4 * payload.row_scale, carries_payload=False))
    found.append(Plane("weights", torch.float32, 4 * top_k, 0, carries_payload=False))
    found += [
        Plane(f"extra{i}", torch.uint8, num_bytes, 0, carries_payload=False) for i, num_bytes in enumerate(extra_planes)
    ]
    return tuple(found)


@dataclass(frozen=True)
class OutboxRow:
    """Where a row of the outbox holds what: its values or codes from 0, then scales, then the fp32 scale of the row.

    Both offsets are multiples of 4, and 0 where the format has no such part.
    """

    scales_offset: int
    row_scale_offset: int
    row_bytes: int


def outbox_row(combine: Format, hidden: int) -> OutboxRow:
    """The layout of an outbox row."""
    offsets, end = [0, 0], 0
    for i, column in enumerate(combine.columns):
        offsets[i] = end
        end = round_up(end + hidden // column.hidden_per_element * column.dtype.itemsize, 4)
    row_scale = end * combine.row_scale
    return OutboxRow(offsets[1], row_scale, round_up(end + 4 * combine.row_scale, SECTOR_BYTES))


# ---- experts and ranks -------------------------------------------------------------------------------------------


def shares(num_experts: int, num_ranks: int) -> tuple[int, int]:
    """How many experts a rank owns, and how many ranks, the first ones, own one more."""
    return divmod(num_experts, num_ranks)


def first_expert(rank: int, num_experts: int, num_ranks: int) -> int:
    """The first expert of `rank`."""
    experts_per_rank, num_longer_ranks = shares(num_experts, num_ranks)
    return rank * experts_per_rank + min(rank, num_longer_ranks)


def local_experts(rank: int, num_experts: int, num_ranks: int) -> range:
    """The experts that `rank` owns; empty where there are fewer experts than ranks."""
    return range(first_expert(rank, num_experts, num_ranks), first_expert(rank + 1, num_experts, num_ranks))


# ---- the region of a rank ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Offsets of one channel in a rank's region, and of one channel's state; equal on all ranks.

    Offsets count from the start of the channel, which begins at `channel * channel_bytes` in every rank's region.
    """

    num_ranks: int
    max_tokens: int
    planes: tuple[Plane, ...]
    plane_offsets: tuple[int, ...]
    dispatch_flags_offset: int  # u64 [source rank, flag_parts]
    flag_parts: int  # of the rows of a source: each part has a flag
    end_flags_offset: int  # u64 [source rank]
    abort_words_offset: int  # u64 [source rank]
    bitmap_offset: int  # u32 [source rank, bitmap_words]
    bitmap_words: int
    outbox_offset: int  # [source rank, max_tokens, outbox_row.row_bytes]
    outbox_row: OutboxRow
    channel_bytes: int
    region_bytes: int
    source_counts_offset: int  # in the state: i32 [source rank]
    masks_offset: int  # in the state: u32 [max_tokens, mask_words], bit r of a token's mask = goes to rank r
    mask_words: int
    encoded_offsets: tuple[int, ...]  # in the state: rows that a dispatch encodes, a plane for each of `plane_names`
    state_bytes: int

    def plane_bytes(self, index: int) -> int:
        """Bytes of a whole plane, all sources."""
        return self.num_ranks * self.max_tokens * self.planes[index].row_bytes

    def row_bytes(self) -> int:
        """Bytes that one token costs at one destination."""
        return sum(plane.row_bytes for plane in self.planes)


def layout(shape: Shape, num_ranks: int) -> Layout:
    """The layout of a configuration on `num_ranks` ranks."""
    found = planes(shape.payload, shape.hidden, shape.top_k, shape.extra_planes)
    rows = num_ranks * shape.max_tokens
    cursor = 0

    def take(num_bytes: int) -> int:
        nonlocal cursor
        offset = cursor
        cursor = round_up(offset + num_bytes, PLANE_ALIGN_BYTES)
        return offset

    flag_parts = min(MAX_FLAG_PARTS, 1 << max(1, 2 * WARP_LANES // num_ranks).bit_length() - 1)  # two for a lane
    dispatch_flags = take(8 * flag_parts * num_ranks)
    end_flags, abort_words = take(8 * num_ranks), take(8 * num_ranks)
    bitmap_words = -(-shape.max_tokens // 32)
    bitmap = take(4 * num_ranks * bitmap_words)
    plane_offsets = tuple(take(rows * plane.row_bytes) for plane in found)
    result = outbox_row(shape.combine, shape.hidden)
    outbox = take(rows * result.row_bytes)
    channel_bytes = cursor

    mask_words = -(-num_ranks // 32)
    source_counts = STATE_HEADER_BYTES
    masks = round_up(source_counts + 4 * num_ranks, PLANE_ALIGN_BYTES)
    cursor = masks  # of the state from here on
    take(4 * mask_words * shape.max_tokens)
    encoded: tuple[int, ...] = ()
    if shape.payload.is_encoded:
        scale_bytes = [4 * shape.max_tokens] if shape.payload.row_scale else []
        encoded = tuple(
            map(take, [p.source_bytes * shape.max_tokens for p in found if p.carries_payload] + scale_bytes)
        )
    state_bytes = cursor
    return Layout(
        num_ranks=num_ranks,
        max_tokens=shape.max_tokens,
        planes=found,
        plane_offsets=plane_offsets,
        dispatch_flags_offset=dispatch_flags,
        flag_parts=flag_parts,
        end_flags_offset=end_flags,
        abort_words_offset=abort_words,
        bitmap_offset=bitmap,
        bitmap_words=bitmap_words,
        outbox_offset=outbox,
        outbox_row=result,
        channel_bytes=channel_bytes,
        region_bytes=round_up(shape.channels * channel_bytes, REGION_ALIGN_BYTES),
        source_counts_offset=source_counts,
        masks_offset=masks,
        mask_words=mask_words,
        encoded_offsets=encoded,
        state_bytes=state_bytes,
    )


def divisor(d: int) -> tuple[int, int]:
    """(m, s) so that n // d == n * m >> s for 0 <= n < 2^31, and m fits 32 bits; d is 1 to 2^31 - 1.

    Granlund and Montgomery: m = ceil(2^s / d), s = 31 + ceil(log2 d).
    """
    shift = 31 + (d - 1).bit_length()
    return -(-(1 << shift) // d), shift


# ---- pairs of received rows and experts --------------------------------------------------------------------------

MAX_SEGMENTS = 1024  # warps that number pairs; each takes a run of bitmap words
MAX_ROUTE_EXPERTS = 8192  # of one rank: such a warp keeps a count for each in shared memory
MAX_PAIRS = 2**31 - 1  # slots have 32-bit numbers
EXPERT_TILE_ROWS = 8  # slots that an expert's first product takes at a time


def route_segments(num_words: int) -> tuple[int, int]:
    """How many segments the bitmap words of all sources are cut into, and how many words a segment has."""
    words = -(-num_words // MAX_SEGMENTS)
    return -(-num_words // words), words


def route_scratch_words(num_experts: int, num_segments: int) -> int:
    """Scratch of a routing, u32: [num_experts, num_segments] and a counter behind it."""
    return num_experts * num_segments + 1


def most_slots(num_rows: int, top_k: int, num_experts: int, pad_multiple: int) -> int:
    """The most slots that `num_rows` received rows can need; a token may name one expert in all of its places."""
    pairs = num_rows * top_k if num_experts else 0
    return (pairs + min(num_experts, pairs) * (pad_multiple - 1)) // pad_multiple * pad_multiple


# ---- schedules ---------------------------------------------------------------------------------------------------

TILE_TOKENS = 8  # a byte of the bitmap: kTileTokens in abi.h
TILE_START = 1664  # of a tile's rows in shared memory: kTileStart
MAX_SHARED_BYTES = 200 * 1024  # of a CTA: kMaxSharedBytes
SERVING_WARPS = 8  # of a CTA: one for each token of a tile
SM_SHARED_BYTES = 228 * 1024  # of an SM of sm_90, for all its CTAs; each takes 1 KB beside its own
LARGE_ROUND_BYTES = 5 * 1024 * 1024  # of a rank's rows, from which on a round is large: those of 8 ranks fill a cache
ENCODE_BYTES = 20 * 1024  # of a tile's rows, at most, that a dispatch encodes itself, in each CTA that shares it
SM_TILE_BYTES = 48 * 1024  # of tiles, at least, that keep an SM busy in a large round


@dataclass(frozen=True)
class PhasedSplit:
    """How the phased schedule divides a payload: warp i of a CTA serves plane i of a tile, one more warp none."""

    tile_offsets: tuple[int, ...]  # where a plane's rows begin in a tile, in bytes for each token of the tile
    token_bytes: int  # of a tile
    large_bytes: int  # of shared memory that a CTA of a large round asks for, so that no more share an SM than help


@dataclass(frozen=True)
class NoSplit:
    """Why there is no phased schedule."""

    reason: str


def phased_split(
    payload: Format,
    hidden: int,
    top_k: int,
    num_ranks: int,
    extra_planes: Sequence[int] = (),
    shared_bytes: int = MAX_SHARED_BYTES,
) -> PhasedSplit | NoSplit:
    """Divide a CTA's warps over the planes of a payload, so that a warp computes the addresses of one plane only.

    A CTA holds the rows of a tile of tokens in shared memory, plane behind plane, and warp i sends plane i from there.
    `shared_bytes` is what the GPU allows a CTA. Local; any stream; no device.

    Returns the split, or `NoSplit` with the reason: a tile's rows do not fit a CTA's shared memory.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        return NoSplit(f"num_ranks={num_ranks}: a destination mask holds 1 to {MAX_RANKS} ranks")
    if not 1 <= top_k <= MAX_TOP_K:
        return NoSplit(f"top_k={top_k}: a warp reads 1 to {MAX_TOP_K} ids of a token")
    if hidden < 1 or hidden % payload.hidden_multiple:
        return NoSplit(f"hidden={hidden}: {payload} rows need a multiple of {payload.hidden_multiple}")
    row_bytes = [plane.row_bytes for plane in planes(payload, hidden, top_k, extra_planes)]
    if len(row_bytes) > MAX_PLANES:
        return NoSplit(f"{len(row_bytes)} planes, at most {MAX_PLANES} are served")
    shared_bytes = min(shared_bytes, MAX_SHARED_BYTES)
    most = (shared_bytes - TILE_START) // TILE_TOKENS
    if sum(row_bytes) > most:
        return NoSplit(f"a token's rows are {sum(row_bytes)} bytes, more than the {most} of a tile in shared memory")
    tile_bytes = TILE_START + TILE_TOKENS * sum(row_bytes)
    share_of_sm = SM_SHARED_BYTES // -(-SM_TILE_BYTES // tile_bytes) // 128 * 128 - 1024
    return PhasedSplit(
        tile_offsets=tuple(sum(row_bytes[:i]) for i in range(len(row_bytes))),
        token_bytes=sum(row_bytes),
        large_bytes=max(tile_bytes, min(share_of_sm, shared_bytes)),
    )


Schedule = Literal["general", "phased"]
Kind = Literal["cpu", "gpu", "nvlink"]

MAX_CTAS = {"cpu": 64, "gpu": 1056, "nvlink": 1056}  # of one dispatch or combine; a CTA walks over tiles or tokens
FEW_CTAS = {"cpu": 2, "gpu": 32, "nvlink": 64}  # of a dispatch whose CTAs share tiles, at most
SHARE_BYTES = 8192  # of the rows to all ranks that such a CTA stores, at least


@dataclass(frozen=True)
class Grid:
    """The launch of a dispatch.

    CTA i takes tiles, and of their rows those to ranks r with r % 2^shares_log2 == i % 2^shares_log2: the bits of
    `share_ranks`, shifted by that. `flags_apart` (phased): each raises flags of its own, else the last one raises all.
    `encodes`: may encode rows that come as numbers; else a launch before it does, which spreads them better.
    """

    phased: bool
    num_ctas: int
    num_threads: int
    shared_bytes: int
    shares_log2: int
    share_ranks: int
    flags_apart: bool
    is_large: bool  # from LARGE_ROUND_BYTES on
    encodes: bool


def dispatch_grid(layout: Layout, split: PhasedSplit | None, kind: Kind, num_sms: int | None, num_rows: int) -> Grid:
    """The grid of a dispatch of `num_rows` tokens, in the phased schedule of `split` or in the general one."""
    tiles = num_ctas(kind, -(-num_rows // TILE_TOKENS), num_sms)
    shares_log2, flags_apart = 0, split is not None and tiles <= layout.flag_parts
    tile_bytes = min(num_rows, TILE_TOKENS) * layout.row_bytes()
    if flags_apart:
        most = min(FEW_CTAS[kind], num_sms or MAX_CTAS[kind]) // tiles
        most = min(most, layout.num_ranks, WARP_LANES, tile_bytes * layout.num_ranks // SHARE_BYTES)
        shares_log2 = max(1, most).bit_length() - 1
    is_large = num_rows * layout.row_bytes() >= LARGE_ROUND_BYTES
    shared_bytes = TILE_START + TILE_TOKENS * (split.token_bytes if split else 0)
    if split and is_large and kind == "gpu":
        shared_bytes = split.large_bytes
    return Grid(
        phased=split is not None,
        num_ctas=tiles << shares_log2,
        num_threads=WARP_LANES * (SERVING_WARPS + (split is not None)),
        shared_bytes=shared_bytes,
        shares_log2=shares_log2,
        share_ranks=sum(1 << rank for rank in range(0, WARP_LANES, 1 << shares_log2)),
        flags_apart=flags_apart,
        is_large=is_large,
        encodes=flags_apart and num_rows <= TILE_TOKENS * tiles and tile_bytes <= ENCODE_BYTES,
    )


def copy_threads(row_bytes: int) -> int:
    """Threads of a CTA that copies or sums rows of `row_bytes`: one for each 16 bytes, whole warps, at most 256."""
    return min(256, round_up(-(-row_bytes // VECTOR_BYTES), WARP_LANES))


@lru_cache(maxsize=1 << 14)
def num_ctas(kind: Kind, num_items: int, num_sms: int | None) -> int:
    """CTAs of a kernel whose CTAs walk over `num_items`; at least one, since the last one raises the flags."""
    return max(1, min(num_items, num_sms if num_sms is not None else MAX_CTAS[kind]))
