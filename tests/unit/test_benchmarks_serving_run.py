"""A serving comparison from end to end, with a stand-in for vLLM.

Every way to end it must end all processes that it started.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
import _serving_bench as bench_module
import _serving_server as server_module
import benchmark_serving
from _serving_agents import AgentLoad
from _serving_chat import ChatLoad, chat
from _serving_metrics import Sampler, Slo
from _serving_report import report
from _serving_rows import Cell, Pool, cells_of, read_rows, read_unavailable
from _serving_server import RunningServer, ServerError, serving
from rich.console import Console
from waiting import wait_for

FAKE = str(Path(__file__).with_name("_fake_vllm.py"))
SNAPKV = {"name": "snapkv"}
COMPARISON = benchmark_serving.Comparison(
    pool=Pool("/m", 320, 32, 2048, "auto", True, True),
    chat=ChatLoad(3, 2, 0.01, 4, 3, 6),
    agents=AgentLoad(3, 4, 0.01, 4, 3, 6, system_words=5, tool_calls=2),
    random=bench_module.BenchLoad(3, 10, 4),
    slo=Slo(1e6, 1e6),
    seed=0,
    request_timeout_s=20.0,
    start_timeout_s=30.0,
)


def fake_command(*arguments: str) -> list[str]:
    return [sys.executable, FAKE, *arguments]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Arguments that the stand-in received."""
    monkeypatch.setenv("FAKE_VLLM", str(tmp_path))
    monkeypatch.setattr(server_module, "vllm_command", fake_command)
    monkeypatch.setattr(bench_module, "vllm_command", fake_command)
    return tmp_path


def noted(folder: Path, file: str) -> list[str]:
    path = folder / file
    return path.read_text().splitlines() if path.exists() else []


def pids(folder: Path) -> list[int]:
    """Process ids of every server and of its children."""
    return [int(pid) for line in noted(folder, "pids") for pid in line.split()]


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # an orphan that nobody has waited for has ended as well


def assert_all_gone(folder: Path, servers: int) -> None:
    started = pids(folder)
    assert len(started) == 2 * servers
    deadline = time.monotonic() + 5
    while any(map(runs, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in started if runs(pid)] == []


def test_conversations_grow_by_the_true_answers(folder):
    with serving(["/m"], 30.0) as server:
        answers = chat(server.url, "/m", COMPARISON.chat, 50.0, 0, 20.0)
    assert_all_gone(folder, servers=1)
    assert [answer.error for answer in answers] == [""] * 6
    assert {answer.tokens for answer in answers} == {6}
    assert all(len(answer.itl_ms) == 5 for answer in answers)
    assert all(1.0 < answer.tpot_ms < 1000 for answer in answers)
    bodies = [json.loads(line) for line in noted(folder, "requests")]
    second = [body["messages"] for body in bodies if len(body["messages"]) > 1]
    assert len(second) == 3
    for messages in second:
        assert [m["role"] for m in messages] == ["user", "assistant", "user"]
        assert messages[1]["content"] == "1.0 1.1 1.2 1.3 1.4 1.5 "
    firsts = {body["messages"][0]["content"] for body in bodies}
    assert len(firsts) == 3  # users send different messages
    assert {(b["max_tokens"], b["ignore_eos"]) for b in bodies} == {(6, True)}


def test_agents_send_results_of_tools(folder):
    """Two tool calls after each task, so requests come as task, result, result, task.

    All agents share the system prompt and the tools. The client adds the calls.
    """
    out = folder / "rows.jsonl"
    cells = cells_of([{}], ["agents"], [50.0], 1)
    assert benchmark_serving.run_all(COMPARISON, cells, out, lambda line: None) == []
    bodies = [json.loads(line) for line in noted(folder, "requests")]
    sent = [body for body in bodies if "tools" in body]
    assert len(sent) == 3 * 4
    assert {body["tool_choice"] for body in sent} == {"none"}
    assert len({json.dumps(body["tools"]) for body in sent}) == 1
    assert len({body["messages"][0]["content"] for body in sent}) == 1
    longest = [body["messages"] for body in sent if len(body["messages"]) == 8]
    assert len(longest) == 3
    for messages in longest:
        system, *talk = messages
        assert system["role"] == "system"
        roles = ["user", "assistant", "tool", "assistant", "tool", "assistant", "user"]
        assert [message["role"] for message in talk] == roles
        calls = [m.get("tool_calls", []) for m in talk if m["role"] == "assistant"]
        assert [len(each) for each in calls] == [1, 1, 0]
        results = [m["tool_call_id"] for m in talk if m["role"] == "tool"]
        assert results == [each[0]["id"] for each in calls[:2]]
        assert talk[1]["content"] == "2.0 2.1 2.2 2.3 2.4 2.5 "  # the server's answer
    tasks = {messages[1]["content"] for messages in longest}
    assert len(tasks) == 3
    (row,) = read_rows(out).values()
    assert row["figures"]["completed"] == 12
    assert row["figures"]["computed_share"] == 0.25
    assert row["figures"]["server_cpu_s"] >= 0


@pytest.mark.parametrize(
    ("lacks", "named"),
    [("tools", "tools"), ("calls", "tool calls"), ("tool", "results of tools")],
)
def test_a_chat_template_without_tools_is_refused(folder, monkeypatch, lacks, named):
    monkeypatch.setenv("FAKE_TEMPLATE_LACKS", lacks)
    messages: list[str] = []
    cells = cells_of([{}], ["agents"], [50.0], 1)
    out = folder / "rows.jsonl"
    failed = benchmark_serving.run_all(COMPARISON, cells, out, messages.append)
    assert failed == ["stock"]
    assert f"leaves out {named};" in messages[-1]
    assert "--chat-template FILE" in messages[-1]


def test_processor_time_includes_that_of_ended_children(tmp_path):
    loop = "import time\nwhile time.process_time() < 0.3: pass"
    ended = tmp_path / "ended"
    busy = f"{sys.executable} -c '{loop}'; touch {ended}; sleep 60"
    with server_module.Group(
        ["sh", "-c", f"({busy}); true"], tmp_path / "log"
    ) as group:
        wait_for(ended.exists)
        assert group.cpu_s() >= 0.2  # the kernel counts in ticks


def test_a_failure_ends_a_conversation_and_is_counted(folder):
    with serving(["/m", "--refuse", "1"], 30.0) as server:
        answers = chat(server.url, "/m", COMPARISON.chat, 50.0, 0, 20.0)
        assert len(answers) == 3
        assert answers[0].error == "400: too long"
        with pytest.raises(ServerError, match="warm up failed: 400: too long"):
            benchmark_serving.warm_up(server, COMPARISON, 10, set())


def test_a_pool_of_another_size_is_refused(folder):
    with (
        serving(["/m", "--num-gpu-blocks-override", "10"], 30.0) as server,
        pytest.raises(ServerError, match=r"9\.0 blocks, not 10"),
    ):
        benchmark_serving.warm_up(server, COMPARISON, 10, set())


def test_all_is_measured_once(folder, monkeypatch):
    monkeypatch.setattr(benchmark_serving, "Sampler", partial(Sampler, every_s=0.02))
    out = folder / "rows.jsonl"
    messages: list[str] = []
    cells = cells_of([{}, SNAPKV], ["chat", "random"], [50.0], 2)
    assert benchmark_serving.run_all(COMPARISON, cells, out, messages.append) == []
    assert_all_gone(folder, servers=4)
    with_policy = ["--kv-policy" in json.loads(line) for line in noted(folder, "serve")]
    assert with_policy == [False, True, False, True]
    rows = list(read_rows(out).values())
    done = [Cell(*(r[n] for n in Cell.__dataclass_fields__)) for r in rows]
    assert done == cells
    talk, single = rows[2]["figures"], rows[3]["figures"]
    assert (talk["completed"], talk["failed"], talk["preemptions"]) == (6, 0, 6)
    assert (talk["pool_blocks"], single["pool_blocks"]) == (10, 10)
    # the stand-in reports half of the pool as used, and 2 MiB for policies
    assert (single["mean_held_blocks"], single["peak_held_blocks"]) == (5, 5)
    assert single["peak_host_bytes"] == 2 << 20
    assert rows[1]["figures"]["peak_host_bytes"] == 0
    assert single["peak_device_table_bytes"] == 4096
    assert single["peak_session_bytes"] == 1 << 20
    # On a busy machine there may be no sample of such a short conversation
    for row in rows[::2]:
        end = round(row["figures"]["duration_s"], 3)  # samples are rounded likewise
        times = [0.0, *row["samples"]["at_s"], end]
        assert times == sorted(times)
    assert single["goodput_per_min"] == 600
    assert rows[3]["first_error"] == "refused"
    assert "first_error" not in rows[2]
    seeds = [json.loads(line) for line in noted(folder, "bench")]
    seeds = [messages[messages.index("--seed") + 1] for messages in seeds]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]

    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:7]) + lines[7][:40])  # the last line is cut off
    benchmark_serving.run_all(COMPARISON, cells, out, messages.append)
    assert len(noted(folder, "serve")) == 5
    assert len(noted(folder, "bench")) == 5
    again = list(read_rows(out).values())
    assert again[:7] == rows[:7]
    assert len(again) == 8
    benchmark_serving.run_all(COMPARISON, cells, out, messages.append)
    assert len(noted(folder, "serve")) == 5
    assert messages[-1].startswith("0 of 8 measurements to come")


def test_an_alternative_that_cannot_run_is_reported_and_is_no_failure(
    folder, monkeypatch
):
    monkeypatch.setenv("FAKE_FAILS", "fp8")
    out, messages = folder / "rows.jsonl", []
    cells = cells_of([{"name": "fp8"}, {}], ["chat"], [50.0], 2)
    assert benchmark_serving.run_all(COMPARISON, cells, out, messages.append) == []
    reason = "ValueError: no fp8 on this platform"
    assert read_unavailable(out) == {"fp8": reason}
    assert f"fp8: cannot run here: {reason}" in messages
    assert [row["policy"] for row in read_rows(out).values()] == [{}, {}]
    console = Console(width=140, record=True, file=io.StringIO())
    report(list(read_rows(out).values()), console, unavailable=read_unavailable(out))
    assert f"fp8: cannot run here: {reason}" in console.export_text()
    monkeypatch.setenv("FAKE_FAILS", "-")  # a later run on another machine
    benchmark_serving.run_all(COMPARISON, cells, out, messages.append)
    assert read_unavailable(out) == {}
    assert len(read_rows(out)) == 4


def test_a_running_server_is_driven_and_left_alone(folder):
    out, messages = folder / "rows.jsonl", []
    with serving(["/m"], 30.0) as server:
        running = RunningServer(server.url + "/v1/")
        assert (running.url, running.served, running.root) == (server.url, "m", "/m")
        comparison = replace(COMPARISON, running=running)
        systems = benchmark_serving.read_systems("", server.url)
        cells = cells_of(systems, ["chat", "random"], [50.0], 1)
        assert benchmark_serving.run_all(comparison, cells, out, messages.append) == []
        assert server.exit_code is None
    assert_all_gone(folder, servers=1)  # the test's own
    chat_row, bench_row = read_rows(out).values()
    assert chat_row["settings"]["base_url"] == server.url
    assert "pool_tokens" not in chat_row["settings"]
    assert chat_row["figures"]["pool_blocks"] == 10
    assert "memory_bytes" not in bench_row["figures"]
    bodies = [json.loads(line) for line in noted(folder, "requests")]
    assert {body["model"] for body in bodies} == {"m"}
    (bench,) = [json.loads(line) for line in noted(folder, "bench")]
    assert bench[bench.index("--served-model-name") + 1] == "m"
    with pytest.raises(ServerError, match="v1/models"):
        RunningServer(server.url)


def test_the_clients_json_is_kept_next_to_the_rows(folder):
    dataset = folder / "keys.jsonl"
    dataset.write_text(
        "".join(json.dumps({"prompt": "?", "answer": n}) + "\n" for n in (11, 22))
    )
    load = bench_module.BenchLoad(4, dataset="custom", path=str(dataset))
    comparison = replace(COMPARISON, dataset=load)
    out, messages = folder / "rows.jsonl", []
    cells = cells_of([{}], ["dataset"], [float("inf")], 1)
    assert benchmark_serving.run_all(comparison, cells, out, messages.append) == []
    (row,) = read_rows(out).values()
    assert row["rate"] == float("inf")
    assert "Infinity" not in out.read_text()
    kept = json.loads((folder / row["bench_result"]).read_text())
    assert kept["completed"] == row["figures"]["completed"]
    assert row["bench_result"] in messages[-1]
    # The stand-in answers the first two of four prompts.
    assert row["figures"]["answered_share"] == 0.5
    benchmark_serving.run_all(comparison, cells, out, messages.append)
    assert messages[-1].startswith("0 of 1 measurements to come")


@pytest.mark.parametrize(("drafts", "share"), [(8, 0.75), (0, None)])
def test_accepted_drafts_are_a_share_of_all(drafts, share):
    percentiles = {
        f"p{p}_{name}_ms": 1.0
        for p in bench_module.PERCENTILES
        for name in ("ttft", "tpot", "itl")
    }
    result = percentiles | {
        "duration": 2.0,
        "completed": 3,
        "failed": 0,
        "total_input_tokens": 5,
        "total_output_tokens": 7,
        "request_throughput": 1.5,
        "output_throughput": 3.5,
        "request_goodput": 1.0,
    }
    if drafts:
        result |= {
            "spec_decode_draft_tokens": drafts,
            "spec_decode_accepted_tokens": 6,
        }
    assert bench_module.bench_figures(result).get("accepted_draft_share") == share


def test_a_policy_that_fails_does_not_stop_the_others(folder, monkeypatch):
    monkeypatch.setenv("FAKE_FAILS", "snapkv")
    out, messages = folder / "rows.jsonl", []
    cells = cells_of([SNAPKV, {}], ["chat"], [50.0], 2)
    failed = benchmark_serving.run_all(COMPARISON, cells, out, messages.append)
    assert failed == ["snapkv"]
    assert [row["policy"] for row in read_rows(out).values()] == [{}, {}]
    refusals = [line for line in messages if "does not fit this model" in line]
    assert len(refusals) == 1  # with the end of the log, and without a second attempt
    assert "ended with code 1 before it was ready" in refusals[0]


def test_memory_is_sampled_while_the_load_runs(folder):
    with serving(["/m", "--kv-policy", "x"], 30.0) as server:
        deadline = time.monotonic() + 20
        with Sampler(server.url, every_s=0.02) as sampler:
            while len(sampler.samples) < 5 and time.monotonic() < deadline:
                time.sleep(0.02)
        count = len(sampler.samples)
        time.sleep(0.1)
    assert 4 < count == len(sampler.samples)
    assert {sample["usage"] for sample in sampler.samples} == {0.5}
    assert {sample["host_bytes"] for sample in sampler.samples} == {2 << 20}


def test_a_server_that_never_answers_is_given_up(folder, monkeypatch):
    sleeper = "import time; print('busy', flush=True); time.sleep(60)"
    monkeypatch.setattr(
        server_module, "vllm_command", lambda *_: [sys.executable, "-c", sleeper]
    )
    with (
        pytest.raises(ServerError, match=r"not ready after 1 s(?s:.)*busy"),
        serving(["/m"], 1.0),
    ):
        pass


def test_nothing_is_left_after_an_exception(folder):
    def fail() -> None:
        assert any(map(runs, pids(folder)))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), serving(["/m"], 30.0):
        fail()
    assert_all_gone(folder, servers=1)


@pytest.mark.parametrize("what", ["server", "client"])
def test_a_signal_during_the_start_leaves_nothing(folder, monkeypatch, what):
    """The signal arrives before the process is known, and is delivered as soon as it
    is.
    """
    real, started = subprocess.Popen, []
    # a test run in the background ignores SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def popen(*arguments, **options):
        started.append(real(*arguments, **options))
        os.kill(os.getpid(), signal.SIGINT)
        return started[0]

    monkeypatch.setattr(server_module.subprocess, "Popen", popen)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    group = {
        "server": lambda: serving(["/m"], 30.0),
        "client": lambda: server_module.Group(command, folder / "log"),
    }[what]
    try:
        with pytest.raises(KeyboardInterrupt), group():
            pytest.fail("the block was entered")
    finally:
        signal.signal(signal.SIGINT, before)
    assert started[0].returncode is not None


def test_signals_that_end_a_run():
    before = {number: signal.getsignal(number) for number in server_module.SIGNALS}
    try:
        # the state in which a shell starts background commands, and nohup any command
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        server_module.exit_on_signals()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        server_module.exit_on_signals()
        with pytest.raises(SystemExit) as left:
            signal.raise_signal(signal.SIGHUP)
        assert left.value.code == 129
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


DRIVER = f"""
import sys
sys.path.extend({[p for p in sys.path if "/benchmarks/" in p]!r})
import _serving_bench, _serving_server, typer
def fake(*arguments):
    return [sys.executable, {FAKE!r}, *arguments]
_serving_bench.vllm_command = _serving_server.vllm_command = fake
import benchmark_serving
sys.argv[0] = benchmark_serving.__file__
typer.run(benchmark_serving.main)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
    ],
)
def test_signals_leave_no_server_and_a_rerun_goes_on(folder, number, code):
    out = folder / "rows.jsonl"
    command = [sys.executable, "-c", DRIVER, "/m", "--policies", "stock,snapkv"]
    command += ["--workloads", "chat", "--rates", "20", "--repetitions", "1"]
    command += ["--users", "2", "--turns", "1", "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--answer-tokens", "1000"],  # 30 s or more
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    # two requests are the warm-up; the third one is the load
    while len(noted(folder, "requests")) < 3 and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    process.send_signal(number)
    messages, _ = process.communicate(timeout=30)
    assert process.returncode == code, messages
    assert_all_gone(folder, servers=1)
    assert not out.exists()
    if number == signal.SIGINT:
        assert "run the same command again" in messages
        done = subprocess.run(
            [*command, "--answer-tokens", "5"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(read_rows(out)) == 2
        assert "TTFT" in done.stdout
        assert_all_gone(folder, servers=3)


def test_mistakes_are_told_before_a_server_starts(tmp_path):
    import typer

    with pytest.raises(typer.BadParameter, match="snapvk"):
        benchmark_serving.read_policies("stock,snapvk")
    with pytest.raises(typer.BadParameter, match="budget"):
        benchmark_serving.read_policies('{"name": "snapkv", "budget": "much"}')
    for rates in ("1,x", "0", "nan", "-1"):
        with pytest.raises(typer.BadParameter, match="--rates"):
            benchmark_serving.read_rates(rates)
    with pytest.raises(typer.BadParameter, match="chats"):
        benchmark_serving.read_workloads("chats", "")
    with pytest.raises(typer.BadParameter, match="go together"):
        benchmark_serving.read_workloads("dataset", "")
    with pytest.raises(typer.BadParameter, match="name fp8"):
        benchmark_serving.read_server_args("--kv-cache-dtype=fp8")
    with pytest.raises(typer.BadParameter, match="gib"):
        benchmark_serving.read_policies('{"name": "offload", "gib": -1}')
    with pytest.raises(typer.BadParameter, match="one server"):
        benchmark_serving.read_systems("stock,snapkv", "http://x")
    with pytest.raises(typer.BadParameter, match="--base-url"):
        benchmark_serving.read_running("http://127.0.0.1:1")
    with pytest.raises(typer.BadParameter, match="--texts"):
        benchmark_serving.read_texts(tmp_path / "none")
