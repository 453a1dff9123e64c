"""The native tests: fibers and kernels by themselves, and ranks as threads for many rounds, under sanitizers too."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ep_a2a import abi
from ep_a2a import layout as _layout
from ep_a2a.config import Config
from ep_a2a.layout import BF16, FP32, PhasedSplit

ROOT = Path(__file__).resolve().parent.parent
NUM_RANKS = 4
PROGRAMS = ("test_simt", "test_fibers")

CONFIGS = {
    "nvfp4": Config(num_experts=10, top_k=5, hidden=512, max_tokens=16, combine=FP32),
    "bf16": Config(num_experts=9, top_k=6, hidden=64, max_tokens=37, payload=BF16, extra_planes=(5, 700)),
}
WIDE = "nvfp4, masks of 128 ranks"  # not one of CONFIGS: a plan
Done = subprocess.CompletedProcess[str]
TSAN_REPORT = "WARNING: ThreadSanitizer: data race"


def run(command: list[object], timeout_s: float, **environment: str) -> Done:
    words = [str(word) for word in command]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env={**os.environ, **environment}
    )


def expect_success(done: Done) -> str:
    assert done.returncode == 0, f"{done.args}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def cmake() -> list[object]:
    """CMake as a module of this Python, or as a program."""
    found = subprocess.run([sys.executable, "-c", "import cmake"], capture_output=True).returncode == 0
    if not found and shutil.which("cmake") is None:
        pytest.skip("no cmake")
    return [sys.executable, "-m", "cmake"] if found else ["cmake"]


def build(name: str, sanitizer: str = "", fault: str = "", hostile: bool = False) -> Path:
    """The folder of the programs, built by build/cmake-NAME (as launch/env.sh does); nothing is compiled twice."""
    folder = ROOT / f"build/cmake-{name}"
    options = [f"-DEP_A2A_SANITIZE={sanitizer}", f"-DEP_A2A_FAULT={fault}"]
    options += ["-DEP_A2A_NATIVE_TESTS=ON", "-DEP_A2A_WERROR=ON", f"-DEP_A2A_HOSTILE={'ON' if hostile else 'OFF'}"]
    generator = ["-G", "Ninja"] if not (folder / "CMakeCache.txt").is_file() and shutil.which("ninja") else []
    expect_success(run([*cmake(), "-S", ROOT, "-B", folder, *generator, *options], 120))
    expect_success(run([*cmake(), "--build", folder, "--target", "native_tests"], 280))
    parts = [f"-{sanitizer}" if sanitizer else "", f"-fault-{fault}" if fault else "", "-hostile" if hostile else ""]
    suffix = "".join(parts)
    return ROOT / f"build/bin{suffix}"


def write_plan(path: Path, config: Config, num_ranks: int, mask_words: int | None = None) -> Path:
    """The layout of a configuration as soak.cpp reads it: lines of a name and its values.

    mask_words  more than the ranks need: kernels go the way of many ranks, in no more threads than a sanitizer allows
    """
    lay = _layout.layout(config, num_ranks)
    split = _layout.phased_split(config.payload, config.hidden, config.top_k, num_ranks, config.extra_planes)
    assert isinstance(split, PhasedSplit)
    number = abi.NUMBER[config.combine.columns[0].dtype]
    copy_threads = _layout.copy_threads(lay.outbox_row.row_bytes)
    shares = _layout.shares(config.num_experts, num_ranks)
    lines: list[tuple[str | int, ...]] = [
        ("shape", num_ranks, config.num_experts, config.top_k, config.hidden, config.max_tokens, number),
        ("parts", lay.flag_parts),
        ("strides", lay.bitmap_words, mask_words or lay.mask_words, lay.outbox_row.row_bytes),
        ("flags", lay.dispatch_flags_offset, lay.end_flags_offset, lay.abort_words_offset),
        ("channel", lay.bitmap_offset, lay.outbox_offset, lay.channel_bytes),
        ("state", lay.source_counts_offset, lay.masks_offset, lay.state_bytes),
        ("threads", copy_threads),
        ("tile", _layout.TILE_START, split.token_bytes),
        ("shares", *shares),
        ("divisors", *_layout.divisor(shares[0] + 1), *_layout.divisor(max(1, shares[0]))),
        ("ids_plane", [plane.name for plane in lay.planes].index("ids")),
    ]
    starts = [_layout.first_expert(rank, config.num_experts, num_ranks) for rank in range(num_ranks + 1)]
    lines += [("first_expert", start) for start in starts]
    for plane, offset, in_tile in zip(lay.planes, lay.plane_offsets, split.tile_offsets):
        lines.append(("plane", offset, plane.row_bytes, plane.source_bytes, plane.tail_bytes, in_tile))
    path.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plans")
    made = {name: write_plan(folder / name, config, NUM_RANKS) for name, config in CONFIGS.items()}
    return made | {WIDE: write_plan(folder / WIDE, CONFIGS["nvfp4"], NUM_RANKS, mask_words=4)}


def fixed_addresses() -> list[object]:
    """ThreadSanitizer's memory map has no place for the most random addresses that Linux can give."""
    command: list[object] = ["setarch", platform.machine(), "-R"]
    works = shutil.which("setarch") and run([*command, "true"], 10).returncode == 0
    return command if works else []


def run_program(program: Path, *arguments: object, timeout_s: float = 120) -> Done:
    options = {
        "TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1 atexit_sleep_ms=0",
        "ASAN_OPTIONS": "detect_leaks=1 strict_string_checks=1",
    }
    return run([*fixed_addresses(), program, *arguments], timeout_s, **options)


def soak(folder: Path, plan: Path, num_rounds: int, seed: int, delays: int) -> Done:
    return run_program(folder / "soak", plan, num_rounds, seed, delays)


class TestPlain:
    @pytest.fixture
    def folder(self) -> Path:
        return build("plain")

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_kernels_and_fibers(self, folder: Path, name: str) -> None:
        print(expect_success(run_program(folder / name)))

    @pytest.mark.parametrize("name", CONFIGS)
    def test_soak(self, folder: Path, plans: dict[str, Path], name: str) -> None:
        print(expect_success(soak(folder, plans[name], 300, 1, 2)))

    @pytest.mark.parametrize("name", CONFIGS)
    def test_a_channel_that_ends_while_a_dispatch_starts(self, folder: Path, plans: dict[str, Path], name: str) -> None:
        print(expect_success(run_program(folder / "leave", plans[name])))

    @pytest.mark.parametrize(("num_ranks", "hidden", "num_rounds"), [(40, 32, 60), (128, 7168, 5)])
    def test_soak_of_many_ranks(
        self, folder: Path, tmp_path: Path, num_ranks: int, hidden: int, num_rounds: int
    ) -> None:
        config = Config(num_experts=200, top_k=8, hidden=hidden, max_tokens=3)
        plan = write_plan(tmp_path / "plan", config, num_ranks)
        print(expect_success(soak(folder, plan, num_rounds, seed=3, delays=0)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
class TestSanitizers:
    @pytest.fixture
    def folder(self, sanitizer: str) -> Path:
        return build(sanitizer, sanitizer)

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_kernels_and_fibers(self, folder: Path, name: str) -> None:
        print(expect_success(run_program(folder / name, timeout_s=300)))

    @pytest.mark.parametrize("name", [*CONFIGS, WIDE])
    def test_soak(self, folder: Path, plans: dict[str, Path], name: str) -> None:
        print(expect_success(soak(folder, plans[name], 100, 2, 2)))


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestFaults:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_thread_sanitizer_misses_the_release(self, plans: dict[str, Path], name: str) -> None:
        folder = build("no_release", "thread", "no_release")
        done = soak(folder, plans[name], 100, 2, 2)
        assert done.returncode != 0
        assert TSAN_REPORT in done.stderr

    def test_rows_are_wrong_without_waits(self, plans: dict[str, Path]) -> None:
        done = soak(build("no_wait", "", "no_wait"), plans["nvfp4"], 100, 2, 2)
        assert done.returncode == 1
        assert "rank" in done.stderr
