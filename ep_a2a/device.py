"""Where a rank runs: which device, which stream, and in which order the operations of a channel come there."""

from __future__ import annotations

import glob
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ep_a2a import world
from ep_a2a.errors import EpError
from ep_a2a.layout import MAX_SHARED_BYTES
from ep_a2a.rendezvous import host_key

CPU = torch.device("cpu")


def choose(device: str | torch.device | None) -> torch.device:
    """The device that `device` stands for: None = torch's current GPU, or the CPU where torch sees no GPU.

    Local. Raises EpError where there is a GPU that torch cannot use, or none of that number; ValueError for a device
    that is neither a CPU nor a CUDA device.
    """
    if device is not None and str(device).partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r}: must be 'cpu' or 'cuda'")
    wanted = None if device is None else torch.device(device)
    if wanted is not None and wanted.type == "cpu":
        return CPU
    if not torch.cuda.is_available():
        has_driver = bool(glob.glob("/dev/nvidia[0-9]*")) and torch.version.cuda is not None
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if wanted is None and (hidden or not has_driver):
            return CPU
        raise EpError(f"torch can use no GPU here: {_why_no_gpu()}; device='cpu' runs on the CPU")
    count, current = torch.cuda.device_count(), torch.cuda.current_device()
    index = current if wanted is None or wanted.index is None else wanted.index
    if index >= count:
        raise EpError(f"device='cuda:{index}': there are {count} GPUs, legal are cuda:0 to cuda:{count - 1}")
    if index != current:
        raise EpError(f"device='cuda:{index}', but torch's current one is cuda:{current}: torch.cuda.set_device first")
    return torch.device("cuda", index)


def _why_no_gpu() -> str:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides all"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).split("\n", 1)[0]
    return "torch.cuda.is_available() is False"


def set_device(group: object | None = None, timeout_s: float = 300.0) -> torch.device:
    """Spread the ranks of each host over its GPUs, in order, and make this rank's GPU torch's current one.

    Collective; before `connect`. Ranks of a host that share a GPU are neighbours; `group` as for `connect`.

    Returns the device; the CPU, and nothing is changed, where torch sees no GPU. Raises RendezvousTimeout, and as
    `connect` does for a group that is none.
    """
    ranks, mine = world.resolve(group), host_key().encode()
    keys = ranks.all_gather(mine, "set_device", timeout_s)
    here, before = keys.count(mine), keys[: ranks.rank].count(mine)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return CPU
    device = torch.device("cuda", before * min(count, here) // here)
    torch.cuda.set_device(device)
    return device


class Turn(ABC):
    """The stream of a channel's last operation, so that the next one, on whatever stream, comes behind it."""

    capture = 0  # of a graph, in which the last operation was; 0 = none

    @abstractmethod
    def take(self) -> int:
        """The current stream, as launchers take it, made to wait for the channel's last operation."""

    @abstractmethod
    def mark(self) -> None:
        """End an operation here: what the stream gets later, the next operation does not wait for."""

    @abstractmethod
    def is_in_a_graph(self) -> bool:
        """Was the last operation captured, in a capture that has ended? Nobody here knows whether it will ever run."""


class CpuTurn(Turn):
    """A launch has run when it returns."""

    def take(self) -> int:
        return 0

    def mark(self) -> None:
        pass

    def is_in_a_graph(self) -> bool:
        return False


class GpuTurn(Turn):
    """Operations that follow each other on one stream cost nothing; a change of streams costs an event.

    A graph is ordered by whoever launches it: nothing waits for what was captured before, and what is captured does
    not wait for what was not. A stream that an operation was on must live until the next operation.

    capture_id  of a stream: what tells a capture that it is in from all others; 0 = none
    """

    def __init__(self, device: torch.device, capture_id: Callable[[int], int]) -> None:
        self._device, self._index = device, device.index
        self._capture_id = capture_id
        self._event = torch.cuda.Event()
        self._last: int | None = None
        self._marked = False

    def take(self) -> int:
        now: int = torch._C._cuda_getCurrentRawStream(self._index)
        if self._last != now and self._last is not None:
            self._join(self._last, now)
        self._last, self._marked = now, False
        # By now a wait may have brought it into a capture. It is torch's current stream: `check_current` came before.
        self.capture = self._capture_id(now) if torch.cuda.is_current_stream_capturing() else 0
        return now

    def mark(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))
        self._marked = True

    def is_in_a_graph(self) -> bool:
        return self.capture != 0 and self._last is not None and self._capture_id(self._last) != self.capture

    def _join(self, last: int, now: int) -> None:
        running = self._capture_id(last)
        if self.capture:
            if running != self.capture:
                return  # that capture has ended
        elif self._capture_id(now) or (running and not self._marked):
            return  # one of them is in a capture, which began after all before it had run
        if not self._marked:
            default = torch.cuda.default_stream(self._device)
            self._event.record(torch.cuda.ExternalStream(last, device=self._device) if last else default)
        self._event.wait(torch.cuda.current_stream(self._device))


def turn(device: torch.device, capture_id: Callable[[int], int]) -> Turn:
    """For a channel whose operations run on `device`. Local."""
    return GpuTurn(device, capture_id) if device.type == "cuda" else CpuTurn()


def check_current(device: torch.device, what: str) -> None:
    """Raise ValueError where torch's current GPU is not the one that `what` is on: launches go to the current one."""
    index = device.index  # None: a CPU
    if index is not None and torch._C._cuda_getDevice() != index:  # cheaper than torch.cuda.current_device
        raise ValueError(
            f"{what} on {device}, torch's current device is cuda:{torch.cuda.current_device()}: "
            f"torch.cuda.set_device, or `with torch.cuda.device(...)`"
        )


def shared_bytes(device: torch.device) -> int:
    """The most shared memory that a CTA can have. Local."""
    if device.type != "cuda":
        return MAX_SHARED_BYTES
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", MAX_SHARED_BYTES))


def current_stream(device: torch.device) -> int:
    """The current stream of a device, as the launchers take it; 0 on a CPU. Local."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """A `with` block in which `stream`, and its GPU, are the current ones; None changes nothing. Local."""
    return nullcontext() if stream is None else _on(stream)


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    # in a thread that has used no GPU yet, torch.cuda.stream alone would make a context on GPU 0 as it ends
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeroed bytes that the host and the kernels of `device` both reach. Local."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=CPU, pin_memory=device.type == "cuda")
