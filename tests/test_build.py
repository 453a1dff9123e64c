"""What the build made: exported names, what the libraries need, the GPUs they hold code for."""

from __future__ import annotations

import importlib.metadata
import re
import struct
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOST = ROOT / "build/lib/libep_a2a_host.so"
CUDA = [p for p in (ROOT / f"build/lib{s}/libep_a2a_cuda.so" for s in ("", "-nvcc")) if p.is_file()]

FATBIN_MAGIC = struct.pack("<IH", 0xBA55ED50, 1)
PTX, MACHINE_CODE = 1, 2


def run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)
    return done.stdout


def exported(library: Path) -> set[str]:
    """Names of functions that others can call; weak symbols of the standard library do not count."""
    return set(re.findall(r"^\w+ T (\w+)$", run("nm", "-D", "--defined-only", library), re.MULTILINE))


def declared() -> dict[str, bool]:
    """Every function that abi.h declares, and whether the host alone has it."""
    text = (ROOT / "cuda/abi.h").read_text()
    names = re.findall(r"^EP_A2A_API [^;(]*?\b(\w+)\(", text, re.MULTILINE)
    return {name: name.startswith("ep_a2a_host_") for name in names}


def fatbin_code(data: bytes) -> list[set[tuple[int, int]]]:
    """For each fat binary inside a library: (kind, architecture) of what it holds, as in (MACHINE_CODE, 90).

    Fat binary: u32 magic, u16 version, u16 header bytes, u64 bytes behind the header. Each entry: u16 kind, u16,
    u32 header bytes, u64 payload bytes, ..., u32 architecture at offset 28.
    """
    found = []
    start = data.find(FATBIN_MAGIC)
    while start >= 0:
        header_bytes, body_bytes = struct.unpack_from("<HQ", data, start + 6)
        at, end, entries = start + header_bytes, start + header_bytes + body_bytes, set()
        while at < end:
            kind, _, entry_header_bytes, payload_bytes = struct.unpack_from("<HHIQ", data, at)
            entries.add((kind, struct.unpack_from("<I", data, at + 28)[0]))
            at += entry_header_bytes + payload_bytes
        found.append(entries)
        start = data.find(FATBIN_MAGIC, end)
    return found


def kernel_names() -> set[str]:
    """The kernels that the sources define."""
    text = "\n".join(p.read_text() for p in (ROOT / "cuda").glob("*.cu"))
    return set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(", text))


@pytest.mark.skipif(not HOST.is_file(), reason="the host library is not built (bash launch/test.sh builds it)")
class TestHostLibrary:
    def test_exports_what_abi_h_declares(self) -> None:
        assert "ep_a2a_abi" in declared()
        assert exported(HOST) == set(declared())

    def test_needs_no_toolkit(self) -> None:
        needed = re.findall(r"NEEDED\s+(\S+)", run("objdump", "-p", HOST))
        allowed = r"(libstdc\+\+|libm|libc|libgcc_s|libpthread|librt|ld-linux[-\w]*)\.so.*"
        assert needed
        assert not [name for name in needed if not re.fullmatch(allowed, name)]


def test_installed_package_carries_the_library() -> None:
    try:
        files = importlib.metadata.files("ep_a2a") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("ep_a2a is not installed in this Python (bash launch/test.sh installs it)")
    assert "ep_a2a/lib/libep_a2a_host.so" in {str(f) for f in files}


@pytest.mark.slow
@pytest.mark.parametrize("library", CUDA or [None], ids=lambda p: p.parent.name if p else "none")
class TestCudaLibrary:
    @pytest.fixture(autouse=True)
    def _is_built(self, library: Path | None) -> None:
        if library is None:
            pytest.skip("no CUDA library (bash launch/test_long.sh builds it where nvcc is)")

    def test_exports_what_abi_h_declares(self, library: Path) -> None:
        assert exported(library) == {name for name, host_alone in declared().items() if not host_alone}

    def test_holds_code_for_every_gpu(self, library: Path) -> None:
        if library.parent.name == "lib" and (ROOT / "build/cmake-gpu").is_dir():
            pytest.skip("launch/test_gpu.sh built it for the GPU of this machine (launch/test_long.sh: for all)")
        wanted = {(MACHINE_CODE, 90), (MACHINE_CODE, 100), (MACHINE_CODE, 120), (PTX, 90)}
        binaries = fatbin_code(library.read_bytes())
        assert len(binaries) >= len(list((ROOT / "cuda").glob("*.cu")))
        assert all(wanted <= binary for binary in binaries)

    def test_holds_every_kernel(self, library: Path) -> None:
        assert len(kernel_names()) >= 3
        data = library.read_bytes()
        assert not [name for name in kernel_names() if f"{len(name)}{name}".encode() not in data]
