"""The kernels under compute-sanitizer's tools, in rounds of the ranks of one process (tests/gpu_sanitized.py)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ERROR_EXIT_CODE = 9
UNABLE = ("Device not supported", "is not supported on this device", "Failed to initialize the profiler")

pytestmark = pytest.mark.gpu


def sanitizer() -> str:
    """The program's path; without one the test is skipped."""
    found = shutil.which("compute-sanitizer")
    known = (Path("/usr/local/cuda/bin/compute-sanitizer"), Path("/usr/local/cuda/compute-sanitizer/compute-sanitizer"))
    found = found or next((str(path) for path in known if path.is_file()), None)
    return found or pytest.skip("no compute-sanitizer (the CUDA toolkit brings it)")


def num_errors(shown: str) -> int | None:
    """What the tool's last line says; None where it says nothing."""
    said = re.findall(r"(?:ERROR SUMMARY: (\d+) error)|(?:RACECHECK SUMMARY: (\d+) hazard)", shown)
    return int("".join(said[-1])) if said else None


@pytest.mark.parametrize(
    "tool", [pytest.param("memcheck"), pytest.param("racecheck", marks=pytest.mark.slow),
             pytest.param("synccheck", marks=pytest.mark.slow)]
)  # fmt: skip
def test_rounds_are_clean(tool: str, record_property: Callable[[str, object], None]) -> None:
    command = [sanitizer(), "--tool", tool, "--error-exitcode", str(ERROR_EXIT_CODE), "--print-limit", "20"]
    command += [sys.executable, str(ROOT / "tests/gpu_sanitized.py")]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor has bounds of its own
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    shown = done.stdout + done.stderr
    if any(words in shown for words in UNABLE):
        pytest.skip(f"{tool}: compute-sanitizer cannot watch this GPU: {shown[-300:]}")
    errors = num_errors(shown)
    for name, recorded in {"tool": tool, "errors": errors, "ranks": 4}.items():
        record_property(name, recorded)
    assert done.returncode == 0, f"{tool}: exit code {done.returncode}, {errors} errors\n{shown[-6000:]}"
    assert "12 rounds of 4 ranks were right" in done.stdout
    assert errors == 0
