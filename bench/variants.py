"""What is timed: the rounds of this library, those of other libraries, and plain work beside them.

`Together` and `Alone` are the ranks that this process drives: all of a local world from one thread, or one. Each
variant captures its operations once for a case and gives their times by `times_us(op, num)`.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch

import ep_a2a
from bench import cases
from bench.cases import Case, Inputs
from bench.harness import Clock, HostClock, Sample, Work
from ep_a2a.rendezvous import Group

NUM_WARM, NUM_WARM_TURN = 5, 1  # before the first samples of a variant, and at every later turn
MEETING_S = 120.0


# ---- ranks -------------------------------------------------------------------------------------------------------


class Ranks(Protocol):
    """The ranks that one process (or thread) drives."""

    world: str
    num_ranks: int
    is_first: bool

    @property
    def level(self) -> Work | None:
        """Brings all ranks together on the host, where one process does not drive them all."""

    def connect(self, case: Case) -> AbstractContextManager[Sequence[ep_a2a.A2A]]:
        """The connected objects of these ranks."""

    def dispatch(self, entries: list[Any], /) -> list[Any]: ...
    def combine(self, entries: list[Any], /) -> Any: ...
    def release(self, entries: list[Any], /) -> None: ...
    def each(self, work: Work) -> None:
        """Run `work` on the stream of each of these ranks."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes (or threads), as JSON carries them. Collective."""


class Together:
    """All ranks of a local world, a stream each, driven by one thread."""

    world, is_first = "local", True
    level: Work | None = None

    def __init__(self, world: ep_a2a.LockstepWorld) -> None:
        self._world = world
        self.num_ranks = len(world.ranks)
        self.dispatch, self.combine, self.release = world.dispatch, world.combine, world.release

    def connect(self, case: Case) -> AbstractContextManager[Sequence[ep_a2a.A2A]]:
        return ep_a2a.connect(case.config(), self._world)

    def each(self, work: Work) -> None:
        streams = [stream for stream in self._world.streams if stream is not None]
        if not streams:
            for _ in range(self.num_ranks):
                work()
            return
        current = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                work()
        for stream in streams:
            current.wait_stream(stream)

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Alone:
    """One rank of several processes, or of threads on a CPU."""

    def __init__(self, group: Group, world: str, device: str) -> None:
        self._group, self._device = group, device
        self.world, self.num_ranks, self.is_first = world, group.size, group.rank == 0

    def level(self) -> None:
        self._group.barrier("bench: level", MEETING_S)

    @contextmanager
    def connect(self, case: Case) -> Iterator[Sequence[ep_a2a.A2A]]:
        with ep_a2a.connect(case.config(), self._group, self._device) as a2a:
            yield [a2a]

    def dispatch(self, entries: list[Any]) -> list[Any]:
        return [ep_a2a.dispatch(*entry) for entry in entries]

    def combine(self, entries: list[Any]) -> list[torch.Tensor]:
        return [ep_a2a.combine(*entry) for entry in entries]

    def release(self, entries: list[Any]) -> None:
        for entry in entries:
            ep_a2a.release(*entry)

    def each(self, work: Work) -> None:
        work()

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(one) for one in self._group.all_gather(json.dumps(value).encode(), "bench", MEETING_S)]


# ---- variants ----------------------------------------------------------------------------------------------------


class Variant(Protocol):
    """Something with times."""

    name: str
    choice: str | None

    @property
    def ops(self) -> Sequence[str]: ...
    def schedule_of(self, op: str) -> str | None:
        """And what else tells variants of one name apart."""

    def times_us(self, op: str, num: int) -> list[float]: ...


class Timed:
    """A variant whose operations are samples of a clock."""

    name = ""
    schedule: str | None = None
    choice: str | None = None

    def __init__(self, clock: Clock, level: Work | None) -> None:
        self._clock, self._level = clock, level
        self._samples: dict[str, Sample] = {}
        self._is_warm: set[str] = set()

    @property
    def ops(self) -> Sequence[str]:
        return list(self._samples)

    def schedule_of(self, op: str) -> str | None:
        return self.schedule

    def times_us(self, op: str, num: int) -> list[float]:
        num_warm = NUM_WARM_TURN if op in self._is_warm else NUM_WARM
        self._is_warm.add(op)
        return self._clock.times_us(self._samples[op], num, num_warm, self._level)


class Ours(Timed):
    """Rounds of this library with one schedule, of all ranks of this process; "ours-bf16": of rows not encoded yet."""

    def __init__(
        self, ranks: Ranks, clock: Clock, a2as: Sequence[ep_a2a.A2A], inputs: Inputs, name: str, schedule: str
    ) -> None:
        super().__init__(clock, ranks.level)
        self._ranks, self._a2as, self._inputs = ranks, a2as, inputs
        self.name, self.choice = name, "auto" if schedule == "auto" else "forced"
        if schedule != "auto":
            for a2a in a2as:
                a2a.schedule = schedule  # type: ignore[assignment]
        self.schedule = a2as[0].schedule
        self._entries = [(a2a, *inputs.of(a2a.rank, name != "ours-bf16")) for a2a in a2as]
        rows = inputs.goes.shape[1], a2as[0].config.hidden
        dtype, device = a2as[0].config.combine.result_dtype, inputs.goes.device
        self._outs = [torch.empty(rows, dtype=dtype, device=device) for _ in a2as]
        self._found: list[Any] = []
        self._capture()
        if name == "ours-bf16":
            del self._samples["combine"]  # knows nothing of how the rows came

    def _capture(self) -> None:
        clock = self._clock
        self._pair()  # by calls: what is loaded at the first use is loaded
        clock.wait()
        dispatch, release = clock.capture(self._dispatch), clock.capture(self._release)
        clock.capture(self._dispatch)  # `combine` is captured with a handle that is open; any dispatch may go before it
        combine, pair = clock.capture(self._combine), clock.capture(self._pair)
        self._dispatched, self._combined, self._paired = dispatch, combine, pair
        # A round that nobody times makes the ranks of processes start together, as far as flags tell.
        even = (dispatch, release) if self._level is not None and not isinstance(clock, HostClock) else ()
        self._samples = {
            "dispatch": Sample(dispatch, even, (release,)),
            "combine": Sample(combine, (dispatch,)),
            "pair": Sample(pair, even),
        }

    def _dispatch(self) -> None:
        self._found = self._ranks.dispatch(self._entries)

    def _release(self) -> None:
        self._ranks.release([(a2a, handle) for a2a, (_, handle) in zip(self._a2as, self._found)])

    def _combine(self) -> None:
        ends = zip(self._a2as, self._found, self._outs)
        self._ranks.combine([(a2a, handle, None, None, out) for a2a, (_, handle), out in ends])

    def _pair(self) -> None:
        self._dispatch()
        self._combine()

    def check(self) -> None:
        """What replays deliver is what was sent, and what they bring back the sums of it. Collective."""
        self._checked(self._dispatched, self._combined)
        self._checked(self._paired)

    def _checked(self, *works: Work) -> None:
        for (received, _), out in zip(self._found, self._outs):
            cases.poison(received)
            out.fill_(float("nan"))
        self._clock.wait()
        if self._level is not None:
            self._level()  # no peer writes here before
        for work in works:
            work()
        self._clock.wait()
        for a2a, (received, _), out in zip(self._a2as, self._found, self._outs):
            a2a.check()
            cases.check_received(received, self._inputs, a2a.rank)
            cases.check_out(out, self._inputs, a2a.rank)


def nothing() -> None:
    """The least work: on a GPU a kernel of one thread that returns at once."""


class Empty(Timed):
    """The least kernel on each rank's stream: what a graph of that shape costs."""

    name = "empty"

    def __init__(self, ranks: Ranks, clock: Clock, ops: Sequence[str]) -> None:
        super().__init__(clock, ranks.level)
        work = nothing if clock.device == "cpu" else lambda: torch.cuda._sleep(1)
        ranks.each(work)
        replay = clock.capture(lambda: ranks.each(work))
        self._samples = dict.fromkeys(ops, Sample(replay))


class Memset(Timed):
    """Zeros over as many bytes as the operations write."""

    name = "memset"

    def __init__(self, ranks: Ranks, clock: Clock, num_bytes: dict[str, int]) -> None:
        super().__init__(clock, ranks.level)
        self._buffer = torch.empty(max(4, *num_bytes.values()), dtype=torch.uint8, device=clock.device)
        for op, num in num_bytes.items():
            self._samples[op] = Sample(partial(memset, self._buffer[: max(4, num)]))


def memset(buffer: torch.Tensor) -> None:
    """Zeros by the driver, which torch's own `zero_` falls behind; whole words. Current stream."""
    if not buffer.is_cuda:
        buffer.zero_()
        return
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    address, words = ctypes.c_uint64(buffer.data_ptr()), ctypes.c_size_t(buffer.numel() // 4)
    code = ctypes.CDLL("libcuda.so.1").cuMemsetD32Async(address, ctypes.c_uint(0), words, stream)
    if code:
        raise RuntimeError(f"cuMemsetD32Async: error {code}")


STREAM_KERNEL = """
extern "C" __global__ void stream(const uint4* from, uint4* to, long long num_read, long long num_written) {
  const long long first = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (first >= num_read) return;
  const uint4 vector = __ldcs(from + first);
  for (long long i = first; i < num_written; i += num_read) __stcs(to + i, vector);
}
"""
STREAM_THREADS = 512


class Stream(Timed):
    """The bytes of a dispatch by the plainest kernel: it reads one piece of memory once, and writes it several times.

    Memory that reads and writes in turn is slower than in a copy, where as much is read as written. Needs CuPy.
    """

    name = "stream"

    def __init__(self, ranks: Ranks, clock: Clock, num_read: int, num_written: int) -> None:
        super().__init__(clock, ranks.level)
        import cupy

        kernel = cupy.RawKernel(STREAM_KERNEL, "stream")
        read, written = max(1, num_read // 16), max(1, num_written // 16)
        source, target = (torch.ones(16 * n, dtype=torch.uint8, device=clock.device) for n in (read, written))
        arguments = source.data_ptr(), target.data_ptr(), read, written
        self._kept = source, target

        def run() -> None:
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                kernel((-(-read // STREAM_THREADS),), (STREAM_THREADS,), arguments)

        self._samples = {"dispatch": Sample(run)}


# ---- other libraries ---------------------------------------------------------------------------------------------


class Rival:
    """Another library's rounds, in a process of its own (`bench/peers`). What fails is told, and left out."""

    choice: str | None = None

    def __init__(self, name: str, make: Callable[[str], Any], tell: Callable[[str], None]) -> None:
        self.name, self._make, self._tell = name, make, tell
        self._peer: Any = None
        self._is_warm: set[str] = set()
        self.ops: Sequence[str] = ()

    def schedule_of(self, op: str) -> str | None:
        """How it was set up, where the peer notes it: `PDL on`, or `dispatch PDL on, combine PDL off`."""
        note = getattr(self._peer, "note", "")
        found = re.search(rf"(?:^|, ){op}:? ([^,]+)", note)
        return found[1] if found else note.split(",")[0] or None

    def prepare(self, ops: Sequence[str], case: Case, ids: torch.Tensor) -> None:
        """Build a case; where not all operations can be, dispatch alone."""
        self.ops = ()
        self._is_warm = set()
        for wanted in dict.fromkeys((tuple(ops), tuple(op for op in ops if op == "dispatch"))):
            try:
                self._peer = self._peer or self._make(self.name)
                if wanted:
                    self._peer.prepare(wanted, ids, case.hidden, case.num_experts)
            except Exception as error:  # of another library, in another process: it costs its own rows
                self._tell(f"{self.name}, {case}, {', '.join(wanted)}: {error}")
            else:
                self.ops = wanted
                return

    def times_us(self, op: str, num: int) -> list[float]:
        if op not in self.ops:
            return []
        num_warm = NUM_WARM_TURN if op in self._is_warm else NUM_WARM
        self._is_warm.add(op)
        try:
            found: list[float] = self._peer.times_us(op, num_warm + num)
        except Exception as error:
            self._tell(f"{self.name}, {op}: {error}")
            self.ops = ()
            return []
        return found[num_warm:]

    def close(self) -> None:
        """End the process."""
        peer, self._peer = self._peer, None
        if peer is not None:
            try:
                peer.close()
            except Exception as error:
                self._tell(f"{self.name}: {error}")
