"""The structs of abi.h and their mirror in Python; libraries that do not fit are refused."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest

import ep_a2a
from ep_a2a import abi, layout, native
from ep_a2a.errors import EpError


def test_every_size_and_offset_equals_the_mirror():
    compiled, mirrored = native.load("host").abi(), abi.mirrored_abi()
    assert compiled == mirrored
    assert len(compiled) > 80


def test_limits_that_stand_on_both_sides_are_equal():
    assert ctypes.sizeof(abi.ChannelState) == layout.STATE_HEADER_BYTES
    header = (native.Path(__file__).parent.parent / "cuda" / "abi.h").read_text()
    for name, value in (
        ("kMaxRanks", layout.MAX_RANKS),
        ("kMaxTopK", layout.MAX_TOP_K),
        ("kMaxPlanes", layout.MAX_PLANES),
        ("kVectorBytes", layout.VECTOR_BYTES),
        ("kTileStart", layout.TILE_START),
        ("kTileTokens", layout.TILE_TOKENS),
        ("kMaxSharedBytes", layout.MAX_SHARED_BYTES),
        ("kExpertTileRows", layout.EXPERT_TILE_ROWS),
    ):
        assert f"constexpr int {name} = {value};" in header


def test_a_library_of_other_sources_is_refused(monkeypatch):
    wrong = {**abi.mirrored_abi(), "DispatchParams.channel": 88}
    monkeypatch.setattr(abi, "mirrored_abi", lambda: wrong)
    with pytest.raises(EpError, match=r"other sources.*DispatchParams.channel: 112 compiled, 88 in Python"):
        native.Library(native.library_path("host"))


def test_a_missing_library_names_the_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("EP_A2A_LIBRARY_DIR", str(tmp_path))
    with pytest.raises(EpError, match=f"libep_a2a_host.so is in none of {tmp_path}: bash launch/demo.sh builds it"):
        native.library_path("host")


def test_another_library_of_that_name_is_refused(monkeypatch, tmp_path):
    source, library = tmp_path / "other.c", tmp_path / "libep_a2a_host.so"
    source.write_text("int other(void) { return 1; }")
    subprocess.run(["gcc", "-shared", "-o", library, source], check=True)
    with pytest.raises(EpError, match="is no library of this package: it has no ep_a2a_abi"):
        native.Library(library)


def test_a_relative_folder_is_searched_from_here(monkeypatch):
    folder = native.library_path("host").parent
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EP_A2A_LIBRARY_DIR", ".")
    assert native.library_path("host") == folder / "libep_a2a_host.so"


def test_the_library_says_where_it_is():
    shown = subprocess.run([sys.executable, "-m", "ep_a2a.native"], capture_output=True, text=True, check=True)
    assert f"host: {native.library_path('host')}" in shown.stdout


def test_a_library_missing_on_one_rank_is_an_error_on_all(monkeypatch):
    load = native.load

    def fails_on_rank_1(kind):
        if threading.current_thread().name == "rank 1":
            raise EpError("libep_a2a_host.so is nowhere")
        return load(kind)

    def run(rank):
        config = ep_a2a.Config(num_experts=4, top_k=1, hidden=32, max_tokens=4, first_timeout_s=20)
        with pytest.raises(EpError, match=f"rank {rank.rank}, connect: rank 1 cannot run: .* is nowhere"):
            ep_a2a.connect(config, group=rank)

    monkeypatch.setattr(native, "load", fails_on_rank_1)
    ep_a2a.local(3).run(run)


def test_import_needs_no_library_and_no_network():
    code = "import ep_a2a, sys; assert 'mpi4py' not in sys.modules; assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "EP_A2A_LIBRARY_DIR": "/nowhere"})
