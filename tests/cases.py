"""Cases that rounds on GPUs go through, by name: formats, counts, routings, shapes, schedules, and their corners."""

from __future__ import annotations

from ep_a2a import BF16, FP8, FP16, FP32, NVFP4
from ep_a2a.layout import COMBINE_FORMATS, PAYLOAD_FORMATS
from ep_a2a.testing import ROUTINGS
from tests.bodies import Case

COUNTS = ("none", "one", "odd", "full", "varied", "up_and_down", "one_rank_none", "some_ranks_none", "one_rank_one")
NEMOTRON = Case(num_experts=512, top_k=22, hidden=2048, max_tokens=33, num_rounds=2)
DEEPSEEK = Case(num_experts=256, top_k=8, hidden=7168, max_tokens=17, num_rounds=2)


def _table() -> dict[str, Case]:
    found = {f"payload {fmt}": Case(payload=fmt, routing="mixed") for fmt in PAYLOAD_FORMATS}
    found |= {f"payload {f}, planes": Case(payload=f, source="planes") for f in PAYLOAD_FORMATS if f.is_encoded}
    found |= {f"NVFP4 from {s}": Case(source=s) for s in ("float16", "float32", "packed", "packed_scalar")}
    found["NVFP4 from packed rows"] = Case(source="packed_rows", hidden=2880)
    for fmt in COMBINE_FORMATS:
        case = Case(combine=fmt, num_experts=8, top_k=5, payload=BF16)
        found |= {f"combine {fmt}, {how}": Case(**vars(case) | {"how": how}) for how in ("outbox", "rows", "out")}
    found["release"] = Case(how="release", num_rounds=5)
    found |= {f"counts {counts}": Case(counts=counts, num_rounds=5) for counts in COUNTS}
    found |= {f"routing {routing}": Case(routing=routing, num_rounds=4) for routing in (*ROUTINGS, "mixed")}
    for tokens in (1, 31, 32, 33, 65):
        found[f"{tokens} tokens"] = Case(max_tokens=tokens, counts="full", num_rounds=2)
        found[f"up to {tokens} tokens"] = Case(max_tokens=tokens, counts="up_and_down", routing="holes", num_rounds=4)
    for schedule in ("general", "phased"):
        for top_k in (1, 9, 22, 32):
            found[f"top-{top_k}, {schedule}"] = Case(num_experts=40, top_k=top_k, schedule=schedule)
        for hidden in (16, 48, 2880, 4096):
            found[f"H{hidden}, {schedule}"] = Case(hidden=hidden, max_tokens=9, num_rounds=2, schedule=schedule)
        for extra in ((1,), (36,), (1, 3, 4, 36), (100, 7, 2048, 33)):
            found[f"extra {extra}, {schedule}"] = Case(extra_planes=extra, schedule=schedule, num_rounds=2)
        for payload in (NVFP4, BF16, FP8):
            found[f"unaligned {payload}, {schedule}"] = Case(
                payload=payload, unaligned=True, schedule=schedule, extra_planes=(32, 36, 3), num_rounds=2
            )
    for counts in ("varied", "none", "up_and_down"):
        found[f"device counts {counts}"] = Case(device_counts=True, counts=counts, routing="holes", num_rounds=4)
    found |= {f"{n} CTAs": Case(num_sms=n, max_tokens=40, counts="full", num_rounds=2) for n in (1, 2, 7)}
    found["one expert in all"] = Case(num_experts=1, top_k=1, max_tokens=8)
    found["two experts"] = Case(num_experts=2, top_k=2, routing="duplicates")
    found["experts that do not divide"] = Case(num_experts=33, top_k=6)
    return found


CASES = _table()

SHAPES = {
    "Nemotron NVFP4": NEMOTRON,
    "Nemotron BF16": Case(**vars(NEMOTRON) | {"payload": BF16, "combine": FP16}),
    "Nemotron MXFP4": Case(**vars(NEMOTRON) | {"payload": PAYLOAD_FORMATS[1], "combine": FP8}),
    "DeepSeek NVFP4": DEEPSEEK,
    "DeepSeek FP8": Case(**vars(DEEPSEEK) | {"payload": FP8, "combine": FP32}),
    "DeepSeek BF16": Case(**vars(DEEPSEEK) | {"payload": BF16, "combine": NVFP4}),
}
