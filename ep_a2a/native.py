"""The compiled library: loading it, and what a status record says in words.

Libraries are looked for in `EP_A2A_LIBRARY_DIR`, then beside this file (an installed package), then in `build/lib` of
a checkout. `python -m ep_a2a.native` prints which one would be loaded.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch

from ep_a2a import abi
from ep_a2a.errors import (
    CapacityExceeded,
    ChannelMisuse,
    EpError,
    InvalidCount,
    InvalidRouting,
    PeerLeft,
    PeerTimeout,
    RoundMismatch,
    StickyError,
)

_PHASE = {abi.PHASE_DISPATCH: "dispatch", abi.PHASE_COMBINE: "combine", abi.PHASE_RELEASE: "release"}
_PEER_TIMEOUT, _CHANNEL_MISUSE, _ROUND_MISMATCH, _PEER_LEFT = 1, 2, 3, 4


# ---- loading -----------------------------------------------------------------------------------------------------


def library_path(kind: str) -> Path:
    """Where the `host` or `cuda` library is. Raises EpError listing the folders that were searched."""
    name = f"libep_a2a_{kind}.so"
    here = Path(__file__).resolve().parent
    given = os.environ.get("EP_A2A_LIBRARY_DIR")
    folders = [Path(given).resolve()] if given else [here / "lib", here.parent / "build" / "lib"]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    needs = "" if kind == "host" else ", where it finds nvcc and a GPU (EP_A2A_CUDA=ON: nvcc alone)"
    how = f"bash launch/demo.sh builds it in a checkout{needs}"
    raise EpError(f"{name} is in none of {', '.join(map(str, folders))}: {how}")


class Library:
    """The launchers of one compiled library, as Python calls: `library.end(params, stream)`."""

    # Of each of these, a launcher ep_a2a_<name>:
    dispatch_send: Callable[[abi.DispatchParams, int], None]
    end: Callable[[abi.WaitParams, int], None]
    leave: Callable[[abi.WaitParams, int], None]
    outbox_stage: Callable[[abi.OutboxParams, int], None]
    outbox_order: Callable[[abi.OrderParams, int], None]
    combine_pull: Callable[[abi.OutboxParams, int], None]
    route: Callable[[abi.RouteParams, int], None]
    route_ids: Callable[[abi.RouteParams, int], None]
    experts: Callable[[abi.ExpertsParams, int], None]
    quant_encode: Callable[[abi.QuantParams, int], None]
    quant_decode: Callable[[abi.QuantParams, int], None]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        if not hasattr(self._dll, "ep_a2a_abi"):
            raise EpError(f"{path} is no library of this package: it has no ep_a2a_abi")
        self._dll.ep_a2a_abi.restype = c_char_p
        self._dll.ep_a2a_error_text.restype = c_char_p
        self._dll.ep_a2a_capture_id.restype = c_uint64
        self._dll.ep_a2a_capture_id.argtypes = [c_void_p]
        self.capture_id: Callable[[int], int] = self._dll.ep_a2a_capture_id
        self._check_abi()
        for name in Library.__annotations__:
            setattr(self, name, self._launcher(f"ep_a2a_{name}"))

    def abi(self) -> dict[str, int]:
        """Size of every struct and offset of every field, as compiled."""
        lines = self._dll.ep_a2a_abi().decode().splitlines()
        return {name: int(value) for name, value in (line.split(" ") for line in lines)}

    def load_kernels(self) -> None:
        """Load every kernel onto the current GPU; a launch that did so could wait for kernels that wait for it."""
        self._check("ep_a2a_load", self._dll.ep_a2a_load())

    def set_delays(self, seed: int, permille: int, max_us: int) -> None:
        """Host library: delay `permille` of all flag accesses by up to `max_us`; 0 turns it off. For tests."""
        self._dll.ep_a2a_host_delays(c_uint64(seed), c_uint32(permille), c_uint32(max_us))

    def _launcher(self, name: str) -> Callable[[ctypes.Structure, int], None]:
        entry = getattr(self._dll, name)
        entry.restype = c_int
        entry.argtypes = [c_void_p, c_void_p]
        reference = ctypes.byref

        def call(params: ctypes.Structure, stream: int) -> None:
            if error := entry(reference(params), stream):
                self._check(name, error)

        return call

    def _check(self, name: str, error: int) -> None:
        if error:
            raise EpError(f"{name}: {self._dll.ep_a2a_error_text(error).decode()} (error {error})")

    def _check_abi(self) -> None:
        compiled, mirrored = self.abi(), abi.mirrored_abi()
        wrong = sorted(k for k in compiled.keys() | mirrored.keys() if compiled.get(k) != mirrored.get(k))
        if wrong:
            shown = ", ".join(f"{k}: {compiled.get(k)} compiled, {mirrored.get(k)} in Python" for k in wrong[:4])
            raise EpError(f"{self.path} was built from other sources than this package ({shown}): build it again")


def library_kind(device: torch.device) -> str:
    """Which library runs on a device: `cuda` or `host`."""
    return "cuda" if device.type == "cuda" else "host"


@cache
def load(kind: str) -> Library:
    """The `host` or the `cuda` library, loaded once per process. Raises EpError where there is none that fits."""
    return Library(library_path(kind))


# ---- records as exceptions ---------------------------------------------------------------------------------------


def sticky_error(rank: int, status: abi.Status, channel: str = "") -> StickyError | None:
    """The exception that a status record stands for; None while the channel is healthy. `channel` names it."""
    if status.failure == 0:
        return None
    late_in, epoch = _phase(status.late_in), status.epoch_wanted
    me = f"rank {rank}, {_phase(status.phase)}{channel}"
    who = "this rank" if status.culprit == rank else f"peer {status.culprit}"
    told = "" if status.reported_by == rank else f", reported by rank {status.reported_by}"
    if status.failure == _CHANNEL_MISUSE:
        did = (
            "dispatched on an open channel"
            if status.late_in == abi.PHASE_DISPATCH
            else "ended a round that is not open"
        )
        return ChannelMisuse(f"{me}: {who} {did} at epoch {epoch}{told}")
    if status.failure == _PEER_LEFT:
        return PeerLeft(f"{me}: {who} left with an exception before its {late_in} of epoch {epoch}")
    if status.failure == _ROUND_MISMATCH:
        other = _phase(abi.PHASE_RELEASE if status.late_in == abi.PHASE_COMBINE else abi.PHASE_COMBINE)
        return RoundMismatch(
            f"{me}: rank {status.culprit} ended epoch {epoch} by {late_in}, rank {status.reported_by} by {other}"
        )
    if status.culprit == rank:
        return PeerTimeout(f"{me}: the peers gave up on this rank, late in {late_in} at epoch {epoch}{told}")
    if told:
        return PeerTimeout(f"{me}: {who} was late in {late_in} at epoch {epoch}{told}")
    return PeerTimeout(
        f"{me}: {who} at epoch {status.epoch_seen}, wanted {epoch}, after {status.waited_ns / 1e9:.1f} s"
    )


HOST_RECORD_BYTES = ctypes.sizeof(abi.Status) + abi.NUM_BAD_INPUTS * ctypes.sizeof(abi.InputRecord)


def host_records(address: int) -> tuple[abi.Status, tuple[abi.InputRecord, ...]]:
    """A channel's status and its input records, in memory at `address` that starts as zeros."""
    inputs = (abi.InputRecord * abi.NUM_BAD_INPUTS).from_address(address + ctypes.sizeof(abi.Status))
    return abi.Status.from_address(address), tuple(inputs)


def abort_status(word: int) -> abi.Status:
    """What an abort word says (its bits: cuda/sync.cuh), as the record of a rank that was told."""
    late_in = word >> 20 & 0xF
    return abi.Status(
        failure=word & 0xF,
        phase=late_in,
        culprit=word >> 12 & 0xFF,
        late_in=late_in,
        reported_by=word >> 4 & 0xFF,
        epoch_wanted=word >> 24,
    )


def _phase(number: int) -> str:
    return _PHASE.get(number, f"phase {number}")


def take_input_error(rank: int, records: Sequence[abi.InputRecord]) -> EpError | None:
    """The first exception that the input records stand for, and that record cleared; None if there is none."""
    for kind, record in enumerate(records):
        if record.present:
            error = _input_error(rank, kind, record)
            record.present = 0  # last: a kernel may write the next one now
            return error
    return None


def _input_error(rank: int, kind: int, found: abi.InputRecord) -> EpError:
    """The exception of a record; `kind` as in enum BadInput."""
    if kind == 0:
        return InvalidRouting(
            f"rank {rank}: token {found.token}, position {found.position}: expert {found.value} is not in "
            f"[-1, {found.limit}); it was not routed there, everything else was delivered"
        )
    if kind == 1:
        return InvalidCount(
            f"rank {rank}: num_tokens={found.value} on the device is not in [0, {found.limit}]; it was clamped"
        )
    one = found.token >= 0
    what = f"expert {found.token} has {found.value} pairs" if one else f"{found.value} slots are needed"
    return CapacityExceeded(
        f"rank {rank}: {what}, there was room for {found.limit}; give {'max_rows' if one else 'capacity'}="
        f"{found.value} or more; the pairs that found no slot were dropped"
    )


if __name__ == "__main__":
    for _kind in ("host", "cuda"):
        try:
            print(f"{_kind}: {load(_kind).path}")
        except EpError as _error:
            print(f"{_kind}: {_error}")
