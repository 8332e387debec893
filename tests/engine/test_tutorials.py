"""The tutorials of docs/tutorials.md, each against a real server."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import engine_environment

PAGE = Path(__file__).parents[2] / "docs" / "tutorials.md"
SECTION = re.compile(
    r"^## (.+?)$.*?```bash\n(vllm serve .+?)\n```.*?```python\n(.+?)```", re.M | re.S
)
TUTORIALS = {
    title: (command, script)
    for title, command, script in SECTION.findall(PAGE.read_text(encoding="utf-8"))
}
URL = "http://127.0.0.1:8000"
START_S = 240


def test_every_section_has_a_server_and_a_script():
    assert list(TUTORIALS) == re.findall(r"^## (.+)$", PAGE.read_text("utf-8"), re.M)
    for _, script in TUTORIALS.values():
        compile(script, str(PAGE), "exec")
        assert URL in script


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@contextmanager
def serving(command: str, model: str, folder: Path) -> Iterator[str]:
    """Run a tutorial's server command on the default model; yields its URL."""
    _, *arguments = shlex.split(command)
    url = f"http://127.0.0.1:{(port := free_port())}"
    vllm = Path(sys.executable).with_name("vllm")
    arguments[arguments.index("MODEL")] = model
    options = ["--enforce-eager", "--port", str(port), "--max-model-len", "4096"]
    environment = engine_environment(VLLM_CPU_KVCACHE_SPACE="1") | {"DO_NOT_TRACK": "1"}
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [vllm, *arguments, *options],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline_s = time.monotonic() + START_S
        while not answers(url):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline_s, log.read_text(errors="replace")[
                -3000:
            ]
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def run_tutorial(title: str, model: str, folder: Path) -> str:
    """The output of a tutorial's script."""
    command, script = TUTORIALS[title]
    with serving(command, model, folder) as url:
        done = subprocess.run(
            [sys.executable, "-c", script.replace(URL, url)],
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.engine
def test_a_long_chat_computes_only_new_text(model_path, tmp_path):
    lines = run_tutorial("A long chat", model_path, tmp_path).splitlines()
    counts = [[int(n) for n in re.findall(r"\d+", line)] for line in lines]
    assert len(counts) == 4
    for (before, _), (prompt, cached) in itertools.pairwise(counts):
        assert before <= cached < prompt, "the whole previous prompt is restored"


@pytest.mark.slow
@pytest.mark.engine
def test_a_document_is_read_once_and_answers_are_found(model_path, tmp_path):
    title = "Questions about a document"
    first, read, _, again = run_tutorial(title, model_path, tmp_path).splitlines()
    assert "48213" in first
    prompt, cached = (int(n) for n in re.findall(r"\d+", read))
    assert cached < 100 < 2000 < prompt
    assert int(re.findall(r"\d+", again)[1]) > 0.75 * prompt, "found in the cache"


@pytest.mark.slow
@pytest.mark.engine
def test_an_agent_calls_its_tool(model_path, tmp_path):
    title = "An agent with tools"
    lines = run_tutorial(title, model_path, tmp_path).splitlines()
    calls = [
        re.match(r" *(\d+) prompt tokens: weather\((\w+)\)", line) for line in lines
    ]
    tokens = [int(call[1]) for call in calls[:3] if call]
    assert len(tokens) == 3
    assert tokens == sorted(tokens)
    assert tokens[2] > tokens[0] + 300, "tool results are in the context"
    assert lines[3:], "the agent answers at the end"
