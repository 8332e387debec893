"""The evidence benchmark: prompts, budgets, forced tokens, cells and tables."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, ClassVar

import _evidence_speed
import evidence
import pytest
import torch
from _docs_evidence import verdict_of
from _evidence_compare import comparison
from _evidence_engine import ForcedTokens
from _evidence_report import (
    OTHER_TITLES,
    TITLES,
    cells_of,
    complete,
    speed_tables,
    tables,
)
from _evidence_samples import READ, Prompt, conversation, reference_file, windows
from _evidence_speed import SpeedRounds
from _evidence_tasks import other_tasks
from _evidence_verdicts import comparisons, holm, sign_test
from _prefill_store import Prefill, PrefillStore
from _quality_fit import fit, held_tokens
from _quality_rows import Job
from _quality_samples import Sample

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies import available_policies

GEOMETRY = Geometry(block_size=32, num_layers=4, num_kv_heads=2, kv_bytes_per_token=512)


class CharacterTokenizer:
    """One token per character; messages end with "|"."""

    def apply_chat_template(
        self, messages: list[dict[str, str]], **options: Any
    ) -> list[int]:
        texts = [f"{m['role'][0]}:{m['content']}|" for m in messages]
        if options.get("continue_final_message"):
            texts[-1] = texts[-1][:-1]
        if options.get("add_generation_prompt"):
            texts.append("a:")
        return [ord(character) for character in "".join(texts)]


@pytest.mark.parametrize("opening", ["", "The number is"])
def test_the_text_is_the_first_turn_and_the_question_the_second(opening):
    content = "Remember 5. What is the sky?\nWhat is the number?"
    sample = Sample(
        "multikey",
        "s",
        "contains",
        ("5",),
        messages=({"role": "user", "content": content},),
        opening=opening,
        group="g",
    )
    prompt = conversation(sample, CharacterTokenizer())
    text = "".join(map(chr, prompt.token_ids))
    first = f"u:Remember 5. What is the sky?|a:{READ}|"
    assert text[: prompt.turn_end] == first
    end = f"a:{opening}" if opening else "a:"
    assert text[prompt.turn_end :] == f"u:What is the number?|{end}"
    assert prompt.group == "g"
    assert prompt.patched_prompt == list(prompt.token_ids[: len(prompt.patched_prompt)])
    assert 0 < len(prompt.patched_prompt) <= prompt.turn_end


def test_windows_are_disjoint_and_take_one_of_each_text_first():
    texts = [("a", list(range(7))), ("b", list(range(10, 13))), ("c", [20])]
    assert list(windows(texts, 3)) == [
        ("a", "a#0", [0, 1, 2]),
        ("b", "b#0", [10, 11, 12]),
        ("a", "a#1", [3, 4, 5]),
    ]


def test_stock_computes_lost_log_probabilities_again(tmp_path):
    text = Prompt("kl", "a.txt#0", "a.txt", (1, 2), 1, forced=(3,))
    question = Prompt("passkey", "0", "0", (1, 2), 1)
    prompts = [question, text]
    stock, policy = Job({}, None, "stock"), Job({"name": "snapkv"}, 0.1, "snapkv")
    done = {
        (j.label, j.share, p.task, p.name) for j in (stock, policy) for p in prompts
    }
    assert evidence.missing_prompts(stock, prompts, done, tmp_path) == [
        ["kl", "a.txt#0"]
    ]
    assert evidence.missing_prompts(policy, prompts, done, tmp_path) == []
    reference_file(tmp_path, text.name).touch()
    assert evidence.missing_prompts(stock, prompts, done, tmp_path) == []
    store = PrefillStore(tmp_path, "tiny", "float32")
    assert len(evidence.missing_prompts(stock, prompts, done, tmp_path, store)) == 2
    assert evidence.missing_prompts(policy, prompts, done, tmp_path, store) == []
    store.path(text.token_ids).touch()
    assert evidence.missing_prompts(stock, prompts, done, tmp_path, store) == []


@pytest.mark.parametrize(
    ("name", "setting"),
    [("snapkv", "budget"), ("epicache", "budget"), ("flowkv", "ratio")],
)
def test_budgets_are_fitted_in_the_unit_that_the_policy_takes(name, setting):
    policy = fit({"name": name}, 0.3, 4000, GEOMETRY)
    value = policy[setting]
    assert isinstance(value, int) == (name == "epicache")
    held = held_tokens(policy, 4000, GEOMETRY)
    assert 0.2 * 4000 < held <= 0.3 * 4000 + 64
    parse_policy(policy)


def test_every_policy_is_measured_and_retrievers_offload_all_layers():
    policies = evidence.all_policies()
    assert tuple(sorted(policy["name"] for policy in policies)) == available_policies()
    for policy in policies:
        parsed = parse_policy(dict(policy))
        if parsed.retrieval is not None:
            assert parsed.retrieval.skip_layers == 0
    # Also where it is named, unless its settings are, too.
    assert evidence.with_settings({"name": "icecache"}) in policies
    other = {"name": "icecache", "budget": 64}
    assert evidence.with_settings(other) == other


def test_forced_tokens_are_sampled_and_distributions_are_recorded():
    processor = ForcedTokens(None, torch.device("cpu"), False)
    assert not processor.is_argmax_invariant()
    ForcedTokens.answers["text"] = [7, 2]
    free = SimpleNamespace(extra_args={"turn_ends": [4]})
    forced = SimpleNamespace(extra_args={ForcedTokens.ARGUMENT: "text"})
    output: list[int] = []
    added = [(0, free, [1, 2], []), (1, forced, [1, 2], output)]
    processor.update_state(SimpleNamespace(added=added, removed=[], moved=[]))
    processor.update_state(None)
    logits = torch.randn(2, 10)
    # vLLM discards the token that it samples after a chunk of the prompt.
    assert int(processor.apply(logits + 1 + torch.arange(10))[1].argmax()) == 7
    for token in (7, 2):
        result = processor.apply(logits.clone())
        assert torch.equal(result[0], logits[0])
        assert int(result[1].argmax()) == token
        assert int((result[1] > -torch.inf).sum()) == 1
        output.append(token)
    assert torch.equal(processor.apply(logits.clone()), logits)
    recorded = ForcedTokens.recorded.pop("text")
    assert sorted(recorded) == [0, 1]
    for step in recorded.values():
        torch.testing.assert_close(step, logits[1].log_softmax(-1))


def test_recorded_prompts_are_found_by_model_dtype_and_tokens(tmp_path):
    store = PrefillStore(tmp_path, "/models/tiny", "float32")
    prefill = Prefill(torch.rand(2, 3, 4), torch.rand(2, 2, 3, 2), torch.rand(3, 5))
    store.save([1, 2, 3], prefill)
    again = PrefillStore(tmp_path, "/elsewhere/tiny", "float32")
    found = again.recorded([[1, 2, 3], [1, 2, 4]])
    assert list(found) == [(1, 2, 3)]
    assert torch.equal(found[1, 2, 3].kv, prefill.kv)
    assert torch.equal(found[1, 2, 3].queries, prefill.queries)
    assert torch.equal(found[1, 2, 3].hidden, prefill.hidden)
    for model, dtype in (("tiny", "bfloat16"), ("other", "float32")):
        assert not PrefillStore(tmp_path, model, dtype).recorded([[1, 2, 3]])


def test_rounds_of_speed_that_have_rows_are_not_repeated():
    job = Job({"name": "snapkv"}, 0.1, "snapkv")
    done = {("snapkv", 0.1, evidence.SPEED, "round 1")}
    assert evidence.missing_rounds(job, 3, done) == [0, 2]
    assert evidence.missing_rounds(job, 0, done) == []
    assert evidence.missing_rounds(Job({}, None, "stock"), 3, set()) == []


class TimedEngine:
    """Takes 100 ms to the first token and 10 ms per token; a policy twice as long."""

    log: ClassVar[list[str]] = []
    remembered: ClassVar[int] = 0

    def __init__(self, policy, **engine):
        self.name = policy["name"] if policy else "stock"
        self.slow = 2 if policy else 1
        self.log.append(f"open {self.name}")
        # each round computes all of it
        assert engine["enable_prefix_caching"] is False
        assert policy is None or policy["sessions"] is False

    def ask(self, command, prompt, turn_ends, max_tokens):
        assert command == "turn"
        if len(prompt) > 200:  # no warm-up
            self.log.append(f"{self.name} {turn_ends}")
        times = [self.slow * (100.0 + 10.0 * i) for i in range(max_tokens)]
        computed = len(prompt) - self.remembered
        return {"first_ms": times[0], "token_ms": times, "computed": computed}

    def close(self):
        self.log.append(f"close {self.name}")


def test_policies_and_stock_take_turns_in_rounds_of_speed(monkeypatch):
    monkeypatch.setattr(_evidence_speed, "EngineProcess", TimedEngine)
    monkeypatch.setattr(_evidence_speed, "engine_options", lambda *a, **k: {})
    monkeypatch.setattr(TimedEngine, "log", [])
    prompt = Prompt("passkey", "p", "p", tuple(range(300)), 250)
    setting = SimpleNamespace(model="tiny")
    with SpeedRounds(setting, prompt, 1024) as rounds:
        first = list(rounds.of({"name": "snapkv"}, [0, 1]))
        list(rounds.of({"name": "flowkv"}, [2]))
    assert [row["sample"] for row in first] == ["round 0", "round 1"]
    for row in first:
        assert (row["first_token_ms"], row["stock_first_token_ms"]) == (200.0, 100.0)
        assert (row["score"], row["stock_tokens_per_s"]) == (50.0, 100.0)
    assert TimedEngine.log == [
        "open stock",
        *("open snapkv", "stock []", "snapkv []", "snapkv []", "stock []"),
        "close snapkv",
        *("open flowkv", "stock []", "flowkv [250]", "close flowkv"),
        "close stock",
    ]


def test_a_round_that_computes_a_part_of_its_prompt_is_an_error(monkeypatch):
    monkeypatch.setattr(_evidence_speed, "EngineProcess", TimedEngine)
    monkeypatch.setattr(_evidence_speed, "engine_options", lambda *a, **k: {})
    monkeypatch.setattr(TimedEngine, "remembered", 200)
    prompt = Prompt("passkey", "p", "p", tuple(range(300)), 250)
    with (
        SpeedRounds(SimpleNamespace(model="tiny"), prompt, 1024) as rounds,
        pytest.raises(RuntimeError, match="100 of 300"),
    ):
        list(rounds.of({"name": "snapkv"}, [0]))


@pytest.fixture
def rows_file(tmp_path):
    settings = {"model": "tiny", "seed": 0, "dtype": "float32"}
    source = {"machine": "a CPU", "torch": "2", "commit": "abc", "command": "run it"}
    lines: list[dict[str, Any]] = [{"header": {"settings": settings, "source": source}}]
    common = {"label": "snapkv", "share": 0.1, "commit": "abc"}
    common["policy"] = {"name": "snapkv", "budget": 0.1}
    lines += [
        common
        | {"task": "passkey", "sample": f"{number}", "group": f"{number}"}
        | {"score": float(number > 0), "resident_bytes": 1 << 20}
        | {"peak_bytes": 2 << 20, "host_bytes": 3 << 20}
        for number in range(4)
    ]
    lines += [
        common
        | {"task": "speed", "sample": f"round {i}", "group": "", "score": rate}
        | {"first_token_ms": 100.0 + i}
        | {"stock_tokens_per_s": 5.0, "stock_first_token_ms": 50.0}
        for i, rate in enumerate((10.0, 12.0, 11.0))
    ]
    refused = {"label": "sekv", "share": 0.05, "commit": "abc", "task": ""}
    lines.append(refused | {"policy": {"name": "sekv"}, "sample": "", "refused": "no"})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_cells_carry_scores_memory_and_speed(rows_file):
    model = cells_of(rows_file)
    cell, refused = model["cells"]
    assert cell["passkey"]["scores"] == [0.0, 1.0, 1.0, 1.0]
    assert cell["passkey"]["mean"] == 0.75
    assert cell["passkey"]["low"] < 0.75 <= cell["passkey"]["high"]
    assert cell["device_bytes"] == 1 << 20
    assert cell["peak_device_bytes"] == 2 << 20
    assert cell["host_bytes"] == 3 << 20
    assert cell["tokens_per_s"] == [10.0, 12.0, 11.0]
    assert refused["refused"] == "no"
    assert "passkey" not in refused


def test_tables_have_a_line_per_policy_and_say_what_cannot_run(rows_file):
    table = tables([cells_of(rows_file)])
    (scores,) = (x for x in table.splitlines() if x.startswith("| snapkv"))
    memory, speed = "– · 1.0 | – · 3.0", "– · 2.02 | – · 2.20"
    assert scores == f"| snapkv | – · 3 | – | – | {memory} | {speed} |"
    assert "- `sekv` cannot run at 5 %: it no." in table


def test_speed_has_a_table_per_share_with_spreads_next_to_stock(rows_file):
    model = cells_of(rows_file)
    lines = speed_tables([model]).splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "### tiny, 10 % of the context"
    ]
    (speed,) = (line for line in lines if line.startswith("| snapkv"))
    first = "101 (100..102) | 2.02 (2.00..2.04)"
    assert speed == f"| snapkv | {first} | 11.0 (10.0..12.0) | 2.20 (2.00..2.40) |"


def test_cells_with_few_samples_can_be_left_out(rows_file):
    model = cells_of(rows_file)
    assert len(complete(model, 4)["cells"]) == 2
    (refused,) = complete(model, 5)["cells"]
    assert refused["refused"] == "no"


def test_a_task_without_all_samples_is_no_part_of_a_cell(rows_file):
    """Cells are compared sample by sample, in the order of the model's samples."""
    row = {"label": "tova", "share": 0.1, "commit": "abc", "policy": {"name": "tova"}}
    row |= {"task": "passkey", "sample": "1", "group": "1", "score": 1.0}
    with rows_file.open("a") as file:
        file.write(json.dumps(row) + "\n")
    model = cells_of(rows_file)
    assert [cell["label"] for cell in model["cells"]] == ["snapkv", "sekv"]
    assert model["samples"]["passkey"] == [[str(i), str(i)] for i in range(4)]
    assert model["unfinished"] == ["tova at 10 %: pass key found 1 of 4"]


def test_rows_of_several_settings_are_named(rows_file):
    text = rows_file.read_text()
    head, _, tail = text.rpartition('"budget": 0.1')
    rows_file.write_text(f'{head}"budget": 0.2{tail}')
    (mixed,) = cells_of(rows_file)["mixed"]
    assert mixed.startswith("snapkv at 10 %")
    assert "0.1" in mixed
    assert "0.2" in mixed


# -- verdicts ------------------------------------------------------------------------


def test_the_sign_test_is_exact():
    """Two-sided binomial probabilities, by hand."""
    assert sign_test(0, 0) == 1
    assert sign_test(3, 3) == 1
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(1, 7) == pytest.approx(2 * (1 + 8) / 256)


def test_holm_stops_at_the_first_that_does_not_survive():
    assert holm([0.01, 0.04, 0.03]) == [True, False, False]
    assert holm([0.02, 0.001, 0.04]) == [True, True, True]
    assert holm([]) == []


def cell(
    name: str, found: list[int], share: float | None = 0.1, num_bytes: int = 100
) -> dict[str, Any]:
    score = {"samples": len(found), "mean": sum(found) / len(found), "scores": found}
    policy = {} if name == "stock" else {"name": name}
    common = {"label": name, "share": share, "policy": policy, "passkey": score}
    return common | {"device_bytes": num_bytes, "host_bytes": 0}


def model_of(*cells: dict[str, Any], contexts: int = 20) -> dict[str, Any]:
    groups = [[str(i), str(i % contexts)] for i in range(20)]
    samples = {"passkey": groups, "multikey": [], "kl": []}
    settings = {"tokens": 2000, "block_size": 32}
    return {"model": "m", "settings": settings, "samples": samples, "cells": [*cells]}


GOOD, BAD = [1] * 18 + [0, 0], [0] * 18 + [1, 0]


def test_a_difference_on_the_same_samples_is_shown():
    model = model_of(cell("tova", GOOD), cell("snapkv", BAD), cell("random", GOOD))
    snapkv, random = comparisons([model], "tova")
    assert (snapkv.baseline, snapkv.shown) == ("snapkv", "better")
    assert (snapkv.better, snapkv.worse) == (18, 1)
    assert (random.baseline, random.shown) == ("random", "")
    own = [test.baseline for test in comparisons([model], "snapkv")]
    assert own == ["random"], "not with itself, and not with tova"


@pytest.mark.parametrize(("more", "shown"), [(109, "better"), (111, "")])
def test_more_memory_is_no_merit(more, shown):
    model = model_of(cell("tova", GOOD, num_bytes=more), cell("snapkv", BAD))
    (test,) = comparisons([model], "tova")
    assert test.shown == shown


@pytest.mark.parametrize(("less", "shown"), [(92, "worse"), (89, "")])
def test_less_memory_excuses_a_loss_but_not_against_stock(less, shown):
    stock = cell("stock", GOOD, share=None, num_bytes=1000)
    model = model_of(cell("tova", BAD, num_bytes=less), cell("snapkv", GOOD), stock)
    snapkv, against_stock = comparisons([model], "tova")
    assert snapkv.shown == shown
    assert against_stock.shown == "worse"


def test_questions_about_one_context_count_once():
    model = model_of(cell("tova", GOOD), cell("snapkv", BAD), contexts=10)
    (test,) = comparisons([model], "tova")
    assert test.better + test.worse <= 10
    few = model_of(cell("tova", GOOD), cell("snapkv", BAD), contexts=5)
    assert comparisons([few], "tova") == []


def test_many_tests_need_more_evidence():
    """Nine against two differ alone, p = 0.065 is not enough; ten against one is."""
    ten = [1] * 10 + [0] * 10
    one = [0] * 10 + [1] + [0] * 9
    alone = model_of(cell("tova", ten), cell("snapkv", one))
    assert [t.shown for t in comparisons([alone], "tova")] == ["better"]
    shares = [0.01 * i for i in range(1, 7)]
    many = model_of(
        *(cell("tova", ten, share) for share in shares),
        *(cell("snapkv", one, share) for share in shares[:1]),
        *(cell("snapkv", ten, share) for share in shares[1:]),
    )
    assert {t.shown for t in comparisons([many], "tova")} == {""}


def test_a_verdict_says_what_was_not_measured():
    model = model_of(cell("tova", GOOD), cell("snapkv", BAD))
    lines = verdict_of([model], "tova").splitlines()
    assert "| model | held | `tova` | `snapkv` |" in lines
    assert "| m | 10 % | 18 | 1 ▲ |" in lines
    assert "| m | 10 % | 1 | – |" not in lines
    assert verdict_of([model], "h2o") == "**Verdict.** Not measured yet.\n"
    refused = {"label": "h2o", "share": 0.1, "policy": {"name": "h2o"}}
    model["cells"].append(refused | {"refused": "holds 9 tokens, more than 3"})
    assert "it holds 9 tokens." in verdict_of([model], "h2o")


# -- settings against one of them --------------------------------------------------


def test_settings_are_compared_with_one_of_them_on_the_same_samples():
    far, near = [0.3] * 20, [0.3] * 10 + [0.1] * 10
    cells = [cell("protokv", BAD), cell("protokv window=64", GOOD)]
    for one, scores in zip(cells, (far, near), strict=True):
        one["kl"] = {"samples": 20, "mean": sum(scores) / 20, "scores": scores}
    model = model_of(*cells, cell("stock", GOOD, share=None))
    model["samples"]["kl"] = model["samples"]["passkey"]
    title, *lines = [x for x in comparison(model, "protokv").splitlines() if x]
    assert "pass keys 6 of 20 contexts (30 points), KL 6 of 20" in lines.pop()
    assert title == "At 10 %, against `protokv`:"
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in lines]
    head, _, base, other = rows
    assert head[:3] == ["settings", "pass keys", "better, worse, p"]
    assert base[:4] == ["**`protokv`**", "1 of 20", "", "0.300"]
    assert other[:4] == ["`protokv window=64`", "18 of 20", "18, 1, 7.6e-05", "0.200"]
    assert other[4].startswith("-0.100 (-0.1"), "the mean gap, and its interval"
    assert other[5] == "10, 0, 0.002"


def test_few_contexts_are_not_tested():
    model = model_of(cell("a", BAD), cell("b", GOOD), contexts=5)
    table = comparison(model, "a")
    assert "| 18 of 20 | – |" in table
    assert "Too few contexts for a test." in table


def test_an_unknown_reference_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match="'c'; there are a, b"):
        comparison(model_of(cell("a", BAD), cell("b", GOOD)), "c")


# -- tasks that nothing is chosen by -----------------------------------------------


def rows_of(label: str, task: str, scores: list[float]) -> list[dict[str, Any]]:
    is_stock = label == "stock"
    common = {"label": label, "share": None if is_stock else 0.1, "commit": "abc"}
    common["policy"] = {} if is_stock else {"name": label}
    common |= {"resident_bytes": 1 << 20, "peak_bytes": 1 << 20, "host_bytes": 0}
    return [
        common | {"task": task, "sample": f"{i}", "group": f"{i}", "score": score}
        for i, score in enumerate(scores)
    ]


@pytest.fixture
def other_rows(rows_file):
    """Eight samples of two tasks; ``tova`` lacks one of them."""
    half, whole = [0.5] * 8, [1.0] * 8
    rows = [
        *rows_of("h2o", "variables", [0.0] * 8),
        *rows_of("h2o", "multivalue", [0.25] * 4 + [0.75] * 4),
        *rows_of("stock", "variables", half),
        *rows_of("stock", "multivalue", whole),
        *rows_of("snapkv", "variables", half),
        *rows_of("snapkv", "multivalue", half),
        *rows_of("tova", "variables", whole),
    ]
    with rows_file.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows_file


def test_other_tasks_are_shares_of_stock_s_mean(other_rows):
    table = other_tasks(cells_of(other_rows, OTHER_TITLES)).splitlines()
    head, _, *rows = ([x.strip() for x in row.split("|")[1:-1]] for row in table)
    assert head[1:3] == ["four values", "variables"]
    assert [row[0] for row in rows] == ["`stock`", "`snapkv`", "`h2o`"]
    assert [row[3] for row in rows] == ["0.75", "0.50", "0.25"]
    assert rows[1][4] == "67% (67% to 67%)"
    assert rows[2][4].startswith("33% (")
    assert rows[2][4] != "33% (33% to 33%)"


def test_other_tasks_are_compared_by_their_means(other_rows):
    model = cells_of(other_rows, [*TITLES, *OTHER_TITLES])
    text = comparison(model, "h2o")
    assert "| `snapkv` | 0.50 | 4, 4, 1 | 0.50 | 8, 0, 0.0078 |" in text
    assert "four values" not in tables([cells_of(other_rows)])
