"""Sessions that several engines share in one store."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import fsspec
import pytest
from harness import engine_environment, run_scenario
from live_server import metric, post, serving
from s3_server import BUCKET, s3_server
from test_sessions import FLOW, QUESTIONS, computed, talks
from texts import random_tokens
from tiny_model import VOCABULARY
from waiting import wait_for

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def recomputed(tiny_model):
    """Every request computes its whole history."""
    settings = {"num_gpu_blocks_override": 400, "enable_prefix_caching": False}
    return talks(tiny_model, FLOW | {"sessions": False}, settings=settings)


def store_at(folder: Path, **settings: object) -> dict[str, Any]:
    """FlowKV with a store, on a machine that may be busy."""
    patience = {"session_lookup_s": 30, "session_load_s": 60}
    return FLOW | patience | {"session_url": f"file://{folder}"} | settings


def test_an_engine_continues_what_another_one_saved(tiny_model, recomputed, tmp_path):
    """In another process, by look-ups alone. Its weights are a copy: other paths and
    times of files.
    """
    model = tmp_path / "elsewhere" / Path(tiny_model).name
    shutil.copytree(tiny_model, model, copy_function=shutil.copyfile)
    policy = store_at(tmp_path / "store", session_refresh_s=None)
    first = talks(tiny_model, policy, questions=QUESTIONS[:3])
    second = talks(
        str(model), policy, questions=QUESTIONS[3:], histories=first["histories"]
    )
    joined = [a + b for a, b in zip(first["answers"], second["answers"], strict=True)]
    assert joined == recomputed["answers"]
    assert max(computed(second, QUESTIONS[3:])) <= 1, "the files lack queries"
    assert second["counts"]["hits"] == 12
    assert second["counts"]["misses"] == 0
    # Its own session of the first of the two turns serves the second one.
    assert second["counts"]["store_hits"] == 6
    assert second["counts"]["failures"] == 0
    assert first["counts"]["store_hits"] == 0
    assert second["tracked"] == 0


def test_conversations_in_an_unreliable_store_give_the_same_tokens(
    tiny_model, recomputed, tmp_path
):
    """Sessions of the first engine are found or not, and written or not."""
    policy = store_at(tmp_path, session_refresh_s=0.05)
    first = talks(tiny_model, policy, questions=QUESTIONS[:2])
    arguments = {
        "model": tiny_model,
        "policy": policy | {"session_memory": "2MiB"},
        "fails_every": 3,
        "questions": QUESTIONS[2:],
        "number": 6,
        "histories": first["histories"],
    }
    second = run_scenario("scenarios_fleet:unreliable", arguments)
    joined = [a + b for a, b in zip(first["answers"], second["answers"], strict=True)]
    assert joined == recomputed["answers"]
    assert second["counts"]["hits"] > 0
    assert second["counts"]["failures"] > 0
    assert second["tracked"] == 0


def test_a_reset_engine_does_not_use_the_store_any_more(tiny_model, tmp_path):
    """Its weights may have changed."""
    report = run_scenario(
        "scenarios_fleet:reset",
        {"model": tiny_model, "policy": store_at(tmp_path), "folder": str(tmp_path)},
    )
    before, after = report["files"]
    assert len(before) == 1
    assert before == after, "written or deleted after the reset"
    assert report["known"] == 0
    assert report["restored"] == 0
    assert report["in_memory"] > 450, "sessions in memory go on"
    assert report["tracked"] == 0


# -- live servers ----------------------------------------------------------------------

ENGINE = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048"),
    *("--num-gpu-blocks-override", "200", "--skip-tokenizer-init"),
)
LIVE_QUESTIONS = [300, 90, 200, 60]
_HITS = "vllm:kv_policy_session_hits_total"
_STORE_HITS = "vllm:kv_policy_session_store_hits_total"
_STORE_FAILURES = "vllm:kv_policy_session_store_failures_total"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn is sent: a server, and one of its engines if it has several."""

    base: str
    rank: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.rank is None else {"X-data-parallel-rank": str(self.rank)}


class Client:
    """A conversation whose turns go to one place after the other."""

    def __init__(self, seed: int, places: list[Place]) -> None:
        self.seed, self.places = seed, cycle(places[seed:] + places[:seed])
        self.prompt: list[int] = []
        self.ends: list[int] = []
        self.answers: list[list[int]] = []

    def turn(self, question: int) -> None:
        number = 100 * self.seed + len(self.answers)
        self.prompt = self.prompt + random_tokens(number, question, VOCABULARY)
        place = next(self.places)
        answer = post(
            place.base,
            "/v1/completions",
            place.headers,
            prompt=self.prompt,
            max_tokens=12,
            ignore_eos=True,
            return_token_ids=True,
            cache_salt=f"user {self.seed}",
            vllm_xargs={"turn_ends": self.ends},
        )
        tokens = list(answer["choices"][0]["token_ids"])
        self.answers.append(tokens)
        self.prompt = self.prompt + tokens
        self.ends = [*self.ends, len(self.prompt)]


def converse(
    places: list[Place], count_files: Callable[[], int | None]
) -> list[list[list[int]]]:
    """The answers of two conversations, whose turns are sent at the same time."""
    clients = [Client(seed, places) for seed in range(2)]
    with ThreadPoolExecutor() as threads:
        for turn, question in enumerate(LIVE_QUESTIONS):
            list(threads.map(lambda client, n=question: client.turn(n), clients))
            # People read an answer before they reply, so it is saved by then.
            wait_for(lambda n=2 * (turn + 1): count_files() in (n, None), 60)
    return [client.answers for client in clients]


@pytest.fixture(scope="module")
def expected(tiny_model, tmp_path_factory):
    """Answers of a server that computes every history."""
    settings = json.dumps({"ratio": 0.3, "sessions": False})
    policy = ("--kv-policy", "flowkv", "--kv-policy-config", settings)
    folder = tmp_path_factory.mktemp("alone")
    environment = engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    start = (sys.executable, tiny_model, folder, *ENGINE)
    with serving(*start, *policy, **environment) as base:
        return converse([Place(base)], lambda: None)


def sharing(url: str) -> tuple[str, ...]:
    """Options of a server with a store, on a machine that may be busy."""
    settings = {
        "ratio": 0.3,
        "session_url": url,
        "session_refresh_s": None,
        "session_lookup_s": 30,
        "session_load_s": 60,
    }
    return ("--kv-policy", "flowkv", "--kv-policy-config", json.dumps(settings))


def files_at(url: str) -> int:
    fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    names = fs.find(path) if fs.exists(path) else ()
    return sum(name.endswith(".safetensors") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file", "s3"])
def test_two_live_servers_continue_each_others_conversations(
    tiny_model, tmp_path, expected, store
):
    """A round robin: every turn goes to the server that did not get the last one."""
    with s3_server() if store == "s3" else nullcontext({}) as variables:
        url = f"s3://{BUCKET}/x" if store == "s3" else f"file://{tmp_path / 'store'}"
        environment = engine_environment(
            VLLM_ENABLE_V1_MULTIPROCESSING="1", **variables
        )
        start = (sys.executable, tiny_model, tmp_path, *ENGINE, *sharing(url))
        count_files = partial(files_at, url)
        with (
            serving(*start, **environment) as first,
            serving(*start, **environment) as second,
        ):
            servers = [first, second]
            answers = converse([Place(base) for base in servers], count_files)
            hits = [metric(base, _HITS) for base in servers]
            store_hits = [metric(base, _STORE_HITS) for base in servers]
            failures = [metric(base, _STORE_FAILURES) for base in servers]
    assert answers == expected
    assert sum(hits) == sum(store_hits) == 2 * (len(LIVE_QUESTIONS) - 1)
    assert min(store_hits) > 0
    assert failures == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("api_servers", [1, 2])
def test_engines_of_one_server_continue_each_others_conversations(
    tiny_model, tmp_path, expected, api_servers
):
    """Every turn goes to the engine that did not get the last one."""
    url = f"file://{tmp_path / 'store'}"
    engines = ("--data-parallel-size", "2", "--api-server-count", str(api_servers))
    start = (sys.executable, tiny_model, tmp_path, *ENGINE, *engines, *sharing(url))
    environment = engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    # Up to six processes start, one after the other.
    with serving(*start, start_s=600, **environment) as base:
        places = [Place(base, rank) for rank in range(2)]
        answers = converse(places, partial(files_at, url))
        hits, store_hits = metric(base, _HITS), metric(base, _STORE_HITS)
        failures = metric(base, _STORE_FAILURES)
    assert answers == expected
    assert hits == store_hits == 2 * (len(LIVE_QUESTIONS) - 1)
    assert failures == 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_engines_of_one_server_with_one_directory(tiny_model, tmp_path, expected):
    """Each has its own sessions there. After a restart, both have all of them, and one
    deletes what the other one has found: then the turn is recomputed.
    """
    folder = tmp_path / "sessions"
    settings = {"ratio": 0.3, "session_dir": str(folder), "session_memory": "64MiB"}
    start = (sys.executable, tiny_model, tmp_path, *ENGINE, "--data-parallel-size", "2")
    start += ("--kv-policy", "flowkv", "--kv-policy-config", json.dumps(settings))
    environment = engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    clients = [Client(seed, [Place("")]) for seed in range(2)]

    def server() -> AbstractContextManager[str]:
        return serving(*start, start_s=600, **environment)

    def turns(base: str, questions: list[int]) -> None:
        """Each goes to the engine that did not get the last one."""
        for client in clients:
            ranks = (client.seed, 1 - client.seed)
            client.places = cycle([Place(base, rank) for rank in ranks])
            for question in questions:
                before = files()
                client.turn(question)
                wait_for(lambda n=before: files() > n, 60)

    def counts(base: str) -> tuple[float, ...]:
        names = ("hits", "misses", "store_hits", "failures")
        return tuple(metric(base, f"vllm:kv_policy_session_{n}_total") for n in names)

    def files() -> int:
        return files_at(f"file://{folder}")

    def used() -> int:
        return sum(path.stat().st_size for path in folder.glob("*/*"))

    def counted(base: str) -> float:
        return metric(base, "vllm:kv_policy_session_disk_bytes")

    with server() as base:
        turns(base, LIVE_QUESTIONS[:2])
        assert counts(base) == (0, 4, 0, 0), "each engine has the other one's turn"
        # Files that were not complete at the last step are counted as estimated.
        assert counted(base) == pytest.approx(used(), rel=0.2)
    found = used()
    with server() as base:
        turns(base, LIVE_QUESTIONS[2:])
        assert [client.answers for client in clients] == expected
        assert counts(base) == (4, 0, 0, 0), "found at the start, or saved since"
        assert counted(base) == pytest.approx(used() + found, rel=0.2)
        # The first turn again, on each engine: the first one replaces its file, which
        # no other file needs, because later turns began on the other engine.
        for seed in range(2):
            for rank in range(2):
                before = set(folder.glob("*/*"))
                client = Client(seed, [Place(base, rank)])
                client.turn(LIVE_QUESTIONS[0])
                assert client.answers == expected[seed][:1]
                if rank == 0:
                    wait_for(lambda old=before: old - set(folder.glob("*/*")), 60)
        assert counts(base) == (6, 2, 0, 2), "restored by one, computed by the other"
