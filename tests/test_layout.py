"""Layout, sizes and the phased split by tables worked out by hand; configurations that are refused, or that differ."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ep_a2a
from ep_a2a import BF16, FP8, FP16, FP32, MXFP4, MXFP8, NVFP4, Config, ConfigMismatch, phased_split
from ep_a2a.layout import (
    COMBINE_FORMATS,
    PAYLOAD_FORMATS,
    NoSplit,
    PhasedSplit,
    dispatch_grid,
    divisor,
    first_expert,
    layout,
    local_experts,
)
from tests import bodies
from tests.bodies import Case

# ---- experts and ranks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "wanted"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (7, 3, [(0, 3), (3, 5), (5, 7)]),
        (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (1, 1, [(0, 1)]),
    ],
)
def test_experts_of_ranks(num_experts, num_ranks, wanted):
    found = [local_experts(rank, num_experts, num_ranks) for rank in range(num_ranks)]
    assert [(one.start, one.stop) for one in found] == wanted
    assert first_expert(num_ranks, num_experts, num_ranks) == num_experts


# ---- planes and offsets ------------------------------------------------------------------------------------------


def config(**more):
    fields = {"num_experts": 512, "top_k": 22, "hidden": 2048, "max_tokens": 128}
    return Config(**(fields | more))


ROW_BYTES = [  # the planes of a row, each padded to 32 bytes
    ({}, {"rows": 1024, "scales": 128, "ids": 96, "weights": 96}),
    ({"top_k": 8}, {"rows": 1024, "scales": 128, "ids": 64, "weights": 32}),
    ({"top_k": 9}, {"rows": 1024, "scales": 128, "ids": 64, "weights": 64}),
    ({"top_k": 32}, {"rows": 1024, "scales": 128, "ids": 160, "weights": 128}),
    ({"hidden": 2880, "top_k": 4}, {"rows": 1440, "scales": 192, "ids": 32, "weights": 32}),
    ({"hidden": 7168, "top_k": 8}, {"rows": 3584, "scales": 448, "ids": 64, "weights": 32}),
    ({"payload": BF16, "top_k": 8}, {"rows": 4096, "ids": 32, "weights": 32}),
    ({"payload": BF16, "hidden": 8, "top_k": 1}, {"rows": 32, "ids": 32, "weights": 32}),
    (
        {"top_k": 1, "extra_planes": (1, 32, 33, 100)},
        {"rows": 1024, "scales": 128, "ids": 32, "weights": 32}
        | {"extra0": 32, "extra1": 32, "extra2": 64, "extra3": 128},
    ),
]


@pytest.mark.parametrize(("fields", "wanted"), ROW_BYTES)
def test_row_bytes(fields, wanted):
    found = layout(config(**fields), 8)
    assert {plane.name: plane.row_bytes for plane in found.planes} == wanted
    assert found.row_bytes() == config(**fields).bytes(8).row_bytes == sum(wanted.values())


def spans(found):
    """(offset, bytes) of all that lies in a channel."""
    ranks = found.num_ranks
    yield from ((offset, found.plane_bytes(i)) for i, offset in enumerate(found.plane_offsets))
    yield from ((o, 8 * ranks) for o in (found.dispatch_flags_offset, found.end_flags_offset, found.abort_words_offset))
    yield found.bitmap_offset, 4 * ranks * found.bitmap_words
    yield found.outbox_offset, ranks * found.max_tokens * found.outbox_row.row_bytes


def assert_outbox_row_holds_all(row, combine, hidden):
    """Codes, scales and the row's scale lie one behind the other, on whole words."""
    sizes = [hidden // c.hidden_per_element * c.dtype.itemsize for c in combine.columns]
    starts = [0, row.scales_offset][: len(sizes)]
    if combine.row_scale:
        sizes, starts = [*sizes, 4], [*starts, row.row_scale_offset]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(start % 4 == 0 and start >= end for start, end in zip(starts, [0, *ends[:-1]], strict=True))
    assert ends[-1] <= row.row_bytes < ends[-1] + 32


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 128),
    st.integers(1, 5000),
    st.integers(1, 32),
    st.integers(1, 60).map(lambda n: 128 * n),
    st.sampled_from(PAYLOAD_FORMATS),
    st.sampled_from(COMBINE_FORMATS),
    st.lists(st.integers(1, 300), max_size=4),
    st.integers(1, 4),
)
def test_nothing_overlaps_and_everything_is_aligned(
    num_ranks, max_tokens, top_k, hidden, payload, combine, extra, channels
):
    shape = Config(
        num_experts=7, top_k=top_k, hidden=hidden, max_tokens=max_tokens, payload=payload, combine=combine,
        extra_planes=tuple(extra), channels=channels,
    )  # fmt: skip
    found = layout(shape, num_ranks)
    end = 0
    for offset, num_bytes in sorted(spans(found)):
        assert offset >= end and offset % 128 == 0
        end = offset + num_bytes
    assert end <= found.channel_bytes and found.channel_bytes % 128 == 0
    assert channels * found.channel_bytes <= found.region_bytes < channels * found.channel_bytes + 4096 + 128
    assert found.region_bytes % 4096 == 0 and found.bitmap_words == -(-max_tokens // 32)
    for plane in found.planes:
        assert plane.row_bytes % 32 == 0 and 0 <= plane.row_bytes - plane.source_bytes - plane.tail_bytes < 32
    assert found.outbox_row.row_bytes % 32 == 0
    assert_outbox_row_holds_all(found.outbox_row, combine, hidden)
    assert found.source_counts_offset + 4 * num_ranks <= found.masks_offset
    ends = [found.masks_offset + 4 * found.mask_words * max_tokens]
    widths = [plane.source_bytes for plane in found.planes if plane.carries_payload] + [4] * payload.row_scale
    for offset, row_bytes in zip(found.encoded_offsets, widths if payload.is_encoded else (), strict=True):
        assert offset >= ends[-1] and offset % 128 == 0
        ends.append(offset + row_bytes * max_tokens)
    assert ends[-1] <= found.state_bytes
    assert 32 * found.mask_words >= num_ranks
    sizes = shape.bytes(num_ranks)
    assert sizes.region_bytes == found.region_bytes and sizes.state_bytes == channels * found.state_bytes
    assert sizes.total_bytes == sizes.region_bytes + sizes.state_bytes


def test_bytes_worked_out_by_hand():
    sizes = Config(num_experts=8, top_k=2, hidden=512, max_tokens=16, payload=BF16).bytes(4)
    rows = 4 * 16 * (1024 + 32 + 32)
    outbox = 4 * 16 * 1024
    assert sizes.row_bytes == 1088
    assert sizes.region_bytes == 4096 * -(-(4 * 128 + rows + outbox) // 4096)


def test_128_ranks_and_offsets_beyond_32_bits():
    large = config(hidden=7168, max_tokens=8192, channels=2, combine=FP32)
    sizes, found = large.bytes(128), layout(large, 128)
    assert sizes.row_bytes == 3584 + 448 + 96 + 96
    assert found.outbox_offset > 2**32 and sizes.region_bytes > 2 * 128 * 8192 * (sizes.row_bytes + 4 * 7168)
    assert found.mask_words == 4
    assert config().bytes(1).region_bytes < config().bytes(2).region_bytes < config().bytes(128).region_bytes


@pytest.mark.parametrize(("ranks", "error"), [(0, ValueError), (129, ValueError), (-1, ValueError), (2.0, TypeError)])
def test_bytes_refuses_other_numbers_of_ranks(ranks, error):
    with pytest.raises(error, match="num_ranks"):
        config().bytes(ranks)


# ---- the phased split --------------------------------------------------------------------------------------------

SPLITS = [  # warps 0 to 3: activations, scales, ids and the global scale, weights; rows of 1024, 128, 96 and 96 bytes
    ((NVFP4, 2048, 22, 8, ()), PhasedSplit((0, 1024, 1152, 1248), 1344, 57344)),  # 4 CTAs of 12,416 bytes on an SM
    ((NVFP4, 512, 4, 4, ()), PhasedSplit((0, 256, 288, 320), 352, 20096)),  # 11 of 4,480
    ((NVFP4, 7168, 8, 128, ()), PhasedSplit((0, 3584, 4032, 4096), 4128, 115712)),  # 2 of 34,688
    ((BF16, 7168, 8, 8, ()), PhasedSplit((0, 14336, 14368), 14400, 204800)),  # 1
    ((BF16, 64, 2, 2, (1, 640, 36)), PhasedSplit((0, 128, 160, 192, 224, 864), 928, 37888)),  # 6 of 9,088
    ((BF16, 12656, 1, 1, ()), PhasedSplit((0, 25312, 25344), 25376, 204800)),
]
REFUSED = [  # 8 tokens have 204,800 - 1,664 bytes
    ((BF16, 16384, 1, 1, ()), "32832 bytes.*25392"),
    ((NVFP4, 2**17, 8, 8, ()), "73824 bytes.*25392"),
    ((NVFP4, 2000 + 8, 8, 8, ()), r"hidden=2008.*16"),
    ((NVFP4, 0, 8, 8, ()), "hidden=0"),
    ((NVFP4, 2048, 33, 8, ()), "top_k=33.*32"),
    ((NVFP4, 2048, 0, 8, ()), "top_k=0"),
    ((NVFP4, 2048, 8, 129, ()), "num_ranks=129.*128"),
    ((NVFP4, 2048, 8, 8, (30000,)), "31264 bytes.*25392"),
    ((BF16, 512, 8, 8, (32,) * 6), "9 planes.*8"),
]


def test_a_tile_in_shared_memory():
    split = phased_split(NVFP4, 2048, 22, 8)
    grid = dispatch_grid(layout(config(), 8), split, "gpu", None, 1)
    assert grid.shared_bytes == 1664 + 8 * 1344 and grid.num_threads == 288
    grid = dispatch_grid(layout(config(), 8), None, "gpu", None, 1)
    assert grid.shared_bytes == 1664 and grid.num_threads == 256


def test_as_many_ctas_of_a_large_round_share_an_sm_as_were_meant():
    for (payload, hidden, top_k, ranks, extra), split in SPLITS:
        tile_bytes = 1664 + 8 * split.token_bytes
        wanted = -(-48 * 1024 // tile_bytes)
        assert 228 * 1024 // (split.large_bytes + 1024) == wanted, (payload, hidden)
        small = phased_split(payload, hidden, top_k, ranks, extra, shared_bytes=max(tile_bytes, 99 * 1024))
        assert isinstance(small, PhasedSplit)  # of a GPU whose CTAs may have less
        assert tile_bytes <= small.large_bytes <= max(tile_bytes, 99 * 1024)


GRIDS = [  # ranks, kind, num_sms, rows; CTAs, shares, flags apart, large
    ((8, "gpu", None, 0), (1, 1, True, False)),
    ((8, "gpu", None, 1), (1, 1, True, False)),  # 10,752 bytes
    ((8, "gpu", None, 4), (4, 4, True, False)),
    ((8, "gpu", None, 8), (8, 8, True, False)),
    ((8, "gpu", None, 9), (16, 8, True, False)),
    ((8, "gpu", None, 64), (32, 4, True, False)),
    ((8, "gpu", None, 65), (9, 1, False, False)),
    ((8, "nvlink", None, 64), (64, 8, True, False)),
    ((8, "gpu", 12, 17), (12, 4, True, False)),
    ((8, "gpu", 1, 1), (1, 1, True, False)),
    ((8, "gpu", 5, 3900), (5, 1, True, False)),  # 5 CTAs have parts of their own, however many tokens
    ((8, "gpu", None, 3900), (488, 1, False, False)),
    ((8, "gpu", 9, 3901), (9, 1, False, True)),  # 5,242,944 bytes
    ((8, "nvlink", 9, 3901), (9, 1, False, True)),
    ((6, "gpu", None, 8), (4, 4, True, False)),
    ((16, "gpu", None, 1), (2, 2, True, False)),
    ((16, "gpu", None, 7), (16, 16, True, False)),
    ((16, "gpu", None, 33), (5, 1, False, False)),  # 4 parts of 16 ranks
    ((128, "nvlink", None, 8), (32, 32, True, False)),
    ((128, "nvlink", None, 9), (2, 1, False, False)),
    ((4, "cpu", None, 8), (2, 2, True, False)),
    ((4, "cpu", None, 8192), (64, 1, False, True)),
]


@pytest.mark.parametrize(("arguments", "wanted"), GRIDS)
def test_the_grid_of_a_dispatch(arguments, wanted):
    num_ranks, *others = arguments
    split = phased_split(NVFP4, 2048, 22, num_ranks)
    grid = dispatch_grid(layout(config(max_tokens=8192), num_ranks), split, *others)
    assert (grid.num_ctas, 1 << grid.shares_log2, grid.flags_apart, grid.is_large) == wanted
    assert grid.shared_bytes == (split.large_bytes if grid.is_large and arguments[1] == "gpu" else 1664 + 8 * 1344)
    of_shares = [grid.share_ranks << share & 2**32 - 1 for share in range(1 << grid.shares_log2)]
    assert sum(of_shares) == 2**32 - 1  # each rank is of one
    assert all((grid.share_ranks >> rank & 1) == (rank % len(of_shares) == 0) for rank in range(32))


@pytest.mark.parametrize(
    ("hidden", "num_sms", "rows", "wanted"),
    [
        (2048, None, 0, True),
        (2048, None, 64, True),
        (2048, None, 65, False),  # more tiles than flags
        (2048, 5, 40, True),
        (2048, 5, 41, False),  # 5 CTAs with a flag each, but one has two tiles
        (7168, None, 4, True),  # a row is 4,224 bytes
        (7168, None, 5, False),
    ],
)
def test_which_dispatch_encodes(hidden, num_sms, rows, wanted):
    split, shape = phased_split(NVFP4, hidden, 22, 8), config(max_tokens=8192, hidden=hidden)
    assert dispatch_grid(layout(shape, 8), split, "gpu", num_sms, rows).encodes == wanted
    assert not dispatch_grid(layout(shape, 8), None, "gpu", num_sms, rows).encodes


def test_the_general_schedule_raises_all_flags_at_once():
    grid = dispatch_grid(layout(config(), 8), None, "gpu", None, 8)
    assert (grid.num_ctas, grid.shares_log2, grid.flags_apart) == (1, 0, False)


@pytest.mark.parametrize(("ranks", "wanted"), [(1, 8), (8, 8), (9, 4), (16, 4), (17, 2), (32, 2), (33, 1), (128, 1)])
def test_flags_of_a_rank(ranks, wanted):
    assert layout(config(), ranks).flag_parts == wanted  # two for a lane of a warp: 64 words at most


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_division_by_multiplication(d, n):
    multiplier, shift = divisor(d)
    assert n * multiplier >> shift == n // d and multiplier < 2**32 and shift < 64


@pytest.mark.parametrize("d", [1, 2, 3, 7, 2**30, 2**30 + 1, 2**31 - 1])
def test_division_at_the_edges(d):
    multiplier, shift = divisor(d)
    assert multiplier < 2**32
    for n in (0, 1, d - 1, d, 2 * d - 1, 2**31 - 1 - (2**31 - 1) % d, 2**31 - 1):
        assert n >= 2**31 or n * multiplier >> shift == n // d


@pytest.mark.parametrize(("arguments", "wanted"), SPLITS)
def test_phased_split(arguments, wanted):
    assert phased_split(*arguments) == wanted


@pytest.mark.parametrize(("arguments", "reason"), REFUSED)
def test_phased_split_says_why_not(arguments, reason):
    found = phased_split(*arguments)
    assert isinstance(found, NoSplit)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found.reason)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(PAYLOAD_FORMATS),
    st.integers(1, 60),
    st.integers(1, 32),
    st.lists(st.integers(1, 3000), max_size=4),
)
def test_the_rows_of_a_tile_lie_behind_one_another(payload, blocks, top_k, extra):
    found = phased_split(payload, 128 * blocks, top_k, 8, extra)
    shape = config(payload=payload, hidden=128 * blocks, top_k=top_k, extra_planes=tuple(extra))
    planes = layout(shape, 8).planes
    if isinstance(found, NoSplit):
        assert sum(plane.row_bytes for plane in planes) > 25392
        return
    ends = [start + plane.row_bytes for start, plane in zip(found.tile_offsets, planes, strict=True)]
    assert [0, *ends] == [*found.tile_offsets, found.token_bytes]
    assert 1664 + 8 * found.token_bytes <= 204800


# ---- configurations ----------------------------------------------------------------------------------------------

GOOD = {"num_experts": 8, "top_k": 2, "hidden": 512, "max_tokens": 8}
BAD_CONFIG = [
    ({"num_experts": 0}, ValueError, "num_experts=0.*1"),
    ({"num_experts": 8.0}, TypeError, "num_experts.*float"),
    ({"num_experts": True}, TypeError, "num_experts.*bool"),
    ({"top_k": 0}, ValueError, "top_k=0.*1 to 32"),
    ({"top_k": 33}, ValueError, "top_k=33.*1 to 32"),
    ({"hidden": 520}, ValueError, "hidden=520.*16.*512.*528"),
    ({"hidden": 8}, ValueError, "hidden=8.*16"),
    ({"hidden": 12, "payload": BF16}, ValueError, "hidden=12.*8.*8 and 16"),
    ({"hidden": 2**17 + 16}, ValueError, "hidden=131088.*131072"),
    ({"max_tokens": 0}, ValueError, "max_tokens=0"),
    ({"max_tokens": 2**24}, ValueError, "max_tokens=16777216.*16777215"),
    ({"payload": FP32}, ValueError, "payload=FP32.*NVFP4.*BF16"),
    ({"payload": "NVFP4"}, ValueError, "payload='NVFP4'"),
    ({"combine": MXFP4}, ValueError, "combine=MXFP4.*BF16.*FP16.*FP32.*FP8.*NVFP4"),
    ({"combine": MXFP8}, ValueError, "combine=MXFP8"),
    ({"hidden": 2880, "payload": FP8}, ValueError, "hidden=2880.*FP8.*128.*2816 and 2944"),
    ({"hidden": 2880, "combine": FP8}, ValueError, "hidden=2880.*FP8.*128.*2816 and 2944"),
    ({"hidden": 528, "payload": MXFP4}, ValueError, "hidden=528.*MXFP4.*32.*512 and 544"),
    ({"hidden": 528, "payload": MXFP8}, ValueError, "hidden=528.*MXFP8.*32.*512 and 544"),
    ({"hidden": 516, "payload": FP16}, ValueError, "hidden=516.*FP16.*8.*512 and 520"),
    ({"extra_planes": (1, 2, 3, 4, 5)}, ValueError, r"extra_planes.*\b5\b.*4"),
    ({"extra_planes": (4, 0)}, ValueError, r"extra_planes\[1\].*0"),
    ({"extra_planes": (4.0,)}, TypeError, r"extra_planes\[0\].*float"),
    ({"channels": 0}, ValueError, "channels=0"),
    ({"channels": 65}, ValueError, "channels=65.*64"),
    ({"num_sms": 0}, ValueError, "num_sms=0"),
    ({"timeout_s": 0}, ValueError, "timeout_s=0"),
    ({"timeout_s": float("nan")}, ValueError, "timeout_s=nan"),
    ({"timeout_s": "1"}, TypeError, "timeout_s.*str"),
    ({"first_timeout_s": -1.0}, ValueError, "first_timeout_s=-1"),
]


@pytest.mark.parametrize(("change", "error", "text"), BAD_CONFIG)
def test_config_refuses_with_the_numbers(change, error, text):
    with pytest.raises(error, match=text):
        Config(**(GOOD | change))


def test_config_is_frozen_keyword_only_and_comparable():
    one = Config(**GOOD, extra_planes=[3, 4])
    assert one == Config(**GOOD, extra_planes=(3, 4)) and hash(one) == hash(dataclasses.replace(one))
    assert one != Config(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.hidden = 1024
    with pytest.raises(TypeError, match="positional"):
        Config(8, 2, 512, 8)


def test_wrong_arguments_of_connect():
    with pytest.raises(TypeError):
        ep_a2a.connect({"hidden": 512})
    with pytest.raises((TypeError, ValueError)):
        ep_a2a.connect(Config(**GOOD), group="world")


DIFFERENT = [
    ("num_experts", 8, 16),
    ("top_k", 2, 3),
    ("hidden", 512, 1024),
    ("max_tokens", 8, 9),
    ("payload", NVFP4, BF16),
    ("combine", BF16, FP32),
    ("extra_planes", (4,), (4, 8)),
    ("channels", 1, 2),
    ("num_sms", None, 3),
    ("timeout_s", 60.0, 5.0),
    ("first_timeout_s", 50.0, 40.0),
]


@pytest.mark.parametrize(("field", "usual", "other"), DIFFERENT)
def test_ranks_that_disagree(field, usual, other):
    fields = GOOD | {name: value for name, value, _ in DIFFERENT}

    def body(group):
        torch.set_num_threads(1)
        own = fields | ({field: other} if group.rank == 2 else {})
        with pytest.raises(ConfigMismatch) as found:
            ep_a2a.connect(Config(**own), group=group)
        text = str(found.value)
        assert f"rank {group.rank}: " in text and field in text, text
        assert str(usual) in text and f"{other} on rank 2" in text and "0, 1, 3" in text, text
        bodies.rounds(group, Case(num_rounds=1))

    ep_a2a.local(4).run(body)


def test_numbers_of_seconds_are_floats_and_extra_planes_a_tuple():
    one, other = (replace_config(timeout_s=60, extra_planes=[4]), replace_config(timeout_s=60.0, extra_planes=(4,)))
    assert repr(one) == repr(other)
    with pytest.raises(TypeError, match="extra_planes must be a tuple of ints, not int"):
        replace_config(extra_planes=5)


def replace_config(**fields):
    return ep_a2a.Config(num_experts=4, top_k=1, hidden=32, max_tokens=8, **fields)
