"""``kvplugins chat`` without a browser: its proxy in front of a fake vLLM server."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("uvicorn", reason="install a vLLM, which brings uvicorn")

import httpx
from cli_errors import refused
from fake_chat_server import BLOCK, FakeServer, serving

from vllm_kvplugins.cli import app, chat
from vllm_kvplugins.cli.chat_server import create_app, server_address, sums
from vllm_kvplugins.errors import KVPolicyError, codes_in

JSON = {"Content-Type": "application/json"}
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
PAGE = Path(chat.__file__).parent / "chat_page"


@pytest.fixture
def vllm():
    """The fake server, with the address of the page's server in front of it."""
    server = FakeServer()
    with serving(server.app) as base, serving(create_app(base, "secret")) as page:
        server.page, server.base = page, base
        yield server


def events(response: httpx.Response) -> list[dict]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# -- the page -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/style.css", "text/css"), ("/script.js", "text/javascript")],
)
def test_the_page_is_served_with_a_policy_that_forbids_other_hosts(vllm, path, kind):
    response = httpx.get(vllm.page + path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(kind)
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "unsafe" not in policy


def test_the_page_names_no_other_host():
    for path in PAGE.iterdir():
        addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text())
        assert addresses == [], path.name


def test_the_script_uses_only_elements_of_the_page():
    ids = set(re.findall(r' id="([\w-]+)"', (PAGE / "index.html").read_text()))
    script = (PAGE / "script.js").read_text()
    used = set(re.findall(r'byId\("([\w-]+)"\)', script))
    used |= set(re.findall(r'max_tokens: "([\w-]+)"', script))
    assert used <= ids
    assert len(used) > 15


# -- chats --------------------------------------------------------------------------


def test_a_chat_is_streamed_with_usage_and_report(vllm):
    response = httpx.post(f"{vllm.page}/api/chat", json=HELLO)
    assert response.headers["content-type"].startswith("text/event-stream")
    received = events(response)
    text = "".join(
        choice["delta"].get("content", "")
        for event in received
        for choice in event["choices"]
    )
    assert text.split() == vllm.answer
    assert received[-2]["usage"]["prompt_tokens"] == 100
    assert received[-1]["kv_transfer_params"]["kv_policy"]["held_blocks"] == 3
    (body,) = vllm.bodies
    assert body["messages"] == HELLO["messages"]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["vllm_xargs"] == {"kv_report": 1}
    assert vllm.headers[0]["authorization"] == "Bearer secret"


def test_parameters_of_the_page_reach_the_server(vllm):
    body = HELLO | {"cache_salt": "alice", "vllm_xargs": {"kv_session": 0}}
    assert httpx.post(f"{vllm.page}/api/chat", json=body).status_code == 200
    assert vllm.bodies[0]["cache_salt"] == "alice"
    assert vllm.bodies[0]["vllm_xargs"] == {"kv_session": 0, "kv_report": 1}


def test_words_arrive_while_the_server_still_writes(vllm):
    vllm.holds_after = 2
    with httpx.stream("POST", f"{vllm.page}/api/chat", json=HELLO) as response:
        parts = response.iter_text()
        first = next(part for part in parts if "You" in part)
        assert "dog" not in first
        vllm.release.set()
        assert "dog" in "".join(parts)


@pytest.mark.parametrize("words", [0, 2], ids=["in prefill", "between words"])
def test_vllm_stops_when_the_browser_leaves(vllm, words):
    vllm.holds_after = words
    with httpx.stream("POST", f"{vllm.page}/api/chat", json=HELLO) as response:
        parts = response.iter_bytes()
        next(parts)
        assert not vllm.left.is_set()
    assert vllm.left.wait(20)
    assert vllm.counts["vllm:request_success_total"] == 0


def test_an_error_of_the_server_keeps_status_and_code(vllm):
    error = {"message": "[KVP502] the request needs more blocks", "code": 400}
    vllm.refuses = 400, {"error": error}
    response = httpx.post(f"{vllm.page}/api/chat", json=HELLO)
    assert response.status_code == 400
    assert response.json() == {"error": error}


def test_a_server_that_is_down_is_an_error_with_a_code():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with serving(create_app(base)) as page:
            for method, path in (
                ("GET", "server"),
                ("GET", "metrics"),
                ("POST", "chat"),
                ("POST", "reset"),
            ):
                body = "{}" if method == "POST" else None
                response = httpx.request(
                    method, f"{page}/api/{path}", content=body, headers=JSON
                )
                assert response.status_code == 502
                message = response.json()["error"]["message"]
                assert codes_in(message) == ("KVP610",)
                assert base in message


def test_a_server_that_dies_ends_the_stream_with_an_error():
    """Its answer is shorter than announced."""
    part = b'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer_half() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(head + part)

        thread = threading.Thread(target=answer_half)
        thread.start()
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with serving(create_app(base)) as page:
            response = httpx.post(f"{page}/api/chat", json=HELLO)
        thread.join()
    first, last = (part for part in response.text.split("\n\n") if part)
    assert "Half" in first
    message = json.loads(last.removeprefix("data: "))["error"]["message"]
    assert codes_in(message) == ("KVP610",)


# -- the server's state ---------------------------------------------------------------


def test_models_and_metrics(vllm):
    found = httpx.get(f"{vllm.page}/api/server").json()
    assert found == {"server": vllm.base, "models": ["tiny"], "can_reset": True}
    vllm.count(kv_policy_session_hits=2)
    metrics = httpx.get(f"{vllm.page}/api/metrics").json()
    assert metrics["block_size"] == BLOCK
    assert metrics["pool_blocks"] == 100
    assert metrics["values"]["vllm:kv_policy_session_hits_total"] == 2
    assert metrics["values"]["vllm:kv_cache_usage_perc"] == 0.25


def test_a_wrong_key_is_shown_as_the_server_says_it(vllm):
    vllm.refuses = 401, {"error": "Unauthorized"}
    response = httpx.get(f"{vllm.page}/api/server")
    assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})


def test_metrics_of_several_engines_are_added_and_usage_is_averaged():
    lines = [
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10"} 1',
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="30"} 1',
        'vllm:kv_cache_usage_perc{engine="0"} 0.5',
        'vllm:kv_cache_usage_perc{engine="1"} 0.1',
        'vllm:kv_policy_session_hits_total{engine="0"} 3',
        'vllm:kv_policy_session_hits_total{engine="1"} 4',
        'vllm:kv_policy_compression_seconds_bucket{le="0.1"} 9',
        'vllm:estimated{engine="0"} NaN',
        "python_gc_objects_collected_total 5",
    ]
    found = sums("\n".join(lines) + "\n")
    assert found["values"] == {
        "vllm:kv_policy_session_hits_total": 7,
        "vllm:kv_cache_usage_perc": 0.3,
    }
    assert (found["block_size"], found["pool_blocks"]) == (16, 40)
    assert sums("")["pool_blocks"] is None


def test_dropping_sessions_reaches_the_server(vllm):
    response = httpx.post(f"{vllm.page}/api/reset", json={})
    assert response.json() == {"success": True}
    assert vllm.resets == 1


# -- other pages of the browser -----------------------------------------------------


def test_another_host_name_is_refused(vllm):
    """A page whose name resolves to 127.0.0.1 must not read chats or use the key."""
    for path in ("/", "/api/server", "/api/metrics"):
        response = httpx.get(vllm.page + path, headers={"Host": "evil.example:80"})
        assert response.status_code == 400
    named = vllm.page.replace("127.0.0.1", "localhost")
    assert httpx.get(named).status_code == 200


@pytest.mark.parametrize("path", ["chat", "reset"])
def test_a_form_of_another_page_is_refused(vllm, path):
    """Browsers send text/plain to other origins without asking; JSON they do not."""
    response = httpx.post(
        f"{vllm.page}/api/{path}",
        content=json.dumps(HELLO),
        headers={"Content-Type": "text/plain"},
    )
    assert response.status_code == 415
    asked = httpx.options(f"{vllm.page}/api/{path}")
    assert "access-control-allow-origin" not in asked.headers
    assert vllm.bodies == []
    assert vllm.resets == 0


@pytest.mark.parametrize("body", ["", "[]", "{"])
def test_a_body_that_is_no_object_is_refused(vllm, body):
    response = httpx.post(f"{vllm.page}/api/chat", content=body, headers=JSON)
    assert response.status_code == 415


# -- the command --------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1/"]
)
def test_the_address_of_the_server_may_end_in_v1(url):
    assert server_address(url) == "http://host:8000"


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(KVPolicyError) as caught:
        server_address(url)
    assert caught.value.codes == ("KVP603",)
    done = CliRunner().invoke(app, ["chat", "--base-url", url])
    assert codes_in(refused(done)) == ("KVP603",)


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["chat", "--port", port, "--no-browser"])
    assert codes_in(refused(done)) == ("KVP609",)


def test_the_command_serves_the_page_and_opens_it(monkeypatch):
    """The page answers when the browser is opened, with the key of the environment."""
    vllm, opened = FakeServer(), []

    def serve(made, listener):
        with serving(made) as page:
            httpx.post(f"{page}/api/chat", json=HELLO)

    monkeypatch.setattr(chat, "_serve", serve)
    monkeypatch.setattr(chat.webbrowser, "open", opened.append)
    monkeypatch.setenv("VLLM_API_KEY", "from-environment")
    with serving(vllm.app) as base:
        for display, options in ((":0", []), (":0", ["--no-browser"]), ("", [])):
            monkeypatch.setenv("DISPLAY", display)
            monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
            command = ["chat", "--base-url", f"{base}/v1", "--port", "0", *options]
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 0, done.output
            assert base in done.stdout
    assert len(opened) == 1
    assert opened[0].startswith("http://127.0.0.1:")
    keys = {headers["authorization"] for headers in vllm.headers}
    assert keys == {"Bearer from-environment"}


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_kvplugins.cli.chat_server", None)
    monkeypatch.delitem(sys.modules, "vllm_kvplugins.cli.chat_server")
    monkeypatch.setitem(sys.modules, "httpx", None)
    done = CliRunner().invoke(app, ["chat", "--no-browser"])
    message = refused(done)
    assert codes_in(message) == ("KVP600",)
    assert "httpx" in message


def test_the_files_of_the_page_are_packed():
    root = Path(__file__).parents[2]
    packed = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = packed["tool"]["setuptools"]["package-data"]["*"]
    assert {f"*{path.suffix}" for path in PAGE.iterdir()} <= set(patterns)
