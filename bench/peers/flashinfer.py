"""FlashInfer's one-sided all-to-all: the ranks are streams of one GPU, a round of all of them is one CUDA graph.

A rank sends four planes of rows: packed NVFP4 values, block scales, ids, weights. Each round is captured without
and with programmatic dependent launch (PDL) and checked; for each operation the choice with the better median counts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm_ffi

from bench.harness import GraphClock, Sample, Work
from bench.peers import PeerError, module_path

MAX_RANKS = 16
TRIALS = 11
TIMEOUT_S = 5  # of 0.7.4's kernels, which then trap; 0.7.0's are fixed at minutes
Graphs = dict[str, Work]  # what replays them


class Case:
    """What every rank sends, and to whom. A row's first four bytes are its token."""

    def __init__(self, ids: torch.Tensor, hidden: int, num_experts: int) -> None:
        self.ranks, self.tokens, self.top_k = ids.shape
        self.hidden, self.num_experts = hidden, num_experts
        self.ids = [one.cuda() for one in ids]  # one by one: the modules want each aligned
        self.planes = [self._planes(one) for one in self.ids]
        share, more = divmod(num_experts, self.ranks)  # the first ranks own one more
        first = [rank * share + min(rank, more) for rank in range(self.ranks + 1)]
        masks = [[((one >= a) & (one < b)).any(1) for a, b in itertools.pairwise(first)] for one in self.ids]
        self.sent = [[mask.nonzero()[:, 0] for mask in row] for row in masks]  # [source][target]: tokens
        self.num_targets = [torch.stack(row).sum(0) for row in masks]

    def _planes(self, ids: torch.Tensor) -> list[torch.Tensor]:
        values, scales = (
            torch.randint(256, (self.tokens, self.hidden // part), dtype=torch.uint8, device="cuda") for part in (2, 16)
        )
        values[:, :4] = torch.arange(self.tokens, dtype=torch.int32, device="cuda").view(torch.uint8).view(-1, 4)
        return [values, scales, ids, torch.rand(self.tokens, self.top_k, device="cuda")]


class FlashInfer:
    """What the versions share; each says how it is called."""

    name = ""
    order: Sequence[int] = (0, 1, 2, 3)  # of the planes in a call
    combine_op = ""
    case: Case
    workspace: torch.Tensor  # [ranks, bytes]
    meta: list[Any]  # where its parts are, by rank

    def __init__(self) -> None:
        self.module = tvm_ffi.load_module(str(module_path(self.name)))
        self.clock = GraphClock()
        self.all_streams = [torch.cuda.Stream() for _ in range(MAX_RANKS)]  # torch hands out 32, then the same again

    def prepare(self, ops: Sequence[str], ids: Any, hidden: int, num_experts: int, careful: bool) -> str:
        self.graphs: Graphs = {}
        self.case = self.workspace = self.received = self.outbox = None  # type: ignore[assignment]
        torch.cuda.empty_cache()
        self.both = "combine" in ops or "pair" in ops
        self.refuse(torch.from_numpy(ids), hidden)
        self.case = case = Case(torch.from_numpy(ids), hidden, num_experts)
        self.payloads = [[planes[i] for i in self.order] for planes in case.planes]
        self.output = [torch.empty(case.tokens, hidden, dtype=torch.bfloat16, device="cuda") for _ in case.ids]
        self.offsets: list[tuple[list[int], int]] = [([], 0)] * case.ranks  # in a rank's workspace: received, outbox
        self.set_up()
        self.streams = self.all_streams[: case.ranks]
        steps: dict[str, Callable[[int, bool], object]] = {"dispatch": self.dispatch}
        self._eager(self.dispatch)
        self.received = [
            [self._view(rank, *one) for one in zip(at, self.payloads[0])] for rank, (at, _) in enumerate(self.offsets)
        ]
        if self.both:
            self.outbox = [self._view(rank, at, self.output[0]) for rank, (_, at) in enumerate(self.offsets)]
            steps |= {"combine": self.combine, "pair": lambda r, pdl: (self.dispatch(r, pdl), self.combine(r, pdl))}
            self._eager(self.combine)
        choices: dict[str, Graphs] = {}
        for pdl in (False,) if careful else (False, True):
            captured = {op: self._captured(step, pdl) for op, step in steps.items()}
            self.graphs = dict(captured)
            wrong = self._check()
            if wrong and not pdl:
                raise PeerError(wrong)
            choices |= {} if wrong else {f"PDL {'on' if pdl else 'off'}" + " (on not tried)" * careful: captured}
        notes = {op: self._choose(op, choices) for op in ops}
        return (
            ", ".join(f"{op} {note}" for op, note in notes.items()) if len(set(notes.values())) > 1 else notes[ops[0]]
        )

    def times_us(self, op: str, num: int, num_warm: int = 0) -> list[float]:
        """Dispatch and combine take turns, where there is a combine."""
        before = (self.graphs["dispatch"],) if op == "combine" else ()
        after = (self.graphs["combine"],) if op == "dispatch" and self.both else ()
        return self.clock.times_us(Sample(self.graphs[op], before, after), num, num_warm)

    def refuse(self, ids: torch.Tensor, hidden: int) -> None:
        """Raise PeerError for what would hang: every CTA of combine waits, so all ranks' must be on the GPU."""
        ranks, tokens, top_k = ids.shape
        if ranks > MAX_RANKS:
            raise PeerError(f"{ranks} ranks: at most {MAX_RANKS} here")
        held = torch.cuda.get_device_properties(0).multi_processor_count * self.combine_ctas_per_sm(top_k)
        if self.both and ranks * tokens > held - 4:
            raise PeerError(f"combine hangs: {ranks} x {tokens} CTAs wait for each other, and the GPU holds {held}")

    def _choose(self, op: str, choices: dict[str, Graphs]) -> str:
        medians = {}
        for choice, graphs in choices.items():
            self.graphs[op] = graphs[op]
            medians[choice] = statistics.median(self.times_us(op, TRIALS, num_warm=3))
        best = min(medians, key=lambda choice: medians[choice])
        self.graphs[op] = choices[best][op]
        return best

    def _on_streams(self, step: Callable[[int], object]) -> None:
        for rank, stream in enumerate(self.streams):
            with tvm_ffi.use_torch_stream(torch.cuda.stream(stream)):
                step(rank)

    def _eager(self, step: Callable[[int, bool], object]) -> None:
        torch.cuda.synchronize()  # what this stream has written is read on others
        self._on_streams(lambda rank: step(rank, False))
        torch.cuda.synchronize()

    def _captured(self, step: Callable[[int, bool], object], pdl: bool) -> Work:
        def fork_and_join() -> None:
            main = torch.cuda.current_stream()
            fork = main.record_event()

            def on_stream(rank: int) -> None:
                self.streams[rank].wait_event(fork)
                step(rank, pdl)
                main.wait_event(self.streams[rank].record_event())

            self._on_streams(on_stream)

        return self.clock.capture(fork_and_join)

    def _replayed(self, op: str) -> None:
        torch.cuda.synchronize()
        self.graphs[op]()
        torch.cuda.synchronize()

    def _check(self) -> str:
        """What one round gets wrong: every row arrives once and as it was sent; combine's sums, if any, are exact."""
        for plane in itertools.chain(*self.received):
            plane.zero_()
        self._replayed("dispatch")
        for dst, planes in enumerate(self.received):
            for src, payload in enumerate(self.payloads):
                sent = self.case.sent[src][dst]
                tokens = planes[0][src, : len(sent), :4].contiguous().view(torch.int32)[:, 0]
                for got, wanted in zip(planes, payload):
                    if not torch.equal(got[src, : len(sent)][tokens.argsort()], wanted[sent]):
                        return f"rank {dst} did not get the rows that rank {src} sent"
                if self.both:
                    self.outbox[dst][src, : len(sent)] = (tokens % 16)[:, None].bfloat16()
        if self.both:
            self._replayed("combine")
            for rank, output in enumerate(self.output):
                sums = torch.arange(self.case.tokens, device="cuda") % 16 * self.case.num_targets[rank]
                if not torch.equal(output.float(), sums[:, None].float().expand_as(output)):  # <= 240: exact
                    return f"rank {rank} did not get the sums of its rows"
        return ""

    def _view(self, rank: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        shape = (self.case.ranks, self.case.tokens, like.shape[1])
        num_bytes = shape[0] * shape[1] * shape[2] * like.element_size()
        return self.workspace[rank, offset : offset + num_bytes].view(like.dtype).view(shape)

    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a row of dispatch and, where there is a combine, of combine."""
        return sum(
            plane.shape[1] * plane.element_size() for plane in self.payloads[0]
        ), 2 * self.case.hidden * self.both

    def _where(self, rank: int) -> tuple[object, ...]:
        case = self.case
        return self.workspace, self.meta[rank], case.tokens, rank, case.ranks, case.top_k

    def dispatch(self, rank: int, pdl: bool) -> None:
        args = (self.case.ids[rank], self.payloads[rank], *self._where(rank), self.case.num_experts)
        found = self.module.moe_a2a_dispatch(*args, *self.dispatch_options(pdl))
        self.offsets[rank] = self.places(rank, *found)

    def combine(self, rank: int, pdl: bool) -> None:
        at = self.offsets[rank][1]
        args = (self._view(rank, at, self.output[rank]), self.case.tokens, *self._where(rank), at, True)
        getattr(self.module, self.combine_op)(*args, *self.combine_options(self.output[rank], pdl))


class FlashInfer074(FlashInfer):
    """Its Lamport and counted-write transports are not compiled for Hopper."""

    name = "flashinfer-0.7.4"
    combine_op = "moe_a2a_combine"

    def combine_ctas_per_sm(self, top_k: int) -> int:
        return 4  # 256 threads of at most 62 registers

    def set_up(self) -> None:
        case, rows = self.case, self.case.ranks * self.case.tokens
        names, values = self.module.moe_a2a_get_metainfo_index_pairs()
        constant = {str(name).removeprefix("MOE_A2A_"): int(value) for name, value in zip(names, values)}
        meta = torch.empty(constant["NUM_METAINFO_FIELDS"], dtype=torch.int64)
        dispatch_row, combine_row = self.row_bytes()
        dispatch_bytes = rows * dispatch_row + constant["MAX_PAYLOADS"] * constant["WORKSPACE_ALIGNMENT"]
        sizes = (dispatch_bytes, max(rows * combine_row, 1), 0, 0)
        self.module.moe_a2a_get_workspace_layout(case.ranks, case.tokens, case.top_k, *sizes, False, meta)
        size = -(-int(meta[constant["WORKSPACE_SIZE_INDEX"]]) // 256) * 256
        self.workspace, self.meta = torch.zeros(case.ranks, size, dtype=torch.uint8, device="cuda"), [meta] * case.ranks
        for rank in range(case.ranks):
            self.module.moe_a2a_initialize(self.workspace, meta, rank, case.ranks)

    def dispatch_options(self, pdl: bool) -> tuple[object, ...]:
        return None, False, -1, -1, False, False, None, TIMEOUT_S, pdl

    def places(self, rank: int, received: Sequence[int], outbox: int, stats: int) -> tuple[list[int], int]:
        return [int(offset) for offset in received], int(outbox)

    def combine_options(self, output: torch.Tensor, pdl: bool) -> tuple[object, ...]:
        return False, False, False, None, output, TIMEOUT_S, pdl, False


class FlashInfer070Generic(FlashInfer):
    """The order of the planes that its own benchmark has: rows are copied a plane after the other."""

    name = "flashinfer-0.7.0-generic"
    order = (0, 2, 3, 1)
    combine_op = "moe_a2a_combine_into"

    def combine_ctas_per_sm(self, top_k: int) -> int:
        return 1 if top_k > 10 else 2  # 256 threads of up to 238 registers

    def refuse(self, ids: torch.Tensor, hidden: int) -> None:
        super().refuse(ids, hidden)
        if (ids < 0).any():
            raise PeerError("0.7.0 sends tokens of id -1 to rank 0")

    def set_up(self) -> None:
        case = self.case
        size = int(self.module.moe_a2a_get_aux_data_size(case.ranks, case.tokens, 0))
        size += sum(case.ranks * case.tokens * num_bytes for num_bytes in self.row_bytes())
        self.workspace = torch.zeros(case.ranks, (size // 128 + 2) * 128, dtype=torch.uint8, device="cuda")
        initialize = self.module.moe_a2a_initialize
        self.meta = [initialize(self.workspace, rank, case.ranks, case.tokens, 0) for rank in range(case.ranks)]

    def dispatch_options(self, pdl: bool) -> tuple[object, ...]:
        return pdl, None, False, None

    def places(self, rank: int, received: Sequence[int], sizes: object, outbox: int, *_: int) -> tuple[list[int], int]:
        return [int(offset) - rank * self.workspace.stride(0) for offset in received], int(outbox)

    def combine_options(self, output: torch.Tensor, pdl: bool) -> tuple[object, ...]:
        return None, None, 1.0, 0, False, pdl, False, None, output


class FlashInfer070Phased(FlashInfer070Generic):
    """The one order of planes whose rows a CTA's warps copy side by side."""

    name = "flashinfer-0.7.0-phased"
    order = (0, 1, 2, 3)

    def refuse(self, ids: torch.Tensor, hidden: int) -> None:
        super().refuse(ids, hidden)
        ranks, _, top_k = ids.shape
        narrow = hidden == 2048 if top_k == 22 else hidden <= 2048 and hidden % 256 == 0 and top_k in range(6, 19, 2)
        if ranks not in (4, 8, 16) or not narrow:
            raise PeerError(f"0.7.0 is not phased for {ranks} ranks, hidden {hidden}, top-k {top_k}")
