"""The demos: their questions, their verdict, and serve.sh around a fake vLLM."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import fake_demo_server
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.append(str(SCRIPTS))

import demo  # noqa: E402
from _demo_client import Server, parse_metrics, pool_of  # noqa: E402
from _demo_kinds import Answer, Plan, Result, plan_of, problems  # noqa: E402
from _demo_talks import TALKS, document, topics, turns  # noqa: E402

from vllm_kvplugins.policies import available_policies  # noqa: E402

# -- what is asked ---------------------------------------------------------------------


def test_the_document_holds_its_key_once():
    (step,) = document(1500, seed=1)
    assert (step,) == tuple(document(1500, seed=1))
    assert step.expected is not None
    assert step.question.count(step.expected) == 2
    assert 4_000 < len(step.question) < 7_000
    assert document(1500, seed=2)[0].expected != step.expected


def test_only_the_first_turn_holds_the_key():
    steps = turns()
    assert all(step.reply for step in steps[:-1])
    key = steps[-1].expected
    assert key is not None
    assert [key in step.question for step in steps] == [True, False, False, False]
    assert [step.expected for step in steps[:-1]] == [None] * 3


def test_topics_are_answered_in_what_was_said_before():
    texts = ""
    for step in topics():
        texts += " ".join(message["content"] for message in step.before).lower()
        assert str(step.expected) in texts


@pytest.mark.parametrize("policy", available_policies())
def test_every_policy_has_a_demo_that_fits_it(policy):
    plan = plan_of(policy)
    talk = {"turns": "turns", "episodes": "topics"}.get(plan.kind, "document")
    assert plan.talk == talk
    assert plan.talk in TALKS
    assert plan_of(policy, '{"sessions": false}' if policy == "snapkv" else "") == (
        plan if policy != "snapkv" else plan_of(policy, '{"sessions": false}')
    )


def test_settings_of_the_user_are_taken_as_they_are():
    assert plan_of("snapkv", '{"budget": 99}').settings == '{"budget": 99}'
    assert json.loads(plan_of("snapkv").settings) == {"window": 20}
    with pytest.raises(ValueError, match="KVP036"):
        plan_of("snapkv", '{"bugdet": 99}')


# -- judging ---------------------------------------------------------------------------


def answer(held: int = 6, whole: int = 20, text: str = "12345", **counts: float):
    zero = dict.fromkeys(("blocks_freed", "compressions", "session_hits"), 0.0)
    zero |= {"selected_tokens": 0.0, "fetched_tokens": 0.0}
    return Answer(
        question="What?",
        expected="12345",
        text=text,
        prompt_tokens=whole * 32,
        tokens=8,
        first_s=1.0,
        total_s=1.5,
        held_blocks=held,
        peak_blocks=whole,
        whole_blocks=whole,
        counts=zero | counts,
    )


ACTED = {"compressions": 1.0, "blocks_freed": 9.0, "session_hits": 1.0}
ACTED |= {"selected_tokens": 9.0, "fetched_tokens": 4.0}


def result(kind: str, *answers: Answer, encoder: bool = False) -> Result:
    return Result(Plan("x", kind, "document", "", encoder), answers=list(answers))


def grown(**changes: float) -> list[Answer]:
    """Answers to four questions of a growing conversation."""
    return [answer(whole=whole, **(ACTED | changes)) for whole in (12, 17, 23, 29)]


@pytest.mark.parametrize("kind", ["eviction", "retrieval", "spans"])
def test_a_policy_that_worked_may_answer_wrongly(kind):
    assert problems(result(kind, answer(text="no idea", **ACTED)), True) == []


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("eviction", {"compressions": 0}),
        ("eviction", {"blocks_freed": 0}),
        ("eviction", {"held": 20}),
        ("eviction", {"held": 0}),
        ("retrieval", {"fetched_tokens": 0}),
        ("retrieval", {"held": 20}),
        ("spans", {"selected_tokens": 0}),
    ],
)
def test_a_policy_that_did_nothing_is_told(kind, change):
    assert len(problems(result(kind, answer(**(ACTED | change))))) == 1


def test_turns_are_compressed_once_each_and_continue_the_session():
    first = answer(whole=12)
    assert problems(result("turns", first, *grown()[1:])) == []
    twice = [first, *grown()[1:3], *grown(compressions=2)[3:]]
    (problem,) = problems(result("turns", *twice))
    assert "question 4 closed one turn and led to 2" in problem
    missed = result("turns", first, *grown(session_hits=0)[1:])
    assert len(problems(missed)) == 3


def test_episodes_hold_the_same_number_of_blocks_while_the_history_grows():
    flat = result("episodes", *grown(), encoder=True)
    assert problems(flat) == []
    flat.episodes = ["1 of 4"] * 4
    assert problems(flat) == []
    flat.episodes = ["1 of 4"] * 3
    assert "1 questions were not routed" in problems(flat)[0]
    growing = [answer(held=w - 2, whole=w, **ACTED) for w in (12, 17, 23, 29)]
    assert "not flat: 10, 15, 21, 27" in problems(result("episodes", *growing))[0]


@pytest.mark.parametrize("kind", ["full", "none"])
def test_the_known_model_must_answer_when_nothing_was_dropped(kind):
    wrong = result(kind, answer(held=20, text="no idea"))
    assert problems(wrong) == []
    assert len(problems(wrong, known_model=True)) == 1
    assert problems(result(kind, answer(held=20)), known_model=True) == []


def test_full_must_hold_everything():
    assert len(problems(result("full", answer(held=12)))) == 1
    assert len(problems(result("full", answer(held=20, blocks_freed=1)))) == 1


def test_results_survive_json():
    before = result("turns", *grown())
    after = Result.from_json(json.loads(json.dumps(before.as_json())))
    assert after == before


# -- the client ------------------------------------------------------------------------


@contextmanager
def serving(policy: str = "", lazy: bool = False):
    server = fake_demo_server.server(policy, lazy=lazy)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_metrics_are_summed_over_their_labels():
    text = '# HELP x\nx{a="1 2"} 3.0\nx{a="2"} 4.0\ny 1e+06\n'
    assert parse_metrics(text) == {"x": 7.0, "y": 1e6}


def test_the_pool_leaves_out_the_block_that_vllm_keeps():
    text = 'a 1\nvllm:cache_config_info{block_size="16",num_gpu_blocks="8"} 1.0\n'
    assert pool_of(text) == (7, 16)


def test_an_answer_ends_where_the_model_closed_it():
    with serving() as port:
        server = Server.connect(f"http://127.0.0.1:{port}")
        question = "The pass key is 12345. What is the pass key?"
        reply = server.ask([{"role": "user", "content": question}], 8, True)
    assert reply.text == "It is 12345."
    assert reply.held_blocks == 1
    assert reply.host_bytes == 3 * 2**20
    assert 0 < reply.first_s < reply.total_s


def test_a_server_that_is_not_there_is_not_ready():
    with socket.socket() as free:
        # Bound but not listening, so that no other program gets the port
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        assert demo.is_ready(f"http://127.0.0.1:{port}") is False


@pytest.mark.parametrize("policy", ["snapkv", "flowkv", "epicache", "icecache", "full"])
def test_a_demo_of_each_kind(policy, capsys, monkeypatch, tmp_path):
    out, log = tmp_path / "result.json", tmp_path / "server.log"
    log.write_text("episode 1 of 4 (cosine 0.52, switched: None): encode 3 ms\n" * 4)
    with serving(policy) as port:
        arguments = ["run", "--port", str(port), "--policy", policy, "--known-model"]
        arguments += ["--out", str(out), "--log", str(log)]
        monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
        assert demo.main() == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert ": right" in printed
    assert "wrong" not in printed
    assert ("2 of 4 (cosine 0.52)" in printed) == (policy == "epicache")
    (row,) = demo.read_results([str(out)])
    assert problems(row, known_model=True) == []


def test_a_policy_that_does_nothing_fails_its_demo(capsys, monkeypatch):
    with serving("snapkv", lazy=True) as port:
        arguments = ["run", "--port", str(port), "--policy", "snapkv"]
        monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
        assert demo.main() == 1
    assert "error: compressions: 0" in capsys.readouterr().err


# -- serve.sh around a fake vLLM -------------------------------------------------------


@pytest.fixture
def serve_sh(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """serve.sh in an environment that is already set up, with a fake ``vllm``."""
    venv, model = tmp_path / "venv", tmp_path / "model"
    state = venv / ".kvp-setup"
    state.mkdir(parents=True)
    (venv / "bin").mkdir()
    fake = Path(fake_demo_server.__file__)
    for name, target in (("python", ""), ("vllm", f" {fake}")):
        script = venv / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable}{target} "$@"\n')
        script.chmod(0o755)
    (state / "vllm-done").touch()
    setup = (
        f'source "{SCRIPTS}/_setup.sh"; kvp_find_python; '
        'printf "%s\\n" "$("$KVP_BASE_PYTHON" -V) $KVP_DEVICE $KVP_VLLM_CPU '
        f'$KVP_VLLM_CUDA $KVP_TORCH_CPU" >{state}/made-for; '
        f'printf "run %s\\n" "$(kvp_tree_hash)" >{state}/project-done'
    )
    model.mkdir()
    environment = os.environ | {
        "KVP_VENV": str(venv),
        "KVP_PYTHON": sys.executable,
        "KVP_DEVICE": "cpu",
        "FAKE_NOTES": str(tmp_path / "notes"),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run(["bash", "-c", setup], env=environment, check=True, timeout=60)

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = ["bash", str(SCRIPTS / "serve.sh"), str(model), "--port", str(port)]
        return subprocess.run(
            [*command, *arguments],
            env=environment | changes,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    return run


def test_serve_sh_compares_a_policy_with_stock(serve_sh, tmp_path):
    done = serve_sh("--demo", "--policy", "icecache")
    assert done.returncode == 0, done.stderr
    assert re.search(r"answer +'It is \d{5}\.': right", done.stdout), done.stdout
    assert "stock vLLM" in done.stdout
    stock, policy = (tmp_path / "notes").read_text().splitlines()
    assert "--block-size 32" in stock
    assert "--kv-policy" not in stock
    assert "--kv-policy icecache" in policy
    left = {path.name for path in tmp_path.iterdir()} - {"venv", "model", "notes"}
    assert not left, f"left behind: {left}"


@pytest.mark.slow
def test_serve_sh_shows_only_the_reasons_of_a_refusal(serve_sh):
    done = serve_sh("--demo", "--policy", "snapkv", FAKE_REFUSES="snapkv")
    assert done.returncode == 1
    assert "  1. [KVP019] fp8; use bfloat16" in done.stderr
    assert "INFO" not in done.stderr


def test_serve_sh_refuses_a_wrong_setting_before_it_starts_anything(serve_sh, tmp_path):
    done = serve_sh("--demo", "--policy-config", '{"bugdet": 5}')
    assert done.returncode == 1
    assert "[KVP036]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "notes").exists()


HEAD = ["policy", "kind"]  # in the first line of the table


@pytest.mark.slow
def test_serve_sh_runs_all_demos_and_prints_one_table(serve_sh):
    done = serve_sh("--demo", "all", FAKE_REFUSES="tova")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:2] == HEAD)
    table = itertools.takewhile(str.strip, lines[start + 1 :])
    rows = {line.split()[0]: line for line in table}
    assert set(rows) == set(available_policies())
    assert rows["tova"].endswith("no: the server did not start")
    assert all(line.endswith("yes") for name, line in rows.items() if name != "tova")
    assert f"{len(rows) - 1} of {len(rows)} policies did their work" in done.stdout


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("fpu avx2 avx512f", False),
        ("fpu avx512_bf16 avx2", True),
        ("fpu amx_bf16", True),
        ("fpu avx512_bf16x", False),
        ("", True),  # not x86: vLLM decides
    ],
)
def test_bf16_instructions_are_read_from_the_cpu(flags, has, tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\n{'flags : ' + flags if flags else ''}\n")
    code = (
        f'source "{SCRIPTS}/_setup.sh"; kvp_cpu_has_bf16 {info} && echo yes || echo no'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == ("yes" if has else "no"), done.stderr
