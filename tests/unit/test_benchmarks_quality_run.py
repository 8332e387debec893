"""A quality run: budgets, resuming from rows, intervals and the report."""

from __future__ import annotations

import csv
import io
import json
import random

import pytest

pytest.importorskip("transformers")
import _quality_fit as fit_module
import _quality_report as report_module
import _quality_rows as rows_module
import quality
from _quality_rows import Job
from _quality_samples import Sample, Setting, TaskError, Tokens
from _quality_stats import interval, summarise
from rich.console import Console
from typer.testing import CliRunner

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.plan.geometry import Geometry, Lengths

SETTING = Setting("m", "float32", 0, 4, 600, (200,), 4, 5, 2, 2, 3, 300)
GEOMETRY = Geometry(32, 24, 2, 1024)
HEADER = {
    "settings": {"seed": 0, "model": "m", "block_size": 32},
    "block_bytes": 320,
    "source": {"commit": "c1", "machine": "x", "torch": "2", "command": "python q"},
}


# -- budgets --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["snapkv", "streaming-llm", "quest", "exact-topk"])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_a_fitted_policy_holds_no_more_than_its_share(name, share):
    small = {"sinks": 4, "window": 16, "skip_layers": 0}
    policy = {"name": name} | (small if name in ("quest", "exact-topk") else {})
    for tokens in (1000, 2016, 2047, 4000):
        fitted = fit_module.fit(policy, share, tokens, GEOMETRY)
        held = parse_policy(dict(fitted)).plan(Lengths(tokens), GEOMETRY)
        held_tokens = 32 * held.resident_blocks(tokens)
        # whole pages beyond the requested budget, and the newest block
        assert share * tokens - 32 < held_tokens < share * tokens + 64, tokens
        assert fitted["budget"] <= share


def test_a_budget_is_the_largest_that_fits():
    policy = {"name": "quest"}
    fitted = fit_module.fit(policy, 0.2, 2000, GEOMETRY)
    limit = fit_module.most_held(0.2, 2000, GEOMETRY)
    assert fit_module.held_tokens(fitted, 2000, GEOMETRY) <= limit
    one_more = policy | {"budget": fitted["budget"] + 1.5 / 2000}
    assert fit_module.held_tokens(one_more, 2000, GEOMETRY) > limit


def test_what_a_retriever_holds_next_to_its_pages_counts():
    """Pages and means together hold no more than a share: fewer tokens are fetched."""
    plain = {"name": "exact-topk", "skip_layers": 0}
    budgets = []
    for mean_tokens in (0, 64, 16):
        policy = plain | {"mean_tokens": mean_tokens}
        fitted = fit_module.fit(policy, 0.2, 2000, GEOMETRY)
        parsed = parse_policy(dict(fitted))
        pages = parsed.plan(Lengths(2000), GEOMETRY).resident_blocks(2000) * 32
        means = parsed.device_bytes(2000, GEOMETRY) / GEOMETRY.kv_bytes_per_token
        assert pages + means <= fit_module.most_held(0.2, 2000, GEOMETRY)
        budgets.append(fitted["budget"])
    assert budgets == sorted(set(budgets), reverse=True)
    # its first layers alone exceed the budget
    with pytest.raises(KVPolicyError, match="of 2000 tokens however small"):
        fit_module.fit(policy, 0.05, 2000, GEOMETRY)


def test_jobs_are_stock_and_every_policy_at_every_budget():
    policies = [{}, {"name": "full"}, {"name": "snapkv"}]
    policies += [{"name": "tova", "budget": 64}, {"name": "quest"}]
    jobs = list(fit_module.jobs_of(policies, [0.05, 0.2], 2000, GEOMETRY))
    assert [(job.label, job.share) for job in jobs] == [
        ("stock", None),
        ("full", None),
        ("snapkv", 0.05),
        ("snapkv", 0.2),
        ("tova budget=64", None),
        ("quest", 0.05),
        ("quest", 0.2),
    ]
    assert jobs[2].policy == {"name": "snapkv", "budget": 0.05}
    assert [bool(job.problem) for job in jobs] == [False] * 5 + [True, False]
    with pytest.raises(KVPolicyError):
        list(fit_module.jobs_of([{"name": "snapkv", "no": 1}], [0.1], 2000, GEOMETRY))


def test_a_run_that_goes_on_keeps_its_budgets():
    before = row("quest", 0.2, "a", 1.0, policy={"name": "quest", "budget": 0.11})
    jobs = [Job({"name": "quest", "budget": b}, b, "quest") for b in (0.2, 0.3)]
    refused = {"label": "quest", "share": 0.3, "refused": "no", "policy": {}}
    again = quality.as_before(jobs, [before, refused])
    assert [job.policy["budget"] for job in again] == [0.11, 0.3]


# -- rows -----------------------------------------------------------------------


def row(label: str, share: float | None, sample: str, score: float, **more) -> dict:
    row = {"policy": {}, "share": share, "label": label, "task": "t", "sample": sample}
    row |= {"group": sample, "score": score, "prompt_tokens": 100, "commit": "c1"}
    return row | {"resident_bytes": 32000 if label == "stock" else 3200} | more


def test_a_file_goes_on_and_refuses_other_settings(tmp_path):
    out = tmp_path / "deep" / "q.jsonl"
    assert rows_module.open_rows(out, HEADER) == []
    rows_module.append(out, row("snapkv", 0.1, "a", 0.0))
    with out.open("a") as file:
        file.write('{"label": "cut off')
    rows_module.append(out, row("snapkv", 0.1, "b", 1.0))
    rows_module.append(out, row("snapkv", 0.1, "a", 1.0))  # a second time
    rows_read = rows_module.open_rows(out, HEADER)
    assert [(r["sample"], r["score"]) for r in rows_read] == [("a", 1.0), ("b", 1.0)]
    other = HEADER | {"settings": HEADER["settings"] | {"seed": 1}}
    with pytest.raises(TaskError, match="seed 0 there, 1 now"):
        rows_module.open_rows(out, other)
    later = HEADER | {"source": HEADER["source"] | {"commit": "c2"}}
    with pytest.raises(TaskError, match="rows of commit c1, this is c2"):
        rows_module.open_rows(out, later)
    assert len(rows_module.open_rows(out, later, mix_commits=True)) == 2
    (bad := tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(TaskError, match="does not begin with a header"):
        rows_module.read(bad)


def test_the_report_names_every_command_that_wrote_to_the_file(tmp_path):
    out = tmp_path / "rows.jsonl"
    rows_module.open_rows(out, HEADER)
    source = {**HEADER["source"], "command": "another"}
    for _ in range(2):
        rows_module.open_rows(out, {**HEADER, "source": source})
    header, _ = rows_module.read(out)
    assert header["commands"] == [HEADER["source"]["command"], "another"]
    assert "; another" in report_module.caption(header, [])[1]


def test_only_missing_answers_are_asked_for(tmp_path, monkeypatch):
    samples = [Sample("t", name, "letter", ("A",)) for name in "abc"]
    jobs = [Job({}, None, "stock"), Job({"name": "x"}, 0.1, "x")]
    jobs.append(Job({"name": "y"}, 0.1, "y", "too large"))
    calls: list[tuple[str, list[str]]] = []
    fail_after = [4]

    def fake(script, request, label):
        call = json.loads(request)
        names = [name for _, name in call["todo"]]
        calls.append((label, names))
        for name in names:
            if not fail_after[0]:
                raise RuntimeError("interrupted")
            fail_after[0] -= 1
            yield {"task": "t", "sample": name, "group": name, "score": 1.0}

    monkeypatch.setattr(quality, "child_rows", fake)
    monkeypatch.setattr(quality, "provenance", lambda: {"commit": "c1"})
    out, messages = tmp_path / "q.jsonl", []

    def go() -> list[str]:
        rows = rows_module.open_rows(out, HEADER)
        return quality.run_all(
            SETTING, ["t"], jobs, samples, 64, 4, out, rows, messages.append
        )

    failed = go()
    assert [line.partition(":")[0] for line in failed] == ["interrupted", "y at 0.1"]
    fail_after[0] = -1
    assert go() == ["y at 0.1: too large"]
    every = [("stock", ["a", "b", "c"]), ("x at 0.1", ["a", "b", "c"])]
    assert calls == [*every, ("x at 0.1", ["b", "c"])]
    go()
    assert len(calls) == 3
    _, rows = rows_module.read(out)
    assert report_module.refusals(rows) == ["y at 0.1: too large"]
    # without stock's rows, no other policy runs
    out.unlink()
    fail_after[0] = 1
    with pytest.raises(TaskError, match="stock vLLM failed: interrupted"):
        go()


def test_the_context_holds_the_longest_chat_and_its_answer():
    class Template:
        def encode(self, text: str) -> list[str]:
            return text.split()

        def apply_chat_template(self, talk, **how):
            assert how["continue_final_message"] is not how["add_generation_prompt"]
            messages = [word for turn in talk for word in turn["content"].split()]
            return messages + ["<turn>"] * (len(talk) + how["add_generation_prompt"])

    user = {"role": "user", "content": "w " * 100}
    samples = [
        Sample("t", "chat", "letter", (), messages=(user, user), max_tokens=50),
        Sample("t", "opened", "letter", (), messages=(user,), opening="I say"),
        Sample("t", "plain", "letter", (), prompt="one two"),
    ]
    lengths, context = quality.length_for(samples, Tokens(Template()))
    assert lengths == [200 + 3, 102 + 2, 2]
    assert 0 <= context - (203 + 50) < 32


# -- intervals ------------------------------------------------------------------


def test_intervals_are_seeded_and_draw_groups_together():
    rng = random.Random(3)
    values = [float(rng.random() < 0.5) for _ in range(100)]
    alone = [str(i) for i in range(100)]
    low, high = interval(values, alone, "a")
    mean = sum(values) / 100
    # a binomial's interval is about two deviations of 0.05 to either side
    assert mean - 0.13 < low < mean - 0.07 < mean + 0.07 < high < mean + 0.13
    assert interval(values, alone, "a") == (low, high)
    uneven = [rng.random() for _ in range(100)]
    assert interval(uneven, alone, "a") == interval(uneven, alone, "a")
    assert interval(uneven, alone, "a", seed=1) != interval(uneven, alone, "a")
    assert interval(uneven, alone, "b") != interval(uneven, alone, "a")
    # ten groups of equal samples tell as much as ten samples
    grouped = [float(i % 2) for i in range(10) for _ in range(10)]
    wide = interval(grouped, [str(i) for i in range(10) for _ in range(10)], "a")
    narrow = interval(grouped, alone, "a")
    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])


def test_all_right_is_no_certainty():
    low, high = interval([1.0] * 10, list("abcdefghij"), "a")
    assert (low, high) == (pytest.approx(0.722, abs=1e-3), pytest.approx(1.0))  # Wilson
    assert interval([0.0] * 4, list("aabb"), "a")[1] == pytest.approx(0.658, abs=1e-3)
    # the same for two groups, one right and one wrong: as for two samples
    half = interval([0.0, 1.0, 1.0, 0.0], list("aabb"), "a")
    assert half == (pytest.approx(0.095, abs=1e-3), pytest.approx(0.905, abs=1e-3))
    assert interval([0.3, 0.3], list("ab"), "a") is None


# -- report ---------------------------------------------------------------------


def rows_of_a_run() -> list[dict]:
    rows = [row("stock", None, name, 1.0) for name in "abcd"]
    rows += [
        row("snapkv", 0.1, n, s) for n, s in zip("abcd", (1, 1, 0, 0), strict=True)
    ]
    twice = {"resident_bytes": 6400}
    rows += [row("snapkv", 0.2, name, 1.0, **twice) for name in "abcd"]
    # requested a tenth, holds a quarter
    rows += [row("greedy", 0.1, name, 1.0, resident_bytes=8000) for name in "abcd"]
    rows.append(
        {"label": "quest", "share": 0.1, "task": "", "sample": "", "refused": "no"}
    )
    return rows


def test_records_have_the_difference_to_stock_and_the_bytes():
    records = summarise(rows_of_a_run())
    stock, first, second, greedy = records
    assert (stock["method"], stock["score"], stock["vs_stock"]) == ("stock", 1.0, None)
    assert (first["share"], first["score"], first["vs_stock"]) == (0.1, 0.5, -0.5)
    assert first["vs_stock_low"] < -0.5 < first["vs_stock_high"]
    assert (first["resident_bytes"], first["resident_share"]) == (3200, 0.1)
    assert (second["vs_stock"], second["vs_stock_low"]) == (0.0, None)
    assert greedy["resident_share"] == 0.25


def test_methods_stand_side_by_side_at_equal_bytes():
    records = summarise(rows_of_a_run())
    table = report_module.side_by_side(records, HEADER)
    head, stock, snapkv, greedy = table
    assert head == ["method", "10%", "20%", "more", "samples"]
    assert stock[1:3] == ["–", "–"]
    assert stock[3].startswith("1.000")
    assert snapkv[1].startswith("0.500")
    assert snapkv[1].endswith("@ 10.0%")
    assert snapkv[2].startswith("1.000")
    # a quarter is neither a tenth nor a fifth
    assert greedy[1:3] == ["–", "–"]
    # a row with a larger requested budget never counts as a smaller one
    modest = [r | {"share": 0.2} for r in records if r["share"] == 0.1]
    assert report_module.side_by_side(modest, HEADER)[0][1] == "20%"
    both = report_module.side_by_side([*modest, *records], HEADER)
    assert both[1][1].startswith("0.500")
    other = [r | {"method": "modest"} for r in modest]
    assert report_module.side_by_side([*other, *records], HEADER)[1][1] == "–"
    # two blocks of 2500 bytes are within rounding
    coarse = HEADER | {"block_bytes": 2500}
    assert report_module.side_by_side(records, coarse)[3][1].endswith("@ 25.0%")
    # and so is half of the generated tokens: 1000 tokens of 10 bytes
    wordy = [record | {"answer_tokens": 1000.0} for record in records]
    assert report_module.side_by_side(wordy, HEADER)[3][1].endswith("@ 25.0%")
    wordy = [record | {"answer_tokens": 400.0} for record in records]
    assert report_module.side_by_side(wordy, HEADER)[3][1] == "–"


def test_tables_and_files_of_a_run(tmp_path):
    out = tmp_path / "q.jsonl"
    rows_module.open_rows(out, HEADER)
    for each in rows_of_a_run():
        rows_module.append(out, each)
    console = Console(width=200, file=io.StringIO())
    files = tmp_path / "deep" / "r.csv", tmp_path / "r.md"
    report_module.report(*rows_module.read(out), console, *files)
    printed = console.file.getvalue()
    assert "quest at 0.1: no" in printed
    assert "commit c1: python q" in printed
    with files[0].open() as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == ["stock", "snapkv", "snapkv", "greedy"]
    text = files[1].read_text()
    assert "| method | 10% | 20% | more | samples |\n|---|---|---|---|---|" in text
    assert "quest at 0.1: no" in text
    assert "commit c1: python q" in text


def test_pictures_of_a_run(tmp_path):
    pytest.importorskip("matplotlib")
    from _quality_plots import draw

    rows = rows_of_a_run()
    for index, each in enumerate(rows[:-1]):
        rows.append(each | {"task": "needle", "place": {"tokens": 100, "depth": index}})
    files = draw(summarise(rows), rows, tmp_path)
    names = [
        f"{name}.{kind}"
        for name in ("t-bytes", "needle-bytes", "needle-map")
        for kind in ("png", "svg")
    ]
    assert [file.name for file in files] == names
    assert "snapkv" in (tmp_path / "t-bytes.svg").read_text()
    again = draw(summarise(rows), rows, tmp_path / "again")
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in again]


# -- the command line -------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "passkey,nothing"], "nothing"),
        (["--budgets", "0.1,2"], "--budgets are shares"),
        (["--budgets", "x"], "must be numbers"),
        (["--dtype", "int8"], "--dtype"),
        (["--policies", "snapkv,,"], "unknown"),
        (["--tasks", "ruler"], "give --ruler"),
    ],
)
def test_wrong_options_are_refused_first(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr(quality.Tokens, "of", classmethod(lambda cls, model: None))
    monkeypatch.setattr("_quality_samples.Tokens.of", classmethod(lambda c, m: None))
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "q.jsonl"
    arguments = ["run", str(tmp_path), "--out", str(out), *options]
    result = CliRunner().invoke(quality.app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in result.output
    assert not out.exists()
