"""Symmetric memory: every rank reaches every region, memory outlives its slowest user, nothing stays in /dev/shm."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ep_a2a
from ep_a2a import symm, world
from ep_a2a.errors import ClosedError, RendezvousTimeout, SymmetricMemoryError
from ep_a2a.symm import posix
from tests import spawn

PAGE = 4096


def _names():
    return sorted(name for name in os.listdir(posix.DIRECTORY) if name.startswith(posix.PREFIX))


def _is_mapped(address):
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def _exchange(group, num_bytes):
    """Each rank writes a word into every region; checks what it then finds in its own. Returns the memory, open."""
    memory = symm.allocate(group, num_bytes, 20)
    assert memory.bytes_per_rank == num_bytes == memory.region.numel()
    assert memory.base == memory.peer_bases[group.rank] == memory.region.data_ptr()
    assert len(set(memory.peer_bases)) == group.size
    assert all(base % PAGE == 0 for base in memory.peer_bases)
    assert memory.region.count_nonzero() == 0
    group.barrier("all have looked", 20)
    for peer, base in enumerate(memory.peer_bases):
        ctypes.c_uint64.from_address(base + 8 * group.rank).value = 1000 * group.rank + peer + 1
    group.barrier("all have written", 20)
    words = memory.region[: 8 * group.size].view(dtype=torch.int64).tolist()
    assert words == [1000 * source + group.rank + 1 for source in range(group.size)]
    return memory


# ---- local -------------------------------------------------------------------------------------------------------


def test_local_all_reach_all():
    ep_a2a.local(5).run(lambda rank: _exchange(rank, 12345).close())


def test_local_64_ranks_of_4_gigabytes_cost_nothing():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    before = resident()

    def work(rank):
        memory = symm.allocate(rank, 4 << 30, 20)
        memory.region[-1] = 1
        rank.barrier("all have written", 20)
        return resident(), memory.close()

    for during, _ in ep_a2a.local(64).run(work):
        assert during - before < 200 << 20


def test_local_region_lives_until_the_last_rank_has_closed():
    ranks = ep_a2a.local(3)
    memories = ranks.run(lambda rank: symm.allocate(rank, PAGE, 10))
    bases = memories[0].peer_bases
    memories[0].close()
    memories[2].close(keep=True)
    gc.collect()
    assert all(map(_is_mapped, bases))
    ctypes.c_uint64.from_address(bases[0]).value = 5  # rank 1 is still at work there
    memories[1].close()
    memories[1].close()
    gc.collect()
    assert not any(map(_is_mapped, bases))


@pytest.mark.parametrize("keep", [False, True])
def test_local_views_keep_their_memory(keep):
    ranks = ep_a2a.local(2)
    memories = ranks.run(lambda rank: symm.allocate(rank, 2 * PAGE, 10))
    view, base, other = memories[0].region[PAGE:].view(2, -1)[1], memories[0].base, memories[1].base
    for memory in memories:
        memory.close(keep)
    gc.collect()
    view.fill_(7)
    assert view.sum() == 7 * PAGE // 2
    assert not _is_mapped(other)
    del view
    gc.collect()
    assert not _is_mapped(base)


def test_local_failure_is_an_error_on_every_rank():
    def work(rank, num_bytes):
        with pytest.raises(SymmetricMemoryError) as info:
            symm.allocate(rank, num_bytes[rank.rank], 10)
        return str(info.value)

    for text in ep_a2a.local(3).run(work, (PAGE, 1 << 60, PAGE)):
        assert text.startswith(f"rank 1, {1 << 60} bytes on cpu: ")
    text = "bytes_per_rank: 4096 on rank 0, 4097 on rank 1"
    assert ep_a2a.local(2).run(work, (PAGE, PAGE + 1)) == [text, text]


@pytest.mark.parametrize(("num_bytes", "error"), [(0, ValueError), (-1, ValueError), (1 << 62, ValueError)])
@pytest.mark.parametrize("allocate", [symm.allocate, posix.allocate])
def test_refuses_sizes(allocate, num_bytes, error):
    with pytest.raises(error, match=f"bytes_per_rank={num_bytes}"):
        allocate(ep_a2a.local(1).ranks[0], num_bytes, 1)
    with pytest.raises(TypeError, match="not float"):
        allocate(ep_a2a.local(1).ranks[0], 1e6, 1)


# ---- posix -------------------------------------------------------------------------------------------------------


def _posix_work():
    group = world.resolve(None)
    memory = _exchange(group, 100_000)
    found = {"names": [name for name in _names() if Path(posix.DIRECTORY, name).stat().st_uid == os.getuid()]}
    view, base, bases = memory.region[-8:], memory.base, memory.peer_bases
    group.barrier("before close", 20)
    memory.close()
    memory.close()
    with pytest.raises(ClosedError):
        _ = memory.region
    gc.collect()
    found["mapped"] = [r for r in range(group.size) if _is_mapped(bases[r])]
    view.fill_(3)
    found["sum"] = view.sum().item()
    del view
    gc.collect()
    found["mapped at last"] = _is_mapped(base)
    second = _exchange(group, PAGE)
    group.barrier("before close", 20)
    second.close(keep=True)
    bases = second.peer_bases
    del second
    gc.collect()
    found["kept"] = [r for r in range(group.size) if _is_mapped(bases[r])]
    return found


@pytest.mark.parametrize("launcher", ["env", "mpirun"])
def test_posix_all_reach_all(launcher):
    for rank, found in enumerate(spawn.run(_posix_work, 3, launcher=launcher)):
        assert found == {"names": [], "mapped": [rank], "sum": 24, "mapped at last": False, "kept": [0, 1, 2]}


def _posix_16():
    _exchange(world.resolve(None), PAGE).close()


def test_posix_16_ranks():
    spawn.run(_posix_16, 16)


def test_pages_are_reserved():
    segment = posix._Segment()
    try:
        name = segment.create(1 << 20, 1)
        assert Path(posix.DIRECTORY, name).stat().st_blocks * 512 == 1 << 20
    finally:
        segment.unlink()
    assert name not in _names()


def _error_of(num_bytes, timeout_s=20.0, group=None):
    try:
        symm.allocate(group or world.resolve(None), num_bytes, timeout_s)
    except (SymmetricMemoryError, RendezvousTimeout) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _too_much():
    group = world.resolve(None)
    stat = os.statvfs(posix.DIRECTORY)
    num_bytes = stat.f_bavail * stat.f_frsize // 4 * 3 // PAGE * PAGE  # one fits, two do not
    error = _error_of(num_bytes, group=group)
    _exchange(group, PAGE)  # the group goes on
    return num_bytes, error, _names()


def test_too_small_is_an_error_on_every_rank():
    if os.statvfs(posix.DIRECTORY).f_blocks == 0:
        pytest.skip("/dev/shm has no size limit here")
    (num_bytes, first, names), (_, second, _) = spawn.run(_too_much, 2)
    assert first == second
    assert f"2 ranks need {num_bytes} bytes each, {2 * num_bytes} bytes in all, " in first
    assert " are available" in first
    assert names == []


def _in_small_shm():
    """In a /dev/shm of 1 MiB: three ranks that fit, three that do not, three that do not although it looked so."""
    group = world.resolve(None)
    symm.allocate(group, 300 << 10, 20).close()
    found = [_error_of(400 << 10, group=group)]
    posix._available = lambda: None
    found.append(_error_of(400 << 10, group=group))
    group.barrier("end", 20)
    return found, _names()


def test_too_small_a_tmpfs():
    code = (
        "import json; from tests import spawn, test_symm\n"
        "print(json.dumps(spawn.run(test_symm._in_small_shm, 3)), flush=True)"
    )
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm && echo mounted && exec "
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount + '"$@"', "sh", sys.executable, "-c", code]
    try:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare command")
    if not done.stdout.startswith("mounted"):
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    for (at_first, at_last), names in json.loads(done.stdout.splitlines()[1]):
        need = f"3 ranks need {400 << 10} bytes each, {1200 << 10} bytes in all, "
        assert at_first.startswith(f"SymmetricMemoryError: /dev/shm is too small: {need}{1 << 20} are available")
        assert "symmetric memory, create: /dev/shm is too small: " + need in at_last
        assert names == []


def _fail_to_map():
    group = world.resolve(None)
    if group.rank == 1:

        def fail(name, num_bytes):
            raise OSError("as planned")

        posix._map = fail
    return _error_of(PAGE, group=group), _names()


def test_failure_of_one_rank_is_an_error_on_all():
    for error, names in spawn.run(_fail_to_map, 3):
        assert error == "SymmetricMemoryError: rank 1, symmetric memory, map: OSError: as planned"
        assert names == [] or len(names) < 3  # a slower rank may not have removed its own yet
    assert _names() == []


def _on_another_host(folder):
    if spawn.rank() == 1:
        posix._BOOT_ID = f"{folder}/boot_id"
        Path(posix._BOOT_ID).write_text("another")
    return _error_of(PAGE)


def test_ranks_on_different_hosts(tmp_path):
    for error in spawn.run(_on_another_host, 2, str(tmp_path)):
        assert error.startswith("SymmetricMemoryError: ranks 0 and 1 are on different hosts (")


def _in_another_container():
    if spawn.rank() == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = 0x00020000 | (0 if os.getuid() == 0 else 0x10000000)  # CLONE_NEWNS, CLONE_NEWUSER
        private = 1 << 18 | 1 << 14  # MS_PRIVATE, MS_REC: the host's /dev/shm stays as it is
        if (
            libc.unshare(flags)
            or libc.mount(b"none", b"/", None, private, None)
            or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
        ):
            return f"skip: {os.strerror(ctypes.get_errno())}"
    return _error_of(PAGE, 3.0)


def test_ranks_in_different_containers():
    found = spawn.run(_in_another_container, 2)
    if found[1].startswith("skip"):
        pytest.skip(f"no mount namespace here: {found[1]}")
    for error in found:
        assert error.startswith("SymmetricMemoryError: ranks 0 and 1 see different /dev/shm directories")


def _leave_in_the_middle():
    if spawn.rank() == 1:
        posix._Segment.create = lambda *args: sys.exit("as planned")
    return _error_of(PAGE, 1.0), _names()


def test_missing_rank_leaves_nothing():
    found = spawn.outcomes(_leave_in_the_middle, 3)
    assert found[1].error == "SystemExit: as planned"
    for rank in (0, 2):
        error = found[rank].value[0]
        assert error == f"RendezvousTimeout: rank {rank}, symmetric memory, create: no word from rank 1 after 1.0 s"
    assert _names() == []


def _late_in_the_middle():
    """Rank 1 comes to the first step and dies between making its segment and removing its name."""
    if spawn.rank() == 1:
        posix._map = lambda name, num_bytes: os.kill(os.getpid(), signal.SIGKILL)
    return _error_of(PAGE, 1.0)


def test_a_crash_leaves_nothing_that_stops_the_next_job():
    found = spawn.outcomes(_late_in_the_middle, 3)
    assert found[1].exit_code == -signal.SIGKILL
    for one in (found[0], found[2]):
        assert "symmetric memory, map: no word from rank 1" in one.value
    assert len(_names()) == 1  # the dead rank's
    spawn.run(_posix_16, 2)
    assert _names() == []


def test_a_living_owner_keeps_its_segment():
    segment = posix._Segment()
    try:
        name = segment.create(PAGE, 1)
        assert spawn.run(posix.remove_leftovers, 1) == [[]]
        assert name in _names()
        mapping = posix._map(name, PAGE)
        mapping[0] = 1
    finally:
        segment.unlink()
    assert mapping[0] == 1


def test_leftovers_of_others_are_left_alone():
    other = Path(posix.DIRECTORY, "ep_a2b-not-ours")
    link = Path(posix.DIRECTORY, posix.PREFIX + "link")
    other.write_bytes(b"1")
    link.symlink_to(other)
    try:
        posix.remove_leftovers()
        assert other.read_bytes() == b"1"
    finally:
        other.unlink()
        link.unlink()


def test_a_new_segment_taken_for_a_leftover_is_made_again(monkeypatch):
    flock, removed = fcntl.flock, []

    def late(fd, how):
        if not removed:
            removed.append("")  # the cleaner locks through here as well
            removed[:] = posix.remove_leftovers()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    segment = posix._Segment()
    try:
        name = segment.create(PAGE, 1)
        assert len(removed) == 1
        assert removed != [name]
        assert _names() == [name]
    finally:
        segment.unlink()
    assert _names() == []


def test_what_is_no_segment_is_left_alone_and_opened_without_waiting():
    fifo = Path(posix.DIRECTORY, posix.PREFIX + "fifo")
    os.mkfifo(fifo)
    try:
        assert spawn.run(posix.remove_leftovers, 1, deadline_s=10.0) == [[]]
        assert fifo.exists()
    finally:
        fifo.unlink()


def test_a_leftover_of_another_user_is_left_alone(monkeypatch):
    other = Path(posix.DIRECTORY, posix.PREFIX + "other")
    other.write_bytes(b"1")
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
            assert other.name not in posix.remove_leftovers()
        assert other.name in posix.remove_leftovers()
    finally:
        other.unlink(missing_ok=True)


@pytest.mark.parametrize(("number", "text"), [(errno.ENOSPC, "is too small: "), (errno.EFBIG, "OSError: [Errno 27]")])
def test_the_cause_of_a_failed_reservation(monkeypatch, number, text):
    def fail(fd, offset, num_bytes):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    segment = posix._Segment()
    try:
        with pytest.raises(SymmetricMemoryError) as info:
            segment.create(PAGE, 1)
    finally:
        segment.unlink()
    assert text in str(info.value)
    assert ("too small" in str(info.value)) == (number == errno.ENOSPC)
