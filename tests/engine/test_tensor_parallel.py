"""Two and three tensor-parallel ranks give the same answers as one rank.

Ranks are processes connected by gloo. Each rank selects tokens for its own KV heads
without communication. With equal pages per head the selection equals that of one rank;
allocators that compare heads compare those of their rank.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from draft_models import drafter, write_noisy_copy, write_pair
from harness import run_scenario
from policy_settings import configure
from scenarios_parallel import LENGTHS, VOCABULARY
from tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SEED = 7
SETTINGS = {"budget": 96, "window": 16, "skip_layers": 0, "allocator": "uniform"}
SETTINGS |= {"local_window": 32, "least_span": 4, "span_tokens": 8}
POLICIES = [configure(name, SETTINGS) for name in ("snapkv", "quest", "sekv")]
SIZES = {"heads": 12, "kv_heads": 6, "hidden": 192, "inner": 384}


@pytest.fixture(scope="module")
def reports(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, list[dict[str, Any]]]:
    """Ranks -> results per policy; the last one is stock vLLM."""
    print("seed", SEED)
    folder: Path = tmp_path_factory.mktemp("parallel") / "model"
    model = write_tiny_model(folder, SEED, vocabulary=VOCABULARY, **SIZES)
    reports = {}
    for ranks in (1, 2, 3):
        policies = [*POLICIES, None] if ranks == 1 else POLICIES
        arguments = {"model": str(model), "policies": policies, "ranks": ranks}
        scenario = "scenarios_parallel:on_ranks"
        reports[ranks] = run_scenario(scenario, arguments, timeout=580)
    return reports


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 3])
def test_tokens_and_blocks_are_those_of_one_rank(reports: Any, ranks: int):
    for parallel, single in zip(reports[ranks], reports[1], strict=False):
        assert parallel["tokens"] == single["tokens"]
        assert parallel["left"] == single["left"] == 0
        assert parallel["compactions"] == single["compactions"]
        assert parallel["held"] == [0] * ranks


def test_policies_show_in_the_tokens(reports: Any):
    """Policies change tokens; otherwise equal tokens would prove little."""
    *others, stock = reports[1]
    assert all(other["compactions"] == 2 for other in others)
    assert all(other["tokens"] != stock["tokens"] for other in others)


# -- drafters with a KV cache ------------------------------------------------------

FLOW = {"name": "flowkv", "ratio": 0.3, "base_config": {"allocator": "uniform"}}
DRAFTED = {
    name: configure(name, SETTINGS) | {"sessions": False}
    for name in ("full", "snapkv", "quest", "sekv")
} | {"flowkv": FLOW}


@pytest.fixture(scope="module")
def drafted(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, dict[str, dict[str, Any]]]:
    """Ranks -> results by kind of drafter and policy."""
    print("seed", SEED)
    folder: Path = tmp_path_factory.mktemp("drafted")
    model = write_tiny_model(folder / "model", SEED, vocabulary=VOCABULARY, **SIZES)
    copy = drafter(model)
    noisy = drafter(write_noisy_copy(folder / "noisy", str(model), SEED, noise=0.05))
    calm, head = write_pair(folder, str(model), "eagle")
    runs: dict[int, dict[str, dict[str, Any]]] = {}
    for ranks in (1, 2):
        cases: list[Any] = [
            (f"copy {name}", each, copy) for name, each in DRAFTED.items()
        ]
        cases.append(("noisy snapkv", DRAFTED["snapkv"], noisy))
        if ranks == 1:
            cases += [(f"plain {name}", each, None) for name, each in DRAFTED.items()]
        runs[ranks] = _run_drafted(model, ranks, cases)
        heads = [("eagle snapkv", DRAFTED["snapkv"], head)]
        if ranks == 1:
            heads.append(("plain calm", DRAFTED["snapkv"], None))
        runs[ranks] |= _run_drafted(calm, ranks, heads)
    return runs


def _run_drafted(model: Any, ranks: int, cases: list[Any]) -> dict[str, dict[str, Any]]:
    names, settings = [name for name, *_ in cases], [case for _, *case in cases]
    arguments = {"model": str(model), "ranks": ranks, "cases": settings}
    rows = run_scenario("scenarios_parallel:drafted", arguments, timeout=580)
    return dict(zip(names, rows, strict=True))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("name", "plain"),
    [
        *((f"copy {name}", f"plain {name}") for name in DRAFTED),
        ("noisy snapkv", "plain snapkv"),
        ("eagle snapkv", "plain calm"),
    ],
)
def test_drafters_on_two_ranks(drafted: Any, name: str, plain: str):
    """Tokens are those without drafts, and as many drafts are right as on one rank."""
    parallel, single = drafted[2][name], drafted[1][name]
    print(name, parallel["accepted"], single["accepted"])
    assert parallel["answers"] == single["answers"] == drafted[1][plain]["answers"]
    assert parallel["accepted"] == single["accepted"]
    assert parallel["accepted"][1]["accepted"] > parallel["accepted"][0]["accepted"] > 0
    assert parallel["compactions"] == single["compactions"]
    assert parallel["held"] == [0, 0]


def test_each_rank_stores_its_part_of_the_draft_layers(drafted: Any):
    """A copy keeps what the model keeps, so all its drafts are right after a session,
    too."""
    run = drafted[2]["copy flowkv"]
    assert all(run["restored"])
    assert run["accepted"][1]["accepted"] == run["accepted"][1]["drafts"]
    assert run["session_bytes"] == sum(run["session_bytes_of_ranks"]) > 0
    assert run["session_bytes"] == drafted[1]["copy flowkv"]["session_bytes"]
    without = drafted[1]["plain flowkv"]["session_bytes"]
    assert run["session_bytes"] > 1.5 * without


# -- sessions that another size reads ------------------------------------------------

QUESTIONS = [150, 60, 90]
# One rank has all 6 KV heads, each of two has 3.
CHAINS = {"session_dir": (2, 1, 2), "session_url": (1, 2)}


@pytest.fixture(scope="module")
def conversed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model, and answers of one rank that computes every history."""
    print("seed", SEED)
    folder: Path = tmp_path_factory.mktemp("sizes")
    model = write_tiny_model(folder / "model", SEED, vocabulary=VOCABULARY, **SIZES)
    run = _turns(model, FLOW | {"sessions": False}, 1, QUESTIONS)
    assert min(map(min, run["recomputed"][1:])) > 150
    return {"model": model, "answers": run["answers"]}


def _turns(
    model: Any,
    policy: dict[str, Any],
    ranks: int,
    questions: list[int],
    histories: Any = None,
    drafter: Any = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    arguments = {
        "model": str(model),
        "ranks": ranks,
        "policy": policy,
        "questions": questions,
        "histories": histories,
        "drafter": drafter,
        "folder": None if folder is None else str(folder),
    }
    return run_scenario("scenarios_parallel:turns", arguments, timeout=900)


def _converse(
    model: Any,
    policy: dict[str, Any],
    sizes: tuple[int, ...],
    folder: Path,
    drafter: Any = None,
) -> list[dict[str, Any]]:
    """Each turn in an engine of its own, with another number of ranks.

    Every turn after the first one continues sessions, and computes only what is new:
    the last token of an answer, which its engine has only sampled, and the question.
    """
    runs: list[dict[str, Any]] = []
    for ranks, question in zip(sizes, QUESTIONS, strict=False):
        histories = runs[-1]["histories"] if runs else None
        runs.append(
            _turns(model, policy, ranks, [question], histories, drafter, folder)
        )
        assert runs[-1]["held"] == [0] * ranks
        assert runs[-1]["counts"]["failures"] == 0
        assert runs[-1]["counts"]["hits"] == (len(LENGTHS) if histories else 0)
        assert max(runs[-1]["recomputed"][0]) <= 1
    return runs


def _answers(runs: list[dict[str, Any]]) -> list[list[list[int]]]:
    """By conversation and turn."""
    by_run = [run["answers"] for run in runs]
    return [list(chain(*answers)) for answers in zip(*by_run, strict=True)]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("place", CHAINS)
def test_a_conversation_goes_on_with_another_number_of_ranks(
    conversed: Any, tmp_path: Path, place: str
):
    """Tokens are those of recomputing. Files of the other size stay as they are."""
    sizes = CHAINS[place]
    store = str(tmp_path) if place == "session_dir" else f"file://{tmp_path}"
    patience = {"session_lookup_s": 30, "session_load_s": 60}
    policy = FLOW | {place: store} | (patience if place == "session_url" else {})
    runs = _converse(conversed["model"], policy, sizes, tmp_path)
    expected = [answers[: len(sizes)] for answers in conversed["answers"]]
    assert _answers(runs) == expected
    (folder,) = tmp_path.iterdir()
    written = [path.name.rsplit("of", 1)[1] for path in folder.iterdir()]
    for ranks in set(sizes):
        files = len(LENGTHS) * ranks * sizes.count(ranks)
        assert written.count(f"{ranks}.safetensors") == files


@pytest.mark.timeout(3000)
def test_draft_layers_go_on_with_another_number_of_ranks(
    conversed: Any, tmp_path: Path
):
    """A copy keeps what the model keeps, so all its drafts are right after a session,
    too."""
    model, policy = conversed["model"], FLOW | {"session_dir": str(tmp_path)}
    runs = _converse(model, policy, (2, 1), tmp_path, drafter(model))
    assert _answers(runs) == [answers[:2] for answers in conversed["answers"]]
    for run in runs:
        assert run["accepted"]["accepted"] == run["accepted"]["drafts"] > 0
