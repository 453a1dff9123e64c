"""launch/mps.sh, launch/test_gpu.sh and bench/nvlink.sh without a GPU: the programs that they start are made up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
Done = subprocess.CompletedProcess[str]

MPS = r"""#!/usr/bin/env bash
pid_file=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
if [[ ${1:-} == --serve ]]; then
  while [[ ! -e $CUDA_MPS_PIPE_DIRECTORY/quit ]]; do sleep 0.05; done
elif [[ ${1:-} == -d ]]; then
  echo "start" >>"$FAKE_LOG"
  [[ -z ${FAKE_BROKEN:-} ]] || { echo "no device node" >>"$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 1; }
  setsid bash "$0" --serve </dev/null >/dev/null 2>&1 &
  echo $! >"$pid_file"
  echo "daemon $! $CUDA_MPS_PIPE_DIRECTORY" >>"$FAKE_LOG"
else
  read -r word
  kill -0 "$(cat "$pid_file")" || { echo "Cannot find MPS control daemon process"; exit 1; }
  echo "$word" >>"$FAKE_LOG"
  [[ $word != quit || -n ${FAKE_STUBBORN:-} ]] || touch "$CUDA_MPS_PIPE_DIRECTORY/quit"
fi
"""

SMI = r"""#!/usr/bin/env bash
case $* in
  -L) for ((i = 0; i < ${FAKE_GPUS:-1}; i++)); do echo "GPU $i: Made up (UUID: GPU-$i)"; done ;;
  *compute_cap*) echo 9.0 ;;
  *) echo "Made up, 580.1" ;;
esac
"""

PYTHON = r"""#!/usr/bin/env bash
case $* in
  "-m pytest "*)
    echo "pytest ${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-alone} $* ranks=${EP_A2A_TEST_RANKS:-}" >>"$FAKE_LOG"
    for word in "$@"; do [[ $word != --junitxml=* ]] || report=${word#*=}; done
    [[ -z ${FAKE_SLEEP:-} ]] || { echo "started $$" >>"$FAKE_LOG"; exec sleep "$FAKE_SLEEP"; }
    failure="" code=0
    [[ $report != */"${FAKE_FAILS:-none}".xml ]] || { failure="<failure>what went wrong</failure>" code=1; }
    echo "<testsuites><testcase classname='t' name='n' time='1'>$failure</testcase></testsuites>" >"$report"
    exit $code
    ;;
  "-m pip "* | "-m cmake "*) echo "$*" >>"$FAKE_LOG" ;;
  "- "*) ;;
  *native.load*) exit "${FAKE_MISFIT:-0}" ;;
  *device_count*) echo "${FAKE_GPUS:-1}" ;;
  *torch.distributed.run*) echo "torchrun $EP_A2A_LIBRARY_DIR $*" >>"$FAKE_LOG" ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Machine:
    """A checkout of the scripts alone, with made-up programs on PATH."""

    def __init__(self, folder: Path) -> None:
        self.root, self.log, self.programs = folder / "tree", folder / "log", folder / "bin"
        self.programs.mkdir()
        for name, text in {
            "nvidia-cuda-mps-control": MPS,
            "nvidia-smi": SMI,
            "python3": PYTHON,
            "nvcc": "exit 1",
        }.items():
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)
        for name in (
            "launch/env.sh",
            "launch/mps.sh",
            "launch/test_gpu.sh",
            "tests/gpu_results.py",
            "bench/harness.py",
            "bench/links.py",
            "bench/nvlink.sh",
        ):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        temporary = folder / "temporary"
        temporary.mkdir()
        path = f"{self.programs}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "FAKE_LOG": str(self.log), "REAL_PYTHON": sys.executable}
        self.environment |= {"TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": "0"}
        self.temporary = temporary

    def start(self, script: str, *words: str, **more: str) -> subprocess.Popen[str]:
        folder = "bench" if script == "nvlink.sh" else "launch"
        command = ["bash", str(self.root / folder / script), *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env={**self.environment, **more}, stdout=pipe, stderr=pipe, text=True)

    def run(self, script: str, *words: str, **more: str) -> Done:
        process = self.start(script, *words, **more)
        stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def said(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.is_file() else []

    def wait_for(self, start: str) -> list[str]:
        """The words of the first line of the log that begins so."""
        for _ in range(400):
            for line in self.said():
                if line.startswith(start):
                    return line.split()
            time.sleep(0.05)
        raise AssertionError(f"{start!r} is not among {self.said()}")

    def expect_nothing_left(self) -> None:
        pids = [line.split()[1] for line in self.said() if line.startswith(("daemon", "started"))]
        assert not [pid for pid in pids if is_alive(pid)]
        assert not list(self.temporary.glob("ep-a2a-mps*"))


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ---- mps.sh ------------------------------------------------------------------------------------------------------

SHOW = 'echo "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PIPE_DIRECTORY"; exit 7'


@pytest.mark.parametrize(("ranks", "percentage"), [("2", "50"), ("3", "33"), ("8", "12")])
def test_a_command_runs_under_a_daemon_of_its_own(machine: Machine, ranks: str, percentage: str) -> None:
    done = machine.run("mps.sh", "--ranks-per-gpu", ranks, "--", "bash", "-c", SHOW)
    assert done.returncode == 7, done.stderr
    _, _, folder = machine.wait_for("daemon")
    assert done.stdout.split() == [percentage, folder]
    assert machine.said()[-1] == "quit"
    machine.expect_nothing_left()


@pytest.mark.parametrize("words", [(), ("--ranks-per-gpu", "1"), ("--ranks-per-gpu", "1", "--")])
def test_one_rank_needs_no_daemon(machine: Machine, words: tuple[str, ...]) -> None:
    done = machine.run("mps.sh", *words, "bash", "-c", 'echo "${CUDA_MPS_PIPE_DIRECTORY:-none}"; exit 3')
    assert (done.returncode, done.stdout) == (3, "none\n")
    assert machine.said() == []


def test_standard_input_arrives(machine: Machine) -> None:
    command = ["bash", str(machine.root / "launch/mps.sh"), "--ranks-per-gpu", "2", "cat"]
    done = subprocess.run(
        command, env=machine.environment, input="a line\n", capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "a line\n")


def test_wrong_words_are_refused(machine: Machine) -> None:
    for words in (("--ranks-per-gpu", "0", "true"), ("--ranks-per-gpu",), ("--ranks", "2", "true"), ()):
        done = machine.run("mps.sh", *words)
        assert done.returncode == 1 and done.stderr.startswith("ep_a2a: "), done
    assert machine.said() == []


@pytest.mark.skipif(Path("/usr/local/nvidia/bin/nvidia-cuda-mps-control").exists(), reason="MPS is on this machine")
def test_a_missing_daemon_is_told(machine: Machine) -> None:
    (machine.programs / "nvidia-cuda-mps-control").unlink()
    done = machine.run("mps.sh", "--ranks-per-gpu", "2", "true")
    assert done.returncode == 1
    assert "no nvidia-cuda-mps-control" in done.stderr


def test_a_daemon_that_cannot_start_is_told_with_its_log(machine: Machine) -> None:
    done = machine.run("mps.sh", "--ranks-per-gpu", "2", "echo", "never", FAKE_BROKEN="1")
    assert done.returncode == 1 and done.stdout == ""
    assert "no device node" in done.stderr and "no MPS daemon starts" in done.stderr
    machine.expect_nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_command_and_daemon(machine: Machine, number: signal.Signals, code: int) -> None:
    body = 'echo "started $$" >>"$FAKE_LOG"; exec sleep 60'
    process = machine.start("mps.sh", "--ranks-per-gpu", "2", "bash", "-c", body)
    machine.wait_for("started")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    machine.expect_nothing_left()


@pytest.mark.slow
def test_a_daemon_that_does_not_quit_is_killed(machine: Machine) -> None:
    done = machine.run("mps.sh", "--ranks-per-gpu", "2", "true", FAKE_STUBBORN="1")
    assert done.returncode == 0
    machine.expect_nothing_left()


# ---- test_gpu.sh -------------------------------------------------------------------------------------------------


@pytest.fixture
def libraries(tmp_path: Path) -> str:
    folder = tmp_path / "libraries"
    folder.mkdir()
    for name in ("libep_a2a_host.so", "libep_a2a_cuda.so", "litmus"):
        (folder / name).write_text(name)
    return str(folder)


@pytest.mark.slow
def test_all_suites_run_and_leave_rows(machine: Machine, libraries: str) -> None:
    done = machine.run("test_gpu.sh", "--lib", libraries, "--commit", "abc")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((machine.root / "bench/results/h200_tests.json").read_text())
    assert [row["suite"] for row in rows] == ["local", "litmus", "processes", "sanitize", "soak"]
    assert {(row["commit"], row["device"]) for row in rows} == {("abc", "1 x Made up, driver 580.1")}
    runs = [line.split()[1] for line in machine.said() if line.startswith("pytest ")]
    assert runs == ["alone", "alone", "12", "alone", "alone"]  # 8 ranks on the one GPU
    assert (machine.root / "build/lib/libep_a2a_cuda.so").is_file() and (machine.root / "build/bin/litmus").is_file()
    assert "all suites passed" in done.stdout
    machine.expect_nothing_left()


def test_a_failure_is_shown_and_told(machine: Machine, libraries: str) -> None:
    done = machine.run("test_gpu.sh", "--lib", libraries, "local", "soak", "--quick", FAKE_FAILS="soak")
    assert done.returncode == 1
    assert "what went wrong" in done.stdout and "failed: soak" in done.stdout
    marks = [line for line in machine.said() if line.startswith("pytest ")]
    assert len(marks) == 2 and all("-m gpu and not slow" in line for line in marks)
    rows = json.loads((machine.root / "bench/results/h200_tests.json").read_text())
    assert all(row["quick"] for row in rows)


def test_ranks_per_gpu_size_the_worlds(machine: Machine, libraries: str) -> None:
    for ranks, percentage in (("1", "alone"), ("4", "25"), ("4", "25")):
        words = ("--lib", libraries, "--commit", "abc", "--ranks-per-gpu", ranks, "processes")
        done = machine.run("test_gpu.sh", *words, FAKE_GPUS="2")
        assert done.returncode == 0, done.stdout + done.stderr
        last = [line for line in machine.said() if line.startswith("pytest ")][-1]
        assert last.split()[1] == percentage and last.endswith(f"ranks={2 * int(ranks)}")
    rows = json.loads((machine.root / "bench/results/h200_tests.json").read_text())
    assert [row["ranks_per_gpu"] for row in rows] == [1, 4]
    assert machine.run("test_gpu.sh", "--ranks-per-gpu", "0").returncode == 1


@pytest.mark.slow
def test_libraries_that_do_not_load_are_built(machine: Machine, libraries: str) -> None:
    done = machine.run("test_gpu.sh", "--lib", libraries, "local", FAKE_MISFIT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    configure, build = (line for line in machine.said() if line.startswith("-m cmake"))
    assert "-DEP_A2A_CUDA_TARGETS=90a" in configure and "-DEP_A2A_NATIVE_TESTS=ON" in configure
    assert build.endswith("--target litmus ep_a2a_host ep_a2a_cuda")


def test_wheels_are_installed_without_a_registry(machine: Machine, libraries: str, tmp_path: Path) -> None:
    (tmp_path / "one.whl").write_text("")
    done = machine.run("test_gpu.sh", "--wheels", str(tmp_path), "--lib", libraries, "local")
    assert done.returncode == 0, done.stdout + done.stderr
    pip = next(line for line in machine.said() if line.startswith("-m pip install"))
    assert "--no-index" in pip and "--no-deps" in pip and pip.endswith("one.whl")


def test_without_a_gpu_it_refuses(machine: Machine) -> None:
    done = machine.run("test_gpu.sh", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "no GPU is visible" in done.stderr


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(machine: Machine, libraries: str) -> None:
    process = machine.start("test_gpu.sh", "--lib", libraries, "processes", FAKE_SLEEP="60")
    machine.wait_for("started")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=50)
    assert process.returncode == 130
    machine.expect_nothing_left()


# ---- nvlink.sh ---------------------------------------------------------------------------------------------------

LINE = {"op": "store", "direction": "one_way", "ctas": 8, "threads": 32, "row_bytes": 1344, "bytes": 1, "repeats": 1}
LINE |= {"gbps": 1.0, "us": 2.0, "wrong": 0}


def add_links(libraries: str, **more: object) -> None:
    lines = [{"device": "2 x Made up"}, LINE | more]
    text = "\n".join(["#!/usr/bin/env bash", *(f"echo '{json.dumps(line)}'" for line in lines)])
    program = Path(libraries, "links")
    program.write_text(text)
    program.chmod(0o755)


@pytest.mark.slow
def test_all_parts_run_and_leave_rows(machine: Machine, libraries: str, tmp_path: Path) -> None:
    add_links(libraries)
    (tmp_path / "one.whl").write_text("")
    words = ("--wheels", str(tmp_path), "--lib", libraries, "--commit", "abc", "--out", str(tmp_path / "out"))
    done = machine.run("nvlink.sh", *words, FAKE_GPUS="2")
    assert done.returncode == 0, done.stdout + done.stderr
    links = json.loads((tmp_path / "out/h200x2_links.json").read_text())
    assert {**links[0], "run": ""} == {**LINE, "run": "", "device": "2 x Made up", "commit": "abc"}
    rows = json.loads((tmp_path / "out/h200x2_tests.json").read_text())
    suites = [("nvlink", 1), ("processes", 1), ("litmus", 1), ("processes", 4), ("processes", 8)]
    assert [(row["suite"], row["ranks_per_gpu"]) for row in rows] == suites
    runs = [line.split()[1] for line in machine.said() if line.startswith("pytest ")]
    assert runs == ["alone", "alone", "alone", "25", "12"]
    assert len([line for line in machine.said() if line.startswith("-m pip install")]) == 1
    machine.expect_nothing_left()


def test_parts_that_fail_are_named(machine: Machine, libraries: str, tmp_path: Path) -> None:
    add_links(libraries, wrong=3)
    words = ("--lib", libraries, "--out", str(tmp_path / "out"))
    done = machine.run("nvlink.sh", *words, "a2a", "links", FAKE_GPUS="2")
    assert done.returncode == 1 and "failed: links" in done.stderr
    assert "1 wrong" in done.stdout
    assert next(line for line in machine.said() if line.startswith("torchrun ")).split()[1] == libraries
    assert machine.run("nvlink.sh", *words, "links", FAKE_GPUS="1").returncode == 1
    assert machine.run("nvlink.sh", "two", FAKE_GPUS="2").returncode == 1


def test_a_part_without_time_has_failed(machine: Machine, libraries: str) -> None:
    done = machine.run("nvlink.sh", "--lib", libraries, "--seconds", "5", "four", FAKE_GPUS="2")
    assert done.returncode == 1 and "failed: four" in done.stderr
