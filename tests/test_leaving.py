"""What stays behind: a rank that leaves by an exception, closed objects, defaults of torch that a caller has set."""

import time

import pytest
import torch

import ep_a2a
from ep_a2a import testing
from ep_a2a.experts import ExpertWeights, LocalExperts
from ep_a2a.moe import MoELayer

CONFIG = ep_a2a.Config(num_experts=6, top_k=2, hidden=64, max_tokens=8, timeout_s=20, first_timeout_s=20)


def rows(num_tokens=5):
    ids, weights = testing.ROUTINGS["uniform"](num_tokens, 6, 2, torch.Generator().manual_seed(1))
    return torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(2)), ids, weights


@pytest.mark.parametrize("when", ["before a dispatch", "before a combine"])
def test_a_rank_that_leaves_by_an_exception_tells_its_peers(when):
    def run(rank):
        started = time.monotonic()
        try:
            with ep_a2a.connect(CONFIG, group=rank) as a2a:
                ep_a2a.release(a2a, ep_a2a.dispatch(a2a, *rows())[1])
                handle = None if when == "before a dispatch" else ep_a2a.dispatch(a2a, *rows())[1]
                if rank.rank == 1:
                    raise KeyError("as planned")
                if handle is None:
                    ep_a2a.dispatch(a2a, *rows())
                else:
                    ep_a2a.combine(a2a, handle)
        except (KeyError, ep_a2a.PeerLeft) as error:
            return type(error), str(error), time.monotonic() - started
        return None

    found = ep_a2a.local(3).run(run)
    assert found[1][0] is KeyError
    for rank in (0, 2):
        kind, text, seconds = found[rank]
        assert kind is ep_a2a.PeerLeft
        assert "peer 1 left with an exception before its" in text and "epoch 2" in text
        assert seconds < 10


def test_close_gives_the_memory_back_at_once():
    views = []

    def run(rank):
        a2a = ep_a2a.connect(CONFIG, group=rank)
        views.append(a2a._memory._regions[rank.rank].untyped_storage()._weak_ref())
        a2a.close()
        return a2a  # still referenced, and no garbage collection

    kept = ep_a2a.local(2).run(run)
    assert len(kept) == 2
    assert all(torch.UntypedStorage._expired(view) for view in views)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_of_the_caller_changes_nothing(dtype):
    def run(rank):
        with ep_a2a.connect(CONFIG, group=rank) as a2a:
            x, ids, weights = rows()
            w13 = torch.randn(6, 64, 64, generator=torch.Generator().manual_seed(3)) / 8
            w2 = torch.randn(6, 64, 32, generator=torch.Generator().manual_seed(4)) / 8
            mine = slice(a2a.local_experts.start, a2a.local_experts.stop)

            def layer():
                experts = LocalExperts(ExpertWeights.quantize(w13[mine], w2[mine]), mine.start)
                return MoELayer(a2a, experts)(x, ids, weights)

            wanted = layer()
            rank.barrier("defaults", 20)
            torch.set_default_dtype(dtype)
            try:
                rank.barrier("set", 20)
                return torch.equal(layer(), wanted)
            finally:
                rank.barrier("done", 20)
                torch.set_default_dtype(torch.float32)

    assert ep_a2a.local(2).run(run) == [True, True]


def test_default_device_of_the_caller_changes_nothing():
    with torch.device("meta"), ep_a2a.connect(CONFIG) as a2a:
        x, ids, weights = (torch.ones(3, 64, device="cpu"), torch.zeros(3, 2, dtype=torch.int32, device="cpu"),
                           torch.ones(3, 2, dtype=torch.float32, device="cpu"))  # fmt: skip
        received, handle = ep_a2a.dispatch(a2a, x, ids, weights)
        assert int(received.num_tokens) == 3
        ep_a2a.release(a2a, handle)


def test_the_outbox_keeps_no_autograd_graph():
    with ep_a2a.connect(CONFIG) as a2a:
        received, handle = ep_a2a.dispatch(a2a, *rows())
        a2a.outbox()[received.valid] = torch.ones(5, 64, requires_grad=True).bfloat16() * 2
        assert not a2a.outbox().requires_grad
        assert (ep_a2a.combine(a2a, handle) == 2).all()


def test_connected_inside_inference_mode_used_outside():
    with torch.inference_mode():
        a2a = ep_a2a.connect(CONFIG)
    received, handle = ep_a2a.dispatch(a2a, *rows())
    a2a.outbox()[received.valid] = 3.0
    assert (ep_a2a.combine(a2a, handle) == 3).all()
    a2a.close()


def test_out_may_not_lie_in_symmetric_memory():
    with ep_a2a.connect(CONFIG) as a2a:
        _, handle = ep_a2a.dispatch(a2a, *rows())
        with pytest.raises(ValueError, match="out lies in this rank's symmetric memory"):
            ep_a2a.combine(a2a, handle, out=a2a.outbox()[0, :5])
        ep_a2a.release(a2a, handle)


def test_values_are_the_decoded_rows():
    with ep_a2a.connect(CONFIG) as a2a:
        x, ids, weights = rows()
        received, handle = ep_a2a.dispatch(a2a, x, ids, weights)
        wanted = testing.decode_planes(CONFIG, testing.payload_planes(CONFIG, x))
        testing.assert_same_bits(received.values(torch.float32)[received.valid], wanted, "values")
        ep_a2a.release(a2a, handle)


def test_extra_planes_through_a_layer():
    config = ep_a2a.Config(num_experts=6, top_k=2, hidden=64, max_tokens=8, extra_planes=(3,))
    seen = []

    def experts(received, outbox):
        seen.append(received.extra[0][received.valid].clone())
        outbox[received.valid] = 1.0

    with ep_a2a.connect(config) as a2a:
        extra = torch.arange(15, dtype=torch.uint8).reshape(5, 3)
        MoELayer(a2a, experts)(*rows(), extra=(extra,))
    assert torch.equal(seen[0], extra)


def test_an_exception_out_of_the_launch_leaves_a_round_and_no_misuse(monkeypatch):
    """As from a signal handler, at the worst place: behind the launch, before dispatch returns."""

    class Interrupted(Exception):
        pass

    with ep_a2a.connect(CONFIG) as a2a:
        send = a2a.library.dispatch_send

        def interrupted(params, stream):
            send(params, stream)
            raise Interrupted

        monkeypatch.setattr(a2a.library, "dispatch_send", interrupted)
        with pytest.raises(Interrupted):
            ep_a2a.dispatch(a2a, *rows())
        monkeypatch.setattr(a2a.library, "dispatch_send", send)
        with pytest.raises(ep_a2a.RoundError, match="dispatched and not waited for"):
            ep_a2a.dispatch(a2a, *rows())
        a2a.check()
