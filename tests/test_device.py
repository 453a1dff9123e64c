"""Which stream waits for which, with CUDA's rules of events and captures as a fake; and on which device a rank runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import ep_a2a
from ep_a2a import device
from tests import bodies
from tests.bodies import Case

GPU = torch.device("cuda", 0)


class Cuda:
    """Streams are numbers. `capturing` has the capture that a stream is in; `waits` has (waited for, waiting)."""

    def __init__(self, monkeypatch):
        self.current, self.capturing, self.waits = 1, {}, []
        cuda = self

        class Event:
            def record(self, stream):
                self.stream, self.capture = stream, cuda.capturing.get(stream, 0)

            def wait(self, stream):
                assert not self.capture or self.capture in cuda.capturing.values(), "of a capture that has ended"
                assert self.capture or stream not in cuda.capturing, "cudaErrorStreamCaptureIsolation"
                if self.capture:
                    assert cuda.capturing.setdefault(stream, self.capture) == self.capture, "two captures at once"
                cuda.waits.append((self.stream, stream))

        fake = SimpleNamespace(
            Event=Event,
            ExternalStream=lambda handle, device: handle,
            default_stream=lambda _: 0,
            current_stream=lambda _=None: self.current,
            is_current_stream_capturing=lambda: self.current in self.capturing,
        )
        raw = SimpleNamespace(_cuda_getCurrentRawStream=lambda _: self.current)
        monkeypatch.setattr(device, "torch", SimpleNamespace(cuda=fake, device=torch.device, _C=raw))
        self.turn = device.GpuTurn(GPU, lambda stream: self.capturing.get(stream, 0))

    def operation(self, stream, mark=False):
        self.current = stream
        assert self.turn.take() == stream
        if mark:
            self.turn.mark()


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


@pytest.mark.parametrize("mark", [False, True])
@pytest.mark.parametrize("streams", [(1, 2), (0, 5), (5, 0)])
def test_a_change_of_streams_is_a_wait(cuda, mark, streams):
    first, second = streams
    for _ in range(3):
        cuda.operation(first, mark)
    assert cuda.waits == []
    cuda.operation(second, mark)
    cuda.operation(second)
    assert cuda.waits == [(first, second)]
    cuda.operation(first)
    assert cuda.waits == [(first, second), (second, first)]


@pytest.mark.parametrize("mark", [False, True])
def test_another_stream_is_brought_into_the_capture(cuda, mark):
    cuda.capturing[1] = 7
    cuda.operation(1, mark)
    cuda.operation(2)
    assert cuda.waits == [(1, 2)] and cuda.capturing == {1: 7, 2: 7}
    cuda.operation(1)
    assert cuda.waits == [(1, 2), (2, 1)]


@pytest.mark.parametrize("mark", [False, True])
def test_graphs_are_ordered_by_whoever_launches_them(cuda, mark):
    cuda.operation(1, mark)
    cuda.capturing = {2: 7}
    cuda.operation(2, mark)  # captured behind what was not
    cuda.capturing = {3: 8}
    cuda.operation(3, mark)  # in another graph
    cuda.capturing = {3: 9}
    cuda.operation(4, mark)  # not captured, while the stream of the last one captures something else
    assert cuda.waits == []
    cuda.capturing = {}
    cuda.operation(1)
    assert cuda.waits == [(4, 1)]


def test_an_eager_stream_that_captures_meanwhile(cuda):
    cuda.operation(1, mark=True)
    cuda.capturing = {1: 7}
    cuda.operation(2)
    assert cuda.waits == [(1, 2)] and 2 not in cuda.capturing, "the mark was set before the capture"
    cuda.operation(3)
    cuda.capturing = {3: 8}
    cuda.operation(2)
    assert cuda.waits == [(1, 2), (2, 3)], "nothing can be recorded there now"


def test_what_was_captured_is_known_as_such(cuda):
    assert not cuda.turn.is_in_a_graph()
    cuda.operation(1)
    assert not cuda.turn.is_in_a_graph()
    cuda.capturing = {1: 7}
    cuda.operation(1)
    assert not cuda.turn.is_in_a_graph(), "it is under way"
    cuda.capturing = {}
    assert cuda.turn.is_in_a_graph()
    cuda.operation(1)
    assert not cuda.turn.is_in_a_graph()


def test_after_a_capture_that_failed_a_round_can_be_made(monkeypatch):
    """The launches of the first round go nowhere, as those of a capture do that was thrown away."""
    case = Case()
    with ep_a2a.connect(case.config(), device="cpu") as a2a:
        x, own = bodies.make_inputs(case, 0, 0, 1)
        channel = a2a._channels[0]
        nowhere = SimpleNamespace(dispatch_send=lambda *_: None, wait=lambda *_: None)
        with monkeypatch.context() as patched:
            patched.setattr(channel, "_library", nowhere)
            _, handle = ep_a2a.dispatch(a2a, x, own["ids"], own["weights"])
        with pytest.raises(ep_a2a.RoundError, match="is open"):
            ep_a2a.dispatch(a2a, x, own["ids"], own["weights"])
        with monkeypatch.context() as patched:
            patched.setattr(channel._turn, "is_in_a_graph", lambda: True)
            _, again = ep_a2a.dispatch(a2a, x, own["ids"], own["weights"])
        with pytest.raises(ep_a2a.RoundError):
            ep_a2a.release(a2a, handle)
        ep_a2a.release(a2a, again)


def test_every_launch_wants_the_current_device(monkeypatch):
    case = Case()
    with ep_a2a.connect(case.config(), device="cpu") as a2a:
        x, own = bodies.make_inputs(case, 0, 0, 1)
        received, handle = ep_a2a.dispatch(a2a, x, own["ids"], own["weights"])
        with monkeypatch.context() as patched:
            patched.setattr(a2a, "device", GPU)
            patched.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
            patched.setattr(torch.cuda, "current_device", lambda: 1)
            pairs = received.topk_ids, received.compact, lambda: received.by_expert(4)
            for call in (*pairs, lambda: received.num_tokens_per_expert, lambda: ep_a2a.release(a2a, handle)):
                with pytest.raises(ValueError, match=r"runs on cuda:0, torch's current device is cuda:1"):
                    call()
        ep_a2a.release(a2a, handle)


def test_a_device_is_never_passed_over():
    for group in (ep_a2a.local(1), ep_a2a.local(1).ranks[0]):
        with pytest.raises((ValueError, ep_a2a.EpError), match="'cuda'"):
            ep_a2a.connect(Case().config(), group, "cuda")
    with ep_a2a.connect(Case().config(), ep_a2a.local(1).ranks[0], "cpu"):
        pass


TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver."


@pytest.mark.parametrize("wanted", [None, "cuda", "cuda:1"])
def test_a_driver_that_is_too_old(monkeypatch, wanted):
    """torch then says that there is no GPU; silently running on the CPU would be a surprise."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError(f"{TOO_OLD}\nmore")))
    monkeypatch.setattr(device.glob, "glob", lambda _: ["/dev/nvidia0"])
    with pytest.raises(
        ep_a2a.EpError, match=r"torch can use no GPU here: The NVIDIA driver .* too old .* driver\.; dev"
    ):
        device.choose(wanted)
    assert device.choose("cpu") == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.choose(None) == torch.device("cpu"), "hidden on purpose"


def test_gpus_that_are_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device.choose(None) == device.choose("cuda") == device.choose("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ep_a2a.EpError, match="device='cuda:2': there are 2 GPUs, legal are cuda:0 to cuda:1"):
        device.choose("cuda:2")
    with pytest.raises(ep_a2a.EpError, match="device='cuda:0', but torch's current one is cuda:1"):
        device.choose("cuda:0")


@pytest.mark.parametrize(
    ("here", "num_gpus", "wanted"), [(8, 8, list(range(8))), (8, 2, [0] * 4 + [1] * 4), (3, 8, [0, 1, 2])]
)
def test_ranks_of_a_host_are_spread_over_its_gpus(monkeypatch, here, num_gpus, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    found = [one.index for one in ep_a2a.local(here).run(ep_a2a.set_device)]
    assert found == wanted
