"""Peers of the bench: the pipe, workers that fail in every way, and what is missing here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import peers
from tests import fake_peer as fake

IDS = torch.arange(6, dtype=torch.int32).view(1, 2, 3)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[peers.Peer]:
    monkeypatch.setitem(peers.WORKERS, "fake", "tests.fake_peer.Fake")
    one = peers.Peer("fake")
    yield one
    one.close()


def prepare(peer: peers.Peer, hidden: int) -> None:
    peer.prepare(("dispatch", "pair"), IDS, hidden, 8)


def pid_of(peer: peers.Peer) -> int:
    return int(peer.times_us("dispatch", 1)[0])


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_commands_and_answers(peer: peers.Peer) -> None:
    prepare(peer, fake.FINE)
    assert peer.note == "dispatch+pair of 15, 1"
    assert len(peer.times_us("dispatch", 3)) == 3
    with pytest.raises(peers.PeerError, match="fake: not for us"):
        prepare(peer, fake.REFUSES)
    prepare(peer, fake.FINE)  # who refuses lives on
    assert peer.note == "dispatch+pair of 15, 3"


def test_close_ends_the_worker(peer: peers.Peer) -> None:
    pid = pid_of(peer)
    assert is_alive(pid)
    assert pid != os.getpid()
    peer.close()
    assert not is_alive(pid)
    peer.close()
    with pytest.raises(peers.PeerError, match="nothing is prepared"):
        peer.times_us("dispatch", 1)


def test_a_crash_costs_its_own_case(peer: peers.Peer) -> None:
    with pytest.raises(peers.PeerDied, match="fake: killed by SIGSEGV: last words"):
        prepare(peer, fake.CRASHES)
    prepare(peer, fake.FINE)
    assert peer.note == "dispatch+pair of 15, 1"
    with pytest.raises(peers.PeerDied, match="exit code 3"):
        peer.times_us("exit", 1)
    with pytest.raises(peers.PeerError, match="nothing is prepared"):
        peer.times_us("dispatch", 1)


def test_an_exception_ends_the_worker_too(peer: peers.Peer) -> None:
    with pytest.raises(peers.PeerDied, match=r"exit code 1.*an illegal memory access"):
        prepare(peer, fake.RAISES)


def test_the_second_attempt_is_careful(peer: peers.Peer) -> None:
    prepare(peer, fake.CRASHES_UNLESS_CAREFUL)
    assert peer.note.startswith("dispatch+pair of 15, 1, careful after: fake: killed by SIGSEGV")
    prepare(peer, fake.CRASHES_UNLESS_CAREFUL)  # as it helped
    assert peer.note == "dispatch+pair of 15, 2"


def test_a_hang_has_a_deadline(peer: peers.Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = pid_of(peer)
    monkeypatch.setitem(peers.DEADLINES_S, "prepare", 0.2)
    start = time.monotonic()
    with pytest.raises(peers.PeerDied, match=r"no answer to prepare in 0\.2 s"):
        prepare(peer, fake.HANGS)
    assert time.monotonic() - start < 5
    assert not is_alive(pid)


def test_a_worker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.WORKERS, "fake", "tests.fake_peer.Missing")
    with pytest.raises(peers.PeerDied, match=r"exit code 1.*no attribute 'Missing'"):
        peers.Peer("fake")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EP_A2A_PEERS", str(tmp_path))
    assert peers.available("flashinfer-0.7.4") == f"no {tmp_path}/flashinfer-0.7.4.so: bench/peers/build.py builds it"
    (tmp_path / "flashinfer-0.7.0.so").touch()
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.available("flashinfer-0.7.0-phased") == "no Python package apache-tvm-ffi"
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not peers.available("flashinfer-0.7.0-generic")
    assert peers.available("nccl") == "needs 2 GPUs, found 1"
    assert peers.available("nccl", 8) == "needs 8 GPUs, found 1"
