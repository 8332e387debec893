"""Two and three tensor-parallel ranks give the same answers as one rank.

Ranks are processes connected by gloo. Each rank selects tokens for its own KV heads
without communication. With equal pages per head the selection equals that of one rank;
allocators that compare heads compare those of their rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_models import drafter, write_noisy_copy, write_pair
from harness import run_scenario
from policy_settings import configure
from scenarios_parallel import VOCABULARY
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
