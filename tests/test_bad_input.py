"""Bad input: the exact error with its numbers, on every rank that can know, and a correct round afterwards."""

from __future__ import annotations

import pytest
import torch

import ep_a2a
from ep_a2a import BF16, NVFP4, ClosedError, EpError, InvalidCount, InvalidRouting, RoundError
from ep_a2a.arguments import DispatchSpec
from ep_a2a.quant import encode
from ep_a2a.testing import assert_same_bits
from tests import bodies
from tests.bodies import PATIENCE_S, Case

CASE = Case(num_experts=8, top_k=2, hidden=512, max_tokens=8, extra_planes=(4,), seed=5)


def run(num_ranks, body, *args):
    return ep_a2a.local(num_ranks).run(body, *args)


def good(**changed):
    """Arguments of a correct dispatch, some of them exchanged."""
    arguments = {
        "x": torch.ones(4, 512).bfloat16(),
        "topk_ids": torch.zeros(4, 2, dtype=torch.int32),
        "topk_weights": torch.ones(4, 2),
        "num_tokens": None,
        "extra": [torch.zeros(4, 4, dtype=torch.uint8)],
        "channel": 0,
    }
    return arguments | changed


def rows(num_tokens):
    return {
        "x": torch.ones(num_tokens, 512).bfloat16(),
        "topk_ids": torch.zeros(num_tokens, 2, dtype=torch.int32),
        "topk_weights": torch.ones(num_tokens, 2),
        "extra": [torch.zeros(num_tokens, 4, dtype=torch.uint8)],
    }


def packed(rows_shape=(4, 256), scales_shape=(4, 32), rows_dtype=torch.uint8, scales_dtype=torch.float8_e4m3fn):
    return torch.zeros(rows_shape, dtype=rows_dtype), torch.zeros(scales_shape).to(scales_dtype)


INT32 = torch.int32
BAD_DISPATCH = {
    "x dtype": (lambda: {"x": torch.ones(4, 512).double()}, TypeError, "x.*float64.*bfloat16.*float16.*float32"),
    "x int": (lambda: {"x": torch.ones(4, 512, dtype=INT32)}, TypeError, "x.*int32"),
    "x list": (lambda: {"x": [[1.0] * 512] * 4}, TypeError, "x must be"),
    "x hidden": (lambda: {"x": torch.ones(4, 496).bfloat16()}, ValueError, r"x.*4, 496.*4, 512"),
    "x rows": (lambda: {"x": torch.ones(5, 512).bfloat16()}, ValueError, r"\b5\b.*\b4\b|\b4\b.*\b5\b"),
    "x 1d": (lambda: {"x": torch.ones(512).bfloat16()}, ValueError, r"x.*\[512\].*512"),
    "x 3d": (lambda: {"x": torch.ones(1, 4, 512).bfloat16()}, ValueError, r"x.*1, 4, 512.*4, 512"),
    "x strides": (lambda: {"x": torch.ones(512, 4).bfloat16().t()}, ValueError, "x.*contiguous"),
    "x device": (lambda: {"x": torch.ones(4, 512, device="meta").bfloat16()}, ValueError, "x.*meta.*cpu"),
    "ids dtype": (lambda: {"topk_ids": torch.zeros(4, 2).long()}, TypeError, "topk_ids.*int64.*int32"),
    "ids top_k": (lambda: {"topk_ids": torch.zeros(4, 3, dtype=INT32)}, ValueError, r"topk_ids.*4, 3.*2\]"),
    "ids rows": (lambda: {"topk_ids": torch.zeros(3, 2, dtype=INT32)}, ValueError, r"3, 2"),
    "ids 1d": (lambda: {"topk_ids": torch.zeros(4, dtype=INT32)}, ValueError, r"topk_ids.*\[4\].*2\]"),
    "ids strides": (lambda: {"topk_ids": torch.zeros(2, 4, dtype=INT32).t()}, ValueError, "topk_ids.*contiguous"),
    "ids device": (lambda: {"topk_ids": torch.zeros(4, 2, dtype=INT32, device="meta")}, ValueError, "topk_ids.*meta"),
    "weights dtype": (lambda: {"topk_weights": torch.ones(4, 2).half()}, TypeError, "topk_weights.*float16.*float32"),
    "weights rows": (lambda: {"topk_weights": torch.ones(3, 2)}, ValueError, r"topk_weights.*3, 2.*4, 2"),
    "weights strides": (lambda: {"topk_weights": torch.ones(4, 4)[:, ::2]}, ValueError, "topk_weights.*contiguous"),
    "weights device": (lambda: {"topk_weights": torch.ones(4, 2, device="meta")}, ValueError, "topk_weights.*meta"),
    "extra dtype": (lambda: {"extra": [torch.zeros(4, 4, dtype=torch.int8)]}, TypeError, "extra.*0.*int8.*uint8"),
    "extra bytes": (lambda: {"extra": [torch.zeros(4, 3, dtype=torch.uint8)]}, ValueError, r"extra.*4, 3.*4, 4"),
    "extra strides": (lambda: {"extra": [torch.zeros(4, 4).byte().t()]}, ValueError, "extra.*contiguous"),
    "extra none": (lambda: {"extra": ()}, ValueError, r"\b0 extra.*4"),
    "extra two": (lambda: {"extra": [torch.zeros(4, 4).byte()] * 2}, ValueError, r"\b2 extra.*4"),
    "extra missing": (lambda: {"extra": None}, TypeError, "extra must be a tuple or list.*NoneType"),
    "x sparse": (lambda: {"x": torch.ones(4, 512).to_sparse()}, ValueError, "x is torch.sparse_coo"),
    "weights negated": (lambda: {"topk_weights": torch._neg_view(torch.ones(4, 2))}, ValueError, "a negated view"),
    "count dtype": (lambda: {"num_tokens": torch.tensor([3])}, TypeError, "num_tokens.*int64.*int32"),
    "count shape": (lambda: {"num_tokens": torch.ones(2, dtype=INT32)}, ValueError, r"num_tokens.*\[2\]"),
    "count int": (lambda: {"num_tokens": 3}, TypeError, "num_tokens.*int"),
    "count device": (lambda: {"num_tokens": torch.ones(1, dtype=INT32, device="meta")}, ValueError, "num_tokens.*meta"),
    "too many": (lambda: rows(9), ValueError, r"\b9\b.*max_tokens=8"),
    "channel": (lambda: {"channel": 1}, ValueError, "channel=1.*channels=1"),
    "channel below": (lambda: {"channel": -1}, ValueError, "channel=-1"),
    "channel text": (lambda: {"channel": "0"}, TypeError, "channel.*str"),
    "packed bytes": (lambda: {"x": packed(rows_shape=(4, 248))}, ValueError, "4, 248.*4, 256"),
    "packed dtype": (lambda: {"x": packed(rows_dtype=torch.int8)}, TypeError, "int8.*uint8"),
    "packed scales": (lambda: {"x": packed(scales_shape=(4, 31))}, ValueError, "scales.*4, 31.*4, 32"),
    "packed scales dtype": (lambda: {"x": packed(scales_dtype=torch.uint8)}, TypeError, "scales.*uint8.*float8_e4m3fn"),
    "packed global": (lambda: {"x": (*packed(), torch.ones(3))}, ValueError, r"global_scale.*\[3\].*\[4\]"),
    "packed global dtype": (lambda: {"x": (*packed(), torch.ones(4).double())}, TypeError, "global_scale.*float64"),
    "packed list": (lambda: {"x": list(packed())}, TypeError, "x must be a tensor"),
    "packed global negated": (lambda: {"x": (*packed(), torch._neg_view(torch.ones(4)))}, ValueError, "negated view"),
    "packed one": (lambda: {"x": packed()[:1]}, TypeError, r"\(rows, scales\) or \(rows, scales, global_scale\)"),
    "packed four": (
        lambda: {"x": (*packed(), torch.ones(4), torch.ones(4))},
        TypeError,
        r"\(rows, scales, global_scale\)",
    ),
}


def round_of(a2a, round_=0):
    bodies.one_round(a2a, CASE, round_)
    a2a.check()


@pytest.mark.parametrize("good_before", [False, True])
def test_bad_arguments_of_dispatch(good_before):
    def body(group):
        with ep_a2a.connect(CASE.config(), group=group) as a2a:
            for x in (good()["x"], packed(), (*packed(), torch.ones(4)), (*packed(), torch.ones(()))) * good_before:
                ep_a2a.release(a2a, ep_a2a.dispatch(a2a, **good(x=x))[1])
            for i, (name, (change, error, text)) in enumerate(BAD_DISPATCH.items()):
                if a2a.rank != i % a2a.num_ranks:  # one rank errs, the others do not know
                    continue
                for call in (ep_a2a.dispatch, ep_a2a.dispatch_begin):
                    with pytest.raises(Exception) as found:
                        call(a2a, **good(**change()))
                    assert found.type is error, (name, found.value)
                    found.match(text)
            group.barrier("all have erred", PATIENCE_S)
            for round_ in range(3):
                round_of(a2a, round_)
        return len(BAD_DISPATCH)

    assert run(3, body) == [len(BAD_DISPATCH)] * 3


@pytest.mark.parametrize("name", ["x hidden", "too many", "ids dtype", "channel"])
def test_a_correct_call_follows_each_bad_one(name):
    change, error, text = BAD_DISPATCH[name]

    def body(group):
        with ep_a2a.connect(CASE.config(), group=group) as a2a:
            for round_ in range(3):
                with pytest.raises(error, match=text):
                    ep_a2a.dispatch(a2a, **good(**change()))
                round_of(a2a, round_)

    run(2, body)


def test_tensors_like_those_that_passed_are_not_checked_in_words(monkeypatch):
    words = []
    check = DispatchSpec._check_rows
    monkeypatch.setattr(DispatchSpec, "_check_rows", lambda *given: words.append(1) or check(*given))
    spec = DispatchSpec(Case().config(), torch.device("cpu"))
    x, ids, weights = torch.ones(5, 512), torch.zeros(5, 4, dtype=torch.int32), torch.ones(5, 4)
    planes = encode(x, NVFP4)

    def checks_in_words(*given):
        before = len(words)
        spec.check(*given, None, ())
        return len(words) > before

    new = [(x, ids, weights), (x.bfloat16(), ids, weights), (planes, ids, weights), (planes[:2], ids, weights)]
    for given in (*new, (x[:4], ids[:4], weights[:4]), (x.clone(), ids, torch.ones(5, 8)[:, :4].contiguous())):
        assert checks_in_words(*given)
        copies = [tuple(t.clone() for t in part) if isinstance(part, tuple) else part.clone() for part in given]
        assert not checks_in_words(*copies)
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")  # as in another torch
    assert [checks_in_words(x[:3], ids[:3], weights[:3]) for _ in range(2)] == [True, True]


def test_packed_rows_need_nvfp4():
    def body(group):
        with ep_a2a.connect(Case(payload=BF16).config(), group=group) as a2a:
            with pytest.raises(TypeError, match="BF16"):
                ep_a2a.dispatch(a2a, packed(), torch.zeros(4, 4, dtype=INT32), torch.ones(4, 4))
            bodies.one_round(a2a, Case(payload=BF16), 0)

    run(2, body)


BAD_COMBINE = {
    "rows dtype": ({"rows": torch.ones(2, 8, 512)}, TypeError, "rows.*float32.*bfloat16"),
    "rows shape": ({"rows": torch.ones(2, 7, 512).bfloat16()}, ValueError, "rows.*2, 7, 512.*2, 8, 512"),
    "rows strides": ({"rows": torch.ones(2, 8, 1024).bfloat16()[..., ::2]}, ValueError, "rows.*contiguous"),
    "rows device": ({"rows": torch.ones(2, 8, 512, device="meta").bfloat16()}, ValueError, "rows.*meta.*cpu"),
    "rows address": ({"rows": torch.ones(8193).bfloat16()[1:].view(2, 8, 512)}, ValueError, "rows.*16 bytes"),
    "out dtype": ({"out": torch.ones(4, 512)}, TypeError, "out.*float32.*bfloat16"),
    "out rows": ({"out": torch.ones(5, 512).bfloat16()}, ValueError, "out.*5, 512.*4, 512"),
    "out hidden": ({"out": torch.ones(4, 496).bfloat16()}, ValueError, "out.*4, 496.*4, 512"),
    "out strides": ({"out": torch.ones(512, 4).bfloat16().t()}, ValueError, "out.*contiguous"),
    "out address": ({"out": torch.ones(2050).bfloat16()[1:2049].view(4, 512)}, ValueError, "out.*16 bytes"),
    "out device": ({"out": torch.ones(4, 512, device="meta").bfloat16()}, ValueError, "out.*meta.*cpu"),
}


def test_bad_arguments_of_combine_leave_the_round_open():
    def body(group):
        with ep_a2a.connect(CASE.config(), group=group) as a2a:
            received, handle = ep_a2a.dispatch(a2a, **good())
            a2a.outbox().fill_(3.0)
            for i, (name, (bad, error, text)) in enumerate(BAD_COMBINE.items()):
                if a2a.rank == i % 2:
                    for call in (ep_a2a.combine, ep_a2a.combine_begin):
                        with pytest.raises((TypeError, ValueError, EpError)) as found:
                            call(a2a, handle, **bad)
                        assert found.type is error, (name, found.value)
                        found.match(text)
            for wrong in (None, received, 3):
                with pytest.raises(TypeError, match="handle"):
                    ep_a2a.combine(a2a, wrong)
            group.barrier("all have erred", PATIENCE_S)
            assert (ep_a2a.combine(a2a, handle) == 3).all()
            round_of(a2a)

    run(2, body)


# ---- rounds and handles ------------------------------------------------------------------------------------------


def test_calls_that_do_not_fit_the_round():
    def body(group):
        a2a = ep_a2a.connect(CASE.config(), group=group)
        other = ep_a2a.connect(CASE.config(), group=group)
        _, old = ep_a2a.dispatch(a2a, **good())
        for call in (ep_a2a.dispatch, ep_a2a.dispatch_begin):
            with pytest.raises(RoundError, match=r"channel 0.*open"):
                call(a2a, **good())
        with pytest.raises(RoundError, match="another A2A"):
            ep_a2a.combine(other, old)
        ep_a2a.release(a2a, old)
        for call in (ep_a2a.combine, ep_a2a.release, ep_a2a.combine_begin, ep_a2a.release_begin):
            with pytest.raises(RoundError, match="round 0"):
                call(a2a, old)
        pending = ep_a2a.dispatch_begin(a2a, **good())
        with pytest.raises(RoundError, match="not waited for"):
            ep_a2a.dispatch(a2a, **good())
        _, handle = pending.wait()
        with pytest.raises(RoundError):
            pending.wait()
        with pytest.raises(RoundError):
            pending.abandon()
        with pytest.raises(RoundError, match=r"round 0\b"):
            ep_a2a.combine(a2a, old)
        ending = ep_a2a.combine_begin(a2a, handle)
        for call in (ep_a2a.combine, ep_a2a.release):
            with pytest.raises(RoundError, match="round 1"):
                call(a2a, handle)
        with pytest.raises(RoundError, match="not waited for"):
            ep_a2a.dispatch(a2a, **good())
        ending.wait()
        with pytest.raises(RoundError):
            ending.wait()
        round_of(a2a)
        round_of(other)
        a2a.close()
        other.close()

    run(2, body)


def test_use_after_close():
    def body(group):
        a2a = ep_a2a.connect(CASE.config(), group=group)
        _, handle = ep_a2a.dispatch(a2a, **good())
        ep_a2a.release(a2a, handle)
        pending = ep_a2a.dispatch_begin(a2a, **good())
        a2a.close()
        a2a.close()
        calls = [lambda: ep_a2a.dispatch(a2a, **good()), lambda: ep_a2a.combine(a2a, handle), a2a.check, a2a.outbox]
        calls += [lambda: ep_a2a.release(a2a, handle), lambda: ep_a2a.dispatch_begin(a2a, **good()), pending.wait]
        for call in calls:
            with pytest.raises(ClosedError, match="closed"):
                call()
        with ep_a2a.connect(CASE.config(), group=group) as again:
            round_of(again)

    run(2, body)


# ---- ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [8, 9, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("told_by", ["check", "dispatch"])
def test_ids_out_of_range(wrong, told_by):
    def body(group):
        with ep_a2a.connect(CASE.config(), group=group) as a2a:
            inputs = [dict(bodies.make_inputs(CASE, 3, r, a2a.num_ranks)[1]) for r in range(a2a.num_ranks)]
            inputs[1]["ids"] = inputs[1]["ids"].clone()
            inputs[1]["ids"][2, 1] = wrong
            own = inputs[a2a.rank]
            x, extra = bodies.make_inputs(CASE, 3, a2a.rank, a2a.num_ranks)[0], [own["extra0"]]
            received, handle = ep_a2a.dispatch(a2a, x, own["ids"], own["weights"], extra=extra)
            bodies.assert_received(received, a2a.config, inputs, a2a.rank, None)
            bodies.fill_results(CASE, 3, received, a2a.outbox(), a2a.rank)
            out = ep_a2a.combine(a2a, handle)  # never tells
            assert_same_bits(out, bodies.wanted_out(CASE, a2a.config, 3, a2a.rank, own["ids"], a2a.num_ranks))
            group.barrier("nobody has dispatched again", PATIENCE_S)
            if a2a.rank == 1:
                text = rf"rank 1.*token 2.*position 1.*{wrong}\b"
                with pytest.raises(InvalidRouting, match=text):
                    a2a.check() if told_by == "check" else round_of(a2a)
            group.barrier("told", PATIENCE_S)  # nothing was launched: the round below is in step
            a2a.check()
            round_of(a2a, 4)

    assert bodies.num_tokens(CASE, 3, 1, 3) >= 3
    run(3, body)


def test_ids_are_never_told_by_combine_or_release():
    def body(group):
        with ep_a2a.connect(CASE.config(), group=group) as a2a:
            ids = torch.full((4, 2), 77, dtype=INT32)
            received, handle = ep_a2a.dispatch(a2a, **good(topk_ids=ids))
            assert not received.valid.any() and received.num_tokens.tolist() == [4, 4]
            ep_a2a.release(a2a, handle)
            with pytest.raises(InvalidRouting, match=r"token \d.*position \d.*77"):
                ep_a2a.dispatch_begin(a2a, **good())
            _, handle = ep_a2a.dispatch(a2a, **good(topk_ids=ids))
            assert (ep_a2a.combine_begin(a2a, handle).wait() == 0).all()
            with pytest.raises(InvalidRouting, match="77"):
                a2a.check()
            round_of(a2a)

    run(2, body)


def test_ids_and_count_out_of_range_are_both_told():
    def body(group):
        with ep_a2a.connect(CASE.config(), group=group) as a2a:
            bad = good(topk_ids=torch.full((4, 2), 9, dtype=INT32), num_tokens=torch.tensor([6], dtype=INT32))
            ep_a2a.release(a2a, ep_a2a.dispatch(a2a, **bad)[1])
            told = set()
            for _ in range(2):
                with pytest.raises((InvalidRouting, InvalidCount)) as found:
                    a2a.check()
                told.add(found.type)
            assert told == {InvalidRouting, InvalidCount}
            round_of(a2a)

    run(2, body)


def test_ids_behind_the_count_do_not_matter():
    def body(group):
        with ep_a2a.connect(CASE.config(), group=group) as a2a:
            ids = torch.zeros(4, 2, dtype=INT32)
            ids[3] = 1000
            received, handle = ep_a2a.dispatch(a2a, **good(topk_ids=ids, num_tokens=torch.tensor([3], dtype=INT32)))
            assert received.valid.sum() == (6 if a2a.rank == 0 else 0)
            ep_a2a.release(a2a, handle)
            round_of(a2a)

    run(2, body)
