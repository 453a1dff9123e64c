"""What a user decides once: the shape of the layer, the formats, the deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ep_a2a import layout as _layout
from ep_a2a.layout import BF16, COMBINE_FORMATS, NVFP4, PAYLOAD_FORMATS, Format


@dataclass(frozen=True)
class Sizes:
    """Memory of one rank, in bytes, before anything is allocated."""

    region_bytes: int  # symmetric: planes, bitmaps, flags and outbox of all channels
    state_bytes: int  # private: counts, destination masks and encoded rows of all channels
    row_bytes: int  # what one token costs at one destination

    @property
    def total_bytes(self) -> int:
        return self.region_bytes + self.state_bytes


@dataclass(frozen=True, kw_only=True)
class Config:
    """The contract that all ranks share; checked once, here, and compared between ranks in `connect`.

    num_experts      global number of experts; rank r owns a contiguous run of them
    top_k            experts per token, 1 to 32
    hidden           values per token; a multiple of what both formats need: NVFP4 16, MXFP4 and MXFP8 32, FP8 128
    max_tokens       the most tokens one rank may dispatch in a round
    payload          format in which tokens travel: NVFP4, MXFP4, FP8, MXFP8, BF16 or FP16
    combine          format in which results travel back: BF16, FP16 or FP32; FP8 or NVFP4, which combine encodes,
                     adds up in fp32 and returns as bf16 (`testing.coding_error` bounds what that costs)
    extra_planes     bytes per token of up to four opaque extra planes
    channels         rounds that may be open at the same time
    num_sms          upper bound on the CTAs of a kernel that moves or computes rows, None = the library's choice
    timeout_s        how long a rank waits for its peers in a phase
    first_timeout_s  the same in the first round, and for each step of connect and close
    """

    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    payload: Format = NVFP4
    combine: Format = BF16
    extra_planes: tuple[int, ...] = ()
    channels: int = 1
    num_sms: int | None = None
    timeout_s: float = 60.0
    first_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not isinstance(self.extra_planes, (tuple, list)):
            raise TypeError(f"extra_planes must be a tuple of ints, not {type(self.extra_planes).__name__}")
        object.__setattr__(self, "extra_planes", tuple(self.extra_planes))
        _check_format("payload", self.payload, PAYLOAD_FORMATS)
        _check_format("combine", self.combine, COMBINE_FORMATS)
        _check_int("num_experts", self.num_experts, 1, 2**31 - 1)
        _check_int("top_k", self.top_k, 1, _layout.MAX_TOP_K)
        _check_int("hidden", self.hidden, 1, _layout.MAX_HIDDEN)
        _check_int("max_tokens", self.max_tokens, 1, _layout.MAX_TOKENS)
        _check_int("channels", self.channels, 1, 64)
        if self.num_sms is not None:
            _check_int("num_sms", self.num_sms, 1, 2**16)
        if len(self.extra_planes) > _layout.MAX_EXTRA_PLANES:
            raise ValueError(f"extra_planes: {len(self.extra_planes)} planes, at most {_layout.MAX_EXTRA_PLANES}")
        for i, num_bytes in enumerate(self.extra_planes):
            _check_int(f"extra_planes[{i}] (bytes per token)", num_bytes, 1, 2**20)
        self._check_hidden()
        for name in ("timeout_s", "first_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
            if not (math.isfinite(value) and 0 < value <= 1e6):
                raise ValueError(f"{name}={value}: must be above 0 and at most 1e6 seconds")
            object.__setattr__(self, name, float(value))  # ranks compare what they print: 60 is 60.0

    def _check_hidden(self) -> None:
        multiple = math.lcm(self.payload.hidden_multiple, self.combine.hidden_multiple)
        if self.hidden % multiple:
            below = self.hidden // multiple * multiple
            legal = [n for n in (below, below + multiple) if 0 < n <= _layout.MAX_HIDDEN]
            raise ValueError(
                f"hidden={self.hidden}: {self.payload} rows with {self.combine} results need a multiple of "
                f"{multiple}; nearest: {' and '.join(map(str, legal))}"
            )

    def bytes(self, num_ranks: int) -> Sizes:
        """Memory that one of `num_ranks` ranks will need. Local; allocates nothing."""
        _check_int("num_ranks", num_ranks, 1, _layout.MAX_RANKS)
        found = _layout.layout(self, num_ranks)
        return Sizes(found.region_bytes, self.channels * found.state_bytes, found.row_bytes())


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: must be {low} to {high}")


def _check_format(name: str, value: object, legal: tuple[Format, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(f.name for f in legal)}")
