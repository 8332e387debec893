"""Logprobs, parallel samples, structured output and LoRA adapters under policies."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from architectures import write, write_adapter, write_merged
from harness import run_scenario
from policy_settings import SMALL_BUDGETS, configure
from scenarios_architectures import MAX_TOKENS, PROMPT, REGEX, SCHEMA

pytestmark = pytest.mark.engine

SEED = 7
MODEL = "Qwen3"
ADAPTERS = {"a": 21, "b": 22}  # name -> seed
SETTINGS = SMALL_BUDGETS | {"skip_layers": 0}
NAMES = ("full", "snapkv", "icecache")
POLICIES = {name: configure(name, SETTINGS) for name in NAMES}
DROPS = "snapkv"


# -- logprobs, parallel samples, structured output ---------------------------------


@functools.cache
def asked() -> dict[str, Any]:
    """Policy -> kind of request, and round -> output."""
    print("seed of the model", SEED)
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = run_scenario(
            "scenarios_architectures:requests",
            {
                "model": str(write(MODEL, Path(folder, "model"), SEED)),
                "policies": {"stock": None, **POLICIES},
            },
        )
    return result


def outputs(name: str) -> dict[str, Any]:
    run: dict[str, Any] = asked()[name]
    assert "error" not in run, run["error"]
    assert run["left"] == 0
    return run


def both(name: str, kind: str) -> list[dict[str, Any]]:
    """A policy's outputs without and with a prefix hit, which are equal."""
    first, second = outputs(name)[f"{kind}-0"], outputs(name)[f"{kind}-1"]
    assert first["tokens"] == second["tokens"]
    assert first["texts"] == second["texts"]
    return [first, second]


def check_stock(name: str, kind: str) -> None:
    """Tokens of ``full`` are stock's."""
    if name == "full":
        stock, run = outputs("stock"), outputs(name)
        assert run[f"{kind}-0"]["tokens"] == stock[f"{kind}-0"]["tokens"]


@pytest.mark.proves(request="logprobs", policy="name")
@pytest.mark.parametrize("name", NAMES)
def test_logprobs(name):
    """Logprobs of the answer belong to its tokens; `full` has stock's."""
    check_stock(name, "logprobs")
    for output in both(name, "logprobs"):
        ((tokens,), (entries,)) = output["tokens"], output["logprobs"]
        assert len(tokens) == len(entries) == 8
        for token, entry in zip(tokens, entries, strict=True):
            assert len(entry) == 3
            assert entry[str(token)] == max(entry.values()) < 0
    if name == "full":
        same_numbers(name, "logprobs", "logprobs")


@pytest.mark.proves(request="prompt_logprobs", policy="name")
@pytest.mark.parametrize("name", NAMES)
def test_prompt_logprobs(name):
    """Policies that act after the prompt change no logprob of it."""
    check_stock(name, "prompt_logprobs")
    same_numbers(name, "prompt_logprobs", "prompt_logprobs")
    for output in both(name, "prompt_logprobs"):
        assert len(output["prompt_logprobs"]) == PROMPT - 1


def same_numbers(name: str, kind: str, field: str) -> None:
    """Logprobs equal stock's, up to rounding."""
    for turn in range(2):
        ours, stock = (outputs(who)[f"{kind}-{turn}"][field] for who in (name, "stock"))
        pairs = list(zip(flat(ours), flat(stock), strict=True))
        assert len(pairs) >= 8
        for our, other in pairs:
            assert our == pytest.approx(other, abs=1e-3)


def flat(entries: list[Any]) -> list[dict[str, float]]:
    """Entries of all samples."""
    nested = entries and isinstance(entries[0], list)
    return [entry for sample in entries for entry in sample] if nested else entries


@pytest.mark.proves(request="n = 3, with a seed", policy="name")
@pytest.mark.parametrize("name", NAMES)
def test_parallel_samples(name):
    """Samples differ, and a seed gives the same ones again."""
    check_stock(name, "samples")
    for output in both(name, "samples"):
        assert len({tuple(tokens) for tokens in output["tokens"]}) == 3


@pytest.mark.proves(request="structured output", policy="name")
@pytest.mark.parametrize("name", NAMES)
def test_structured_output(name):
    """Answers match a regular expression and a JSON schema."""
    for kind in ("regex", "json"):
        check_stock(name, kind)
    for output in both(name, "regex"):
        assert re.fullmatch(REGEX, output["texts"][0])
    for output in both(name, "json"):
        answer = json.loads(output["texts"][0])
        assert set(answer) == set(SCHEMA["required"])
        assert answer["unit"] in SCHEMA["properties"]["unit"]["enum"]
        assert re.fullmatch(SCHEMA["properties"]["name"]["pattern"], answer["name"])


def test_the_policy_acted_on_these_requests():
    assert outputs(DROPS)["compactions"] >= 14, "two rounds of seven sequences"
    for name in NAMES:
        assert outputs(name)["tracked"] == outputs(name)["unscored"] == 0


# -- LoRA --------------------------------------------------------------------------


@functools.cache
def adapted() -> dict[str, Any]:
    """Policy -> tokens with two adapters, and those of models with merged weights."""
    print("seeds", SEED, ADAPTERS)
    policies = {"stock": None, **POLICIES, DROPS: POLICIES[DROPS] | {"sessions": True}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write(MODEL, folder / "model", SEED)
        folders = {
            adapter: str(write_adapter(model, folder / adapter, seed))
            for adapter, seed in ADAPTERS.items()
        }
        result: dict[str, Any] = run_scenario(
            "scenarios_architectures:adapters",
            {"model": str(model), "folders": folders, "policies": policies},
        )
        result["merged"] = {
            adapter: run_scenario(
                "scenarios_architectures:plain",
                {
                    "model": str(write_merged(model, folder / f"m-{adapter}", seed)),
                    "policies": POLICIES,
                },
            )
            for adapter, seed in ADAPTERS.items()
        }
    return result


@pytest.mark.slow
@pytest.mark.proves(request="LoRA, two adapters at once", policy="name")
@pytest.mark.parametrize("name", NAMES)
def test_adapters_do_not_mix(name):
    """Each adapter gives the tokens of a model with merged weights, alone, together
    and after a prefix hit, and hits only its own prefix.
    """
    run, stock = adapted()[name], adapted()["stock"]
    assert "error" not in run, run["error"]
    tokens, cached = run["tokens"], run["cached"]
    if name == "full":
        assert {key: tokens[key] for key in stock["tokens"]} == stock["tokens"]
        assert {key: cached[key] for key in stock["cached"]} == stock["cached"]
    for adapter in ADAPTERS:
        expected = adapted()["merged"][adapter][name]["tokens"]
        assert len(expected) == MAX_TOKENS
        for when in ("together", "first", "again"):
            assert tokens[f"{adapter}-{when}"] == expected, when
    for adapter in ("base", *ADAPTERS):
        assert cached[f"{adapter}-first"] == 0, "the prefix of another adapter"
        assert cached[f"{adapter}-again"] > 0
    assert len({tuple(tokens[f"{n}-first"]) for n in ("base", *ADAPTERS)}) == 3
    assert run["left"] == run["tracked"] == run["unscored"] == 0


@pytest.mark.slow
def test_an_adapter_continues_only_its_own_sessions():
    """The conversation was with adapter a; b and the base model ask first."""
    assert adapted()[DROPS]["hits"] == [0, 0, 1]
