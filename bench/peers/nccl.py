"""NCCL's all-to-all of the bytes that a round moves, packed beforehand: one rank a GPU, all in this process.

What dispatch and combine cost beside it, packing rows and adding them up, is not in its times.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from bench.harness import CYCLES_PER_US, LEAD_US
from bench.peers import PeerError

UINT8 = 1  # ncclUint8
Sizes = list[list[int]]  # bytes [source][target]


class Nccl:
    """Sends and receives of one group, captured as a graph on each GPU."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libnccl.so.2")
        self.comms: Any = ()

    def prepare(self, ops: Sequence[str], ids: Any, hidden: int, num_experts: int, careful: bool) -> str:
        ids = torch.from_numpy(ids)
        ranks, top_k = ids.shape[0], ids.shape[2]
        if torch.cuda.device_count() < ranks:
            raise PeerError(f"needs {ranks} GPUs, found {torch.cuda.device_count()}")
        if num_experts % ranks:
            raise PeerError(f"{num_experts} experts do not divide among {ranks} ranks")
        if len(self.comms) != ranks:
            self.comms = (ctypes.c_void_p * ranks)()
            self._call("CommInitAll", self.comms, ranks, (ctypes.c_int * ranks)(*range(ranks)))
            self.streams = [torch.cuda.Stream(rank) for rank in range(ranks)]
        owners = torch.where(ids < 0, -1, ids // (num_experts // ranks))
        rows = torch.stack([(owners == rank).any(2).sum(1) for rank in range(ranks)], 1)  # [source, target]
        there: Sizes = (rows * (hidden // 2 + hidden // 16 + 8 * top_k)).tolist()
        back: Sizes = (rows.T * 2 * hidden).tolist()
        steps = {"dispatch": [there], "combine": [back], "pair": [there, back]}
        self.kept: list[Any] = []
        self.level = self._captured([[[16] * ranks] * ranks])
        self.graphs = {op: self._captured(steps[op]) for op in ops}
        return "one GPU a rank, rows packed beforehand"

    def times_us(self, op: str, num: int) -> list[float]:
        """The slowest GPU's times; a small exchange just before brings them together."""
        times = []
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in self.streams]
        for i in range(num + 3):
            for rank, stream in enumerate(self.streams):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(int(LEAD_US * CYCLES_PER_US))
                    self.level[rank].replay()
                    events[rank][0].record()
                    self.graphs[op][rank].replay()
                    events[rank][1].record()
            self._wait()
            if i >= 3:
                times.append(max(1e3 * begin.elapsed_time(end) for begin, end in events))
        return times

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self.lib, f"nccl{name}")(*args)
        if code:
            raise RuntimeError(f"nccl{name}: error {code}")

    def _wait(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def _all_to_all(self, out: list[torch.Tensor], into: list[torch.Tensor], sizes: Sizes) -> None:
        self._call("GroupStart")
        for rank, stream in enumerate(self.streams):
            for do, buffer, part in (("Send", out, sizes[rank]), ("Recv", into, [row[rank] for row in sizes])):
                at = buffer[rank].data_ptr()
                for peer, size in enumerate(part):
                    where = (ctypes.c_void_p(at), ctypes.c_size_t(size), UINT8, peer)
                    comm = ctypes.c_void_p(self.comms[rank])
                    self._call(do, *where, comm, ctypes.c_void_p(stream.cuda_stream))
                    at += size
        self._call("GroupEnd")

    def _captured(self, steps: list[Sizes]) -> list[torch.cuda.CUDAGraph]:
        """A graph for each GPU; one round before checks what arrives."""
        rounds = []
        for sizes in steps:
            out = [
                torch.randint(256, (sum(row),), dtype=torch.uint8, device=f"cuda:{r}") for r, row in enumerate(sizes)
            ]
            into = [torch.zeros(sum(row), dtype=torch.uint8, device=f"cuda:{r}") for r, row in enumerate(zip(*sizes))]
            for rank in range(len(sizes)):
                torch.cuda.synchronize(rank)
            self._all_to_all(out, into, sizes)
            self._wait()
            parts = [one.split(row) for one, row in zip(out, sizes)]
            if not all(torch.equal(one, torch.cat([p[r].to(one.device) for p in parts])) for r, one in enumerate(into)):
                raise PeerError("what arrived is not what was sent")
            rounds.append((out, into, sizes))
        graphs = [torch.cuda.CUDAGraph() for _ in self.streams]
        for graph, stream in zip(graphs, self.streams):
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="relaxed")
        for one in rounds:
            self._all_to_all(*one)
        for graph, stream in zip(graphs, self.streams):
            with torch.cuda.stream(stream):
                graph.capture_end()
        self.kept.append(rounds)  # the buffers
        return graphs
