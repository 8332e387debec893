"""The program that measures a model next to a server, with small commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_kvplugins import calibration_job
from vllm_kvplugins.calibration_job import JobFiles
from vllm_kvplugins.errors import KVPolicyError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's prctl")

PATIENCE_S = 120.0  # nice processes wait where all cores are busy


@pytest.fixture
def files(tmp_path) -> JobFiles:
    return JobFiles(tmp_path / "name-0123.json")


@pytest.fixture
def jobs() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that the test starts, ended with it."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        calibration_job.stop(process)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run(files: JobFiles, code: str) -> int:
    return calibration_job.start(files, python(code)).wait(PATIENCE_S)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def sleeping(notes: Path) -> str:
    """Code that writes its process ID and those above it, and sleeps."""
    return (
        "import os, pathlib, time\n"
        f"notes = pathlib.Path({str(notes)!r})\n"
        "part = notes.with_suffix('.part')\n"
        "part.write_text(f'{os.getpid()} {os.getppid()}')\n"
        "part.rename(notes)\n"
        "time.sleep(600)\n"
    )


def pids(notes: Path) -> list[int]:
    until(notes.exists)
    return [int(word) for word in notes.read_text().split()]


def write(files: JobFiles) -> str:
    return f"open({str(files.profile)!r}, 'w').write('profile')"


# -- results -------------------------------------------------------------------


def test_the_command_runs_at_the_lowest_priority_in_one_thread(files):
    report = (
        "import json, os\n"
        "facts = [os.nice(0), os.environ['OMP_NUM_THREADS']]\n"
        "facts += [os.getpgid(0), os.getsid(0)]\n"
        "facts.append(open('/proc/self/oom_score_adj').read().strip())\n"
        f"json.dump(facts, open({str(files.profile)!r}, 'w'))\n"
        "print('said')"
    )
    assert run(files, report) == calibration_job.DONE
    nice, threads, group, session, victim = json.loads(files.profile.read_text())
    assert (nice, threads, victim) == (19, "1", "1000")
    assert group != os.getpgid(0), "Ctrl-C would reach it"
    assert session == os.getsid(0)
    assert files.log.read_text() == "said\n"
    assert calibration_job.remembered_failure(files) is None


FAILURES = {
    "import sys; print('noise'); sys.exit('error: [KVP625] no\\ntokenizer')": (
        "[KVP625] no tokenizer"
    ),
    "print('only this'); raise SystemExit(7)": "only this",
    "raise SystemExit(7)": "it ended with status 7",
    "pass": "it wrote no profile",
    "import os; os.kill(os.getpid(), 9)": "it was killed, probably because memory "
    "ran out",
    "import os; os.abort()": "it ended with signal 6",
}


@pytest.mark.parametrize(("code", "reason"), FAILURES.items(), ids=range(len(FAILURES)))
def test_a_failure_is_remembered(files, code, reason):
    assert run(files, code) == calibration_job.FAILED
    assert calibration_job.remembered_failure(files) == reason


def test_a_long_reason_is_cut(files):
    assert run(files, "raise SystemExit('x' * 9999)") == calibration_job.FAILED
    assert len(calibration_job.remembered_failure(files)) == 500


def test_success_ends_a_remembered_failure(files):
    calibration_job.remember_failure(files, "once")
    assert run(files, write(files)) == calibration_job.DONE
    assert not files.failure.exists()


def test_a_failure_of_another_version_does_not_count(files):
    calibration_job.remember_failure(files, "once")
    content = json.loads(files.failure.read_text()) | {"plugin": "0.0"}
    files.failure.write_text(json.dumps(content))
    assert calibration_job.remembered_failure(files) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"reason": 3}'])
def test_a_damaged_memory_does_not_count(files, content):
    files.failure.write_text(content)
    assert calibration_job.remembered_failure(files) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_that_is_stopped_has_not_failed(files, number):
    code = f"import os, signal; signal.signal({number:d}, signal.SIG_DFL)\n"
    code += f"os.kill(os.getpid(), {number:d})"
    assert run(files, code) == calibration_job.STOPPED
    assert not files.failure.exists()


# -- the lock ------------------------------------------------------------------


def test_two_processes_do_not_measure_one_model(files, tmp_path, jobs):
    notes = tmp_path / "pids"
    assert not calibration_job.is_running(files)
    jobs.append(calibration_job.start(files, python(sleeping(notes))))
    pids(notes)
    assert calibration_job.is_running(files)
    assert run(files, write(files)) == calibration_job.BUSY
    assert not files.profile.exists()
    assert files.log.exists(), "the log of the first one"
    other = JobFiles(tmp_path / "other-4567.json")
    assert run(other, write(other)) == calibration_job.DONE
    calibration_job.stop(jobs[0])
    assert not calibration_job.is_running(files), "the lock file stays, the lock ends"
    assert run(files, write(files)) == calibration_job.DONE


# -- the end of the server -----------------------------------------------------

# A process that a shell starts in the background ignores SIGINT, and so would this one.
SERVER = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from vllm_kvplugins.calibration_job import JobFiles, start
job = start(JobFiles(Path(sys.argv[1])), [sys.executable, "-c", sys.argv[2]])
if sys.argv[3] == "ends":
    while not Path(sys.argv[4]).exists():
        time.sleep(0.02)
else:
    time.sleep(600)
"""


@pytest.mark.parametrize("way", ["SIGKILL", "SIGTERM", "SIGINT", "ends"])
def test_it_ends_with_the_server(files, tmp_path, way):
    notes = tmp_path / "pids"
    arguments = [str(files.profile), sleeping(notes), way, str(notes)]
    server = subprocess.Popen(
        [*python(SERVER), *arguments], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        command, program = pids(notes)
        if way != "ends":
            assert lives(command)
            assert lives(program)
            server.send_signal(getattr(signal, way))
        server.wait(PATIENCE_S)
    finally:
        server.kill()
    until(lambda: not lives(program) and not lives(command))
    assert not files.failure.exists(), "the next start tries again"
    assert not calibration_job.is_running(files)


ENGINE = """
import multiprocessing, os, sys, time
from pathlib import Path
from vllm_kvplugins.calibration_job import JobFiles, start

def engine():
    job = start(JobFiles(Path(sys.argv[1])), [sys.executable, "-c", sys.argv[2]])
    time.sleep(600)

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=engine)
    process.start()
    Path(sys.argv[3]).write_text(str(process.pid))
    time.sleep(600)
"""


def test_it_ends_with_the_front_end_of_an_engine_that_lives_on(files, tmp_path):
    notes, engine = tmp_path / "pids", tmp_path / "engine"
    arguments = [str(files.profile), sleeping(notes), str(engine)]
    front_end = subprocess.Popen(
        [*python(ENGINE), *arguments], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        command, program = pids(notes)
        front_end.kill()
        front_end.wait()
        until(lambda: not lives(program) and not lives(command))
        assert lives(int(engine.read_text()))
    finally:
        os.killpg(front_end.pid, signal.SIGKILL)  # the engine is in its group
        front_end.wait()
    assert not files.failure.exists()


def test_it_ends_at_once_if_the_front_end_has_ended(files):
    gone = subprocess.Popen(python("pass"))
    gone.wait()
    command = ["-m", "vllm_kvplugins.calibration_job", "--parent", str(os.getpid())]
    command += ["--front-end", str(gone.pid), str(files.profile)]
    command += python("import time; time.sleep(600)")
    done = subprocess.run([sys.executable, *command], timeout=PATIENCE_S, check=False)
    assert done.returncode == calibration_job.STOPPED
    assert not files.failure.exists()


def test_it_ends_at_once_if_the_server_has_ended(files):
    """Between the start of the process and its request to end with the server."""
    gone = subprocess.Popen(python("pass"))
    gone.wait()
    command = ["-m", "vllm_kvplugins.calibration_job", "--parent", str(gone.pid)]
    command += [str(files.profile), *python(write(files))]
    done = subprocess.run([sys.executable, *command], timeout=PATIENCE_S, check=False)
    assert done.returncode == calibration_job.STOPPED
    assert not files.profile.exists()


def test_stopping_ends_the_command_too(files, tmp_path):
    notes = tmp_path / "pids"
    process = calibration_job.start(files, python(sleeping(notes)))
    command, program = pids(notes)
    assert program == process.pid
    calibration_job.stop(process)
    until(lambda: not lives(command))
    assert not files.failure.exists()


# -- the switch ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "enabled"), [("0", False), ("1", True), ("", True), (None, True)]
)
def test_the_environment_switches_it(monkeypatch, value, enabled):
    if value is None:
        monkeypatch.delenv(calibration_job.SWITCH)
    else:
        monkeypatch.setenv(calibration_job.SWITCH, value)
    assert calibration_job.is_enabled() == enabled


def test_an_unknown_value_is_refused(monkeypatch):
    from vllm_kvplugins.budgets import parse_allocator

    monkeypatch.setenv(calibration_job.SWITCH, "never")
    with pytest.raises(KVPolicyError) as error:
        calibration_job.is_enabled()
    assert error.value.codes == ("KVP119",)
    (problem,) = parse_allocator("sensitivity").problems(2, 2)
    assert "KVP119" in problem
    assert parse_allocator("uniform").problems(2, 2) == [], "it asks for no profile"


def test_tests_measure_nothing_by_accident():
    assert not calibration_job.is_enabled()


def test_the_program_imports_neither_torch_nor_vllm():
    code = "import sys, vllm_kvplugins.calibration_job\nprint(sorted(sys.modules))"
    done = subprocess.run(python(code), capture_output=True, text=True, check=True)
    assert not {"torch", "vllm", "pydantic"} & set(eval(done.stdout))
