"""A middleware that salts the requests of each API key, in front of a real app."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from vllm_kvplugins.key_salt import SaltByApiKey

CHAT = "/v1/chat/completions"


async def echo(request: Request) -> JSONResponse:
    body = (await request.body()).decode("utf-8", "replace")
    length = request.headers.get("content-length")
    return JSONResponse({"body": body, "length": length})


@pytest.fixture
def client() -> TestClient:
    paths = (CHAT, "/v1/messages", "/inference/v1/generate", "/root" + CHAT)
    app = Starlette(routes=[Route(p, echo, methods=["POST", "GET"]) for p in paths])
    return TestClient(SaltByApiKey(app))


def sent(
    client: TestClient, body: Any, key: str | None = "alice", path: str = CHAT
) -> Any:
    """The body that the server gets."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    answer = client.post(path, content=content, headers=headers).json()
    if answer["length"] is not None and "\ufffd" not in answer["body"]:
        assert int(answer["length"]) == len(answer["body"].encode())
    return answer["body"]


def salt(client: TestClient, *arguments: Any, **more: Any) -> str | None:
    salt: str | None = json.loads(sent(client, *arguments, **more)).get("cache_salt")
    return salt


def test_each_key_has_a_salt_of_its_own(client):
    body = {"messages": [{"role": "user", "content": "Grüße"}], "seed": 1}
    one, again, other = (
        salt(client, body, key=key) for key in ("alice", "alice", "bob")
    )
    assert one == again != other
    assert len(one) == 64
    assert "alice" not in one
    got = json.loads(sent(client, body))
    assert {k: v for k, v in got.items() if k != "cache_salt"} == body


def test_a_client_cannot_choose_the_salt_of_another_key(client):
    alice = salt(client, {})
    assert salt(client, {"cache_salt": alice}, key="bob") != alice
    own = {salt(client, {"cache_salt": text}) for text in ("a", "b", "")}
    assert len(own) == 3
    assert alice in own, "an empty salt is none"
    assert salt(client, {"cache_salt": None}) == alice


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/inference/v1/generate", "/root" + CHAT]
)
def test_requests_at_every_path_are_salted(client, path):
    assert salt(client, {}, path=path) == salt(client, {})


@pytest.mark.parametrize(
    "body", ["not JSON", "[1]", '"text"', b"\xff", '{"cache_salt": 5}', ""]
)
def test_what_the_server_will_refuse_stays_as_it_is(client, body):
    expected = body if isinstance(body, str) else body.decode("utf-8", "replace")
    assert sent(client, body) == expected


def test_other_requests_stay_as_they_are(client):
    body = '{"a":   1}'
    assert sent(client, body, key=None) == body
    headers = {"Authorization": "Basic alice"}
    assert client.post(CHAT, content=body, headers=headers).json()["body"] == body
    got = client.get(CHAT, headers={"Authorization": "Bearer alice"}).json()
    assert got["body"] == ""


def test_a_body_in_pieces_is_salted_as_a_whole(client):
    pieces = iter([b'{"a"', b": 1}"])
    headers = {"Authorization": "bearer  alice "}
    answer = client.post(CHAT, content=pieces, headers=headers).json()
    assert json.loads(answer["body"]) == {"a": 1, "cache_salt": salt(client, {})}
