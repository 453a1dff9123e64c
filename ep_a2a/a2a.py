"""The ranks of a group, connected: one object of each rank, with its memory, its channels and its end."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from types import TracebackType

import torch

from ep_a2a import device as _device
from ep_a2a import layout as _layout
from ep_a2a import native, symm, world
from ep_a2a.arguments import DispatchSpec
from ep_a2a.channel import Channel
from ep_a2a.config import Config
from ep_a2a.errors import ClosedError, ConfigMismatch, EpError, RoundError, StickyError
from ep_a2a.received import Handle
from ep_a2a.rendezvous import one_line


class A2A:
    """The ranks of one group, connected. One object serves all layers of equal `Config`. Made by `connect`.

    rank, num_ranks  of this process in the group
    device           where all tensors given to it must be, and where it runs: on torch's current stream there
    config, layout   what was agreed, and where everything lies
    local_experts    range of the global experts of this rank; earlier ranks own one more where they do not divide
    schedule         "phased" or "general": how a CTA's threads divide the planes; chosen, may be set for measurements
    """

    def __init__(self, config: Config, group: world.Group, device: str | torch.device | None = None) -> None:
        self.config = config
        self.group = group
        self.rank, self.num_ranks = group.rank, group.size
        self.layout = _layout.layout(config, group.size)
        self.local_experts = _layout.local_experts(group.rank, config.num_experts, group.size)
        self._closed = False
        timeout_s = config.first_timeout_s
        self.device, self.library = _agree(config, group, device, timeout_s)
        shape = config.payload, config.hidden, config.top_k, group.size, config.extra_planes
        self.split = _layout.phased_split(*shape, _device.shared_bytes(self.device))
        on_gpu = self.device.type == "cuda"
        # For what must not wait for the round. Streams of torch are lent again and again: this kind holds no waits.
        self._side = torch.cuda.Stream(self.device, priority=-1) if on_gpu else None
        with torch.inference_mode(False):  # views of memory that outlives such a block
            self._memory = symm.allocate(group, self.layout.region_bytes, timeout_s, self.device)
            self.spec = DispatchSpec(config, self.device)
            self._channels = [Channel(self, index, self._memory) for index in range(config.channels)]
        if on_gpu:
            _kept.update(self._channels)
        self.schedule = "general" if isinstance(self.split, _layout.NoSplit) else "phased"
        if on_gpu:
            torch.cuda.synchronize(self.device)  # the region is zero before a peer writes there
        group.barrier("connect", timeout_s)  # where this fails a peer may go on all the same: the memory stays

    @property
    def schedule(self) -> _layout.Schedule:
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: _layout.Schedule) -> None:
        if schedule not in ("general", "phased"):
            raise ValueError(f"schedule={schedule!r}: must be 'general' or 'phased'")
        split = self.split if schedule == "phased" else None
        if isinstance(split, _layout.NoSplit):
            raise ValueError(f"there is no phased schedule: {split.reason}")
        self._schedule = schedule
        grid = partial(_layout.dispatch_grid, self.layout, split, self._memory.kind, self.config.num_sms)
        self.grid = lru_cache(maxsize=None)(grid)  # looked for in every dispatch

    def outbox(self, channel: int = 0) -> torch.Tensor:
        """Where results of received rows go, [num_ranks, max_tokens, H] in `config.combine`'s dtype, as a view.

        Local. This rank's to write from the end of its dispatch wait to its combine call, at valid rows; results that
        were written there need no copy: `combine(a2a, handle)`. Raises ClosedError, ValueError, also where
        `config.combine` is encoded, a sticky error.
        """
        self._check_alive()
        outbox = self._channel(channel).outbox
        if outbox is None:
            raise ValueError(f"{self.config.combine} outbox rows are encoded by combine: give it the results as rows=")
        return outbox.detach()  # a new tensor: what is written into it by autograd hangs on that one alone

    def scratch(self, channel: int = 0) -> torch.Tensor:
        """Where results may go if combine encodes them, to be given to it as `rows`: bf16 [num_ranks, max_tokens, H].

        Local. One for each channel, for all layers; from torch's allocator at the first call. This rank's to write
        from one combine call to the next. Raises ClosedError, ValueError, a sticky error.
        """
        self._check_alive()
        return self._channel(channel).scratch.detach()

    def check(self) -> None:
        """Raise what went wrong so far on the device. Local; no synchronisation, about a microsecond.

        Raises PeerTimeout, PeerLeft, ChannelMisuse, RoundMismatch (for ever); InvalidRouting, InvalidCount,
        CapacityExceeded (once); ClosedError.
        """
        self._check_alive()
        for channel in self._channels:
            channel.raise_input_error()

    def watch(self, on_error: Callable[[StickyError], None], every_s: float = 0.1) -> Watch:
        """Call `on_error` once, from a thread of its own, when this object has ended for ever; replays call nothing.

        Local; reads host memory alone, every `every_s` seconds. Ends with the object, or by `stop()`.
        """
        return Watch(self, on_error, every_s)

    def close(self) -> None:
        """End the object. Collective with a deadline; after a sticky error local. Closing twice is harmless.

        A `with` block that ends by an exception does not wait: it tells the peers, whose next wait raises PeerLeft.
        Memory that a peer or a living view can still reach stays mapped. Raises RendezvousTimeout.
        """
        self._close(self._why_ended())

    def _why_ended(self) -> str:
        """The sticky error of this rank in one line; empty while there is none. Local."""
        error = next(filter(None, (channel.error() for channel in self._channels)), None)
        return one_line(error) if error else ""

    def __enter__(self) -> A2A:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            with suppress(EpError), _device.on(self._side):  # the current one may hold a wait for a peer
                for channel in self._channels:
                    channel.leave()
            self._close(one_line(error) if error else kind.__name__)  # the peers may not be on their way to a close

    def __repr__(self) -> str:
        return f"A2A(rank {self.rank} of {self.num_ranks}, {self.config})"

    def _close(self, alone: str) -> None:
        """Close with the peers; or alone, and tell them why."""
        if self._closed:
            return
        self._closed = True
        met = False
        try:
            if not alone:
                if self._side is not None:
                    torch.cuda.synchronize(self.device)  # what this rank reads of its peers, it has read
                self.group.barrier("close", self.config.first_timeout_s, self._peers_left)
                met = True
        except BaseException as error:
            alone = one_line(error)
            raise
        finally:
            self.group.leave(alone)
            self._memory.close(keep=not met)
            if met:
                _kept.difference_update(self._channels)
            self._channels = []  # their views would keep the memory

    def _peers_left(self) -> str | None:
        """What a peer wrote here when it ended a channel for ever, as then it closes alone; polled on the host."""
        for channel in self._channels:
            start = channel.index * self.layout.channel_bytes + self.layout.abort_words_offset
            with _device.on(self._side):  # perhaps in another thread
                words = self._memory.region[start : start + 8 * self.num_ranks].view(torch.int64).tolist()
            for rank, word in enumerate(words):
                if error := native.sticky_error(self.rank, native.abort_status(word)):
                    return f"rank {rank} ended channel {channel.index} for ever: {one_line(error)}"
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this A2A was closed")

    def _check_alive(self) -> None:
        self._check_open()
        for channel in self._channels:
            if channel.status.failure and (error := channel.error()):
                raise error

    def _check_ready(self) -> None:
        """Raise what went wrong so far, and where torch's current device is not the one to launch on."""
        self._check_alive()
        _device.check_current(self.device, "this A2A runs")

    def _channel(self, index: int) -> Channel:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"channel must be an int, not {type(index).__name__}")
        if not 0 <= index < len(self._channels):
            last = len(self._channels) - 1
            raise ValueError(f"channel={index}: config.channels={last + 1}, legal are 0 to {last}")
        return self._channels[index]

    def _channel_of(self, handle: Handle) -> Channel:
        """The channel of a round that may be ended now."""
        self._check_ready()
        if not isinstance(handle, Handle):
            raise TypeError(f"handle must be what dispatch returned, not {type(handle).__name__}")
        if handle.a2a is not self:
            raise RoundError("this handle was made by another A2A")
        channel = self._channels[handle.channel]
        channel.expect_open(handle)
        return channel


_kept: set[Channel] = set()  # on GPUs, whose kernels may run longer than an object lives, until all ranks have closed


def _agree(
    config: Config, group: world.Group, device: str | torch.device | None, timeout_s: float
) -> tuple[torch.device, native.Library]:
    """The device and its library, once all ranks have them and the same Config; else each rank says who differs."""
    library, problem, chosen = None, "", _device.CPU
    try:
        home = group.device if isinstance(group, world.LocalRank) else None
        chosen = _device.choose(home or device)
        if home and device is not None and torch.device(device).type != chosen.type:
            raise ValueError(f"device={str(device)!r}, but the local world is on {home!r}")
        library = native.load(native.library_kind(chosen))
        library.load_kernels()
    except (EpError, OSError, RuntimeError, ValueError) as error:
        problem = str(error)
    mine = {field.name: repr(getattr(config, field.name)) for field in dataclasses.fields(config)}
    mine["device"] = chosen.type
    texts = group.all_gather(json.dumps([problem, mine]).encode(), "connect: configurations", timeout_s)
    told: list[tuple[str, dict[str, str]]] = [json.loads(text) for text in texts]
    for rank, (theirs, _) in enumerate(told):
        if theirs:
            raise EpError(f"rank {group.rank}, connect: rank {rank} cannot run: {theirs}")
    assert library is not None  # this rank was among those just asked
    different = []
    for name in mine:
        holders: dict[str, list[int]] = {}
        for rank, (_, fields) in enumerate(told):
            holders.setdefault(fields.get(name, "absent"), []).append(rank)
        if len(holders) > 1:
            different.append(f"{name}: " + ", ".join(f"{v} on rank {_ranks(r)}" for v, r in holders.items()))
    if different:
        raise ConfigMismatch(f"rank {group.rank}: the ranks' configurations differ: {'; '.join(different)}")
    return chosen, library


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")


class Watch:
    """A thread that looks for a sticky error. Made by `A2A.watch`."""

    def __init__(self, a2a: A2A, on_error: Callable[[StickyError], None], every_s: float) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(a2a, on_error, every_s), daemon=True, name="watch")
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a call of `on_error` that has begun goes on. Local."""
        self._stopped.set()

    def _run(self, a2a: A2A, on_error: Callable[[StickyError], None], every_s: float) -> None:
        while not self._stopped.wait(every_s) and not a2a._closed:
            if error := next(filter(None, (channel.error() for channel in a2a._channels)), None):
                on_error(error)
                return
