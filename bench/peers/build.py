#!/usr/bin/env python3
"""Builds FlashInfer's one-sided all-to-all for Hopper on a machine that need not have a GPU.

    python bench/peers/build.py [FOLDER]        by default build/peers

Needs nvcc 13 (on PATH or in CUDA_HOME), g++, pip and a Python with torch, of any kind. FOLDER then holds a module for
each version, and the wheel of apache-tvm-ffi that loads them under Python 3.12; everything else there is scratch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

GENERATORS = {"0.7.0": "gen_moe_alltoall_module", "0.7.4": "gen_nvlink_one_sided_alltoall_module"}
TVM_FFI = "apache-tvm-ffi==0.1.15.post2"  # the modules are built against it and loaded by it
IMPORTED = ("jinja2", "filelock", "requests", "tqdm", "packaging", "einops", "click", "tabulate", "nvidia-ml-py")
HEADERS = ("nvidia-cublas==13.*", "nvidia-curand==10.4.*")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
BUILD = """
import importlib, shutil, sys
spec = getattr(importlib.import_module("flashinfer.jit.comm"), sys.argv[1])()
spec.build()
shutil.copy(spec.get_library_path(), sys.argv[2])
"""


def main() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else root / "build/peers").resolve()
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    platform = ("--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64")
    older = ("--platform=manylinux_2_24_x86_64", "--platform=manylinux_2_17_x86_64", "--platform=manylinux2014_x86_64")
    run(*PIP, "download", "--no-deps", *platform, *older, "-d", folder, TVM_FFI)
    env = environment(scratch)
    for version, generator in GENERATORS.items():
        site = scratch / f"site-{version}"
        if not (site / "flashinfer").is_dir():
            run(*PIP, "install", "--no-compile", "--target", site, "ninja", TVM_FFI, *IMPORTED)
            run(*PIP, "install", "--no-compile", "--no-deps", "--target", site, f"flashinfer-python=={version}")
        paths = {"PYTHONPATH": str(site), "PATH": f"{site / 'bin'}:{env['PATH']}"}
        module = folder / f"flashinfer-{version}.so"
        run(sys.executable, "-c", BUILD, generator, module, env=env | paths)
        print(f"{module}: {module.stat().st_size >> 10} KiB", flush=True)


def environment(scratch: Path) -> dict[str, str]:
    """Variables for the package's own build: one GPU, headers that nvcc's folder may lack, and a libcuda to link."""
    cuda, include, stubs = cuda_home(scratch), scratch / "include", scratch / "stubs"
    stubs.mkdir(exist_ok=True)
    run("g++", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c++", os.devnull, "-o", stubs / "libcuda.so")
    if not include.is_dir():
        wheels = scratch / "wheels"
        run(*PIP, "download", "--no-deps", "-d", wheels, *HEADERS)
        for wheel in wheels.glob("nvidia_*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if re.search(r"/include/[^/]+\.h$", name):
                        include.mkdir(exist_ok=True)
                        (include / Path(name).name).write_bytes(archive.read(name))
        shutil.rmtree(wheels)
    lib = next(path for path in (cuda / "lib64", cuda / "lib") if path.is_dir())
    return dict(os.environ) | {
        "CUDA_HOME": str(cuda),
        "CPATH": str(include),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{lib} -L{stubs}",
        "FLASHINFER_WORKSPACE_BASE": str(scratch),
        "MAX_JOBS": str(len(os.sched_getaffinity(0))),
    }


def cuda_home(scratch: Path) -> Path:
    """The folder of the toolkit, also where the nvcc on PATH is a script that calls another one."""
    if "CUDA_HOME" in os.environ:
        return Path(os.environ["CUDA_HOME"])
    (scratch / "empty.cu").touch()
    command = ["nvcc", "--dryrun", "-c", str(scratch / "empty.cu")]
    found = re.search(r"^#\$ TOP=(.*)$", subprocess.run(command, capture_output=True, text=True).stderr, re.MULTILINE)
    if not found:
        sys.exit("nvcc does not say where its toolkit is: set CUDA_HOME")
    return Path(found[1]).resolve()


def run(*command: object, env: dict[str, str] | None = None) -> None:
    """Run a command; what it prints is shown only if it fails."""
    done = subprocess.run([str(word) for word in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        lines = done.stdout.decode(errors="replace").splitlines()
        errors = [line for line in lines if re.search(r"error|fatal", line, re.IGNORECASE)]
        sys.exit("\n".join(["failed: " + " ".join(map(str, command))[:200], *errors[:20], *lines[-10:]]))


if __name__ == "__main__":
    main()
