"""The serving comparison: its arithmetic, its rows, its report and its load."""

from __future__ import annotations

import csv
import io
import json
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("aiohttp")
import _serving_bench as bench_module
import _serving_chat as chat_module
import _serving_metrics as metrics
import _serving_report as report_module
import _serving_rows as rows_module
from _serving_chat import ChatLoad, User, users_of
from _serving_metrics import Answer, Slo
from rich.console import Console

LOAD = ChatLoad(4000, 3, 2.0, 5, 3, 8)
POOL = rows_module.Pool("/models/m", 1000, 32, 2048, "auto", True, True)
SLO = Slo(500.0, 50.0)


# -- the load -------------------------------------------------------------------


def test_arrivals_are_a_poisson_process_of_the_rate():
    arrivals = np.array([user.arrival_s for user in users_of(LOAD, 4.0, 1)])
    gaps = np.diff(arrivals, prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 4.0, rel=0.05)
    # exponential gaps: their deviation equals their mean, and 1 - 1/e are below it
    assert gaps.std() == pytest.approx(1 / 4.0, rel=0.1)
    assert (gaps < 1 / 4.0).mean() == pytest.approx(1 - np.exp(-1), abs=0.03)


def test_think_times_have_their_mean():
    thinks = np.array([user.think_s for user in users_of(LOAD, 4.0, 1)])
    assert thinks.shape == (4000, 2)
    assert thinks.mean() == pytest.approx(2.0, rel=0.05)
    assert thinks.std() == pytest.approx(2.0, rel=0.1)


def test_users_are_seeded_and_the_rate_changes_only_when_they_come():
    few = ChatLoad(3, 3, 2.0, 5, 3, 8)
    users = users_of(few, 4.0, 1)
    assert users == users_of(few, 4.0, 1)
    assert users != users_of(few, 4.0, 2)
    slower = users_of(few, 2.0, 1)
    assert [u.talk for u in slower] == [u.talk for u in users]
    assert [u.think_s for u in slower] == [u.think_s for u in users]
    assert slower[2].arrival_s == pytest.approx(2 * users[2].arrival_s)
    assert [len(text.split()) for text in texts_of(users[0])] == [5, 3, 3]


def texts_of(user: User) -> list[str]:
    return [turn.messages[-1]["content"] for turn in user.talk.turns]


def test_texts_come_from_a_file(tmp_path):
    (file := tmp_path / "texts").write_text("One\nline.\n\n\n Two. \n")
    assert chat_module.paragraphs(file) == ["One\nline.", "Two."]
    load = ChatLoad(20, 2, 1.0, 5, 3, 8, str(file))
    arguments = {text for user in users_of(load, 1.0, 0) for text in texts_of(user)}
    assert arguments == {"One\nline.", "Two."}
    file.write_text("\n\n")
    with pytest.raises(ValueError, match="no text"):
        chat_module.paragraphs(file)


def test_every_cell_has_its_own_seed_and_policies_share_it():
    def cell(policy="", workload="chat", rate=1.0, repetition=0):
        config = {"name": policy} if policy else {}
        return rows_module.Cell(config, workload, rate, repetition)

    assert cell().seed(0) == cell("snapkv").seed(0)
    others = [cell(workload="random"), cell(rate=1.5), cell(repetition=1)]
    seeds = {other.seed(0) for other in others} | {cell().seed(0), cell().seed(1)}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**32 for seed in seeds)  # the range of numpy.random.seed


# -- figures --------------------------------------------------------------------


def answer(*token_s: float, tokens: int | None = None, error: str = "") -> Answer:
    """An answer to a request sent at second 10."""
    count = len(token_s) if tokens is None else tokens
    return Answer(10.0, list(token_s), count, 7, "", error)


def test_times_of_an_answer_by_hand():
    one = answer(10.5, 10.6, 10.9)
    assert one.ttft_ms == pytest.approx(500)
    assert one.itl_ms == pytest.approx([100, 300])
    assert one.tpot_ms == pytest.approx(200)
    assert answer(10.5).tpot_ms == 0.0
    assert answer(10.5).itl_ms == []
    # five tokens in three chunks: four gaps between tokens, two between chunks
    assert answer(10.5, 10.6, 10.9, tokens=5).tpot_ms == pytest.approx(100)


def test_chunks_without_a_token_have_no_time():
    def chunk(content: str | None, count: int) -> dict:
        choices = [] if content is None else [{"delta": {"content": content}}]
        usage = {"completion_tokens": count, "prompt_tokens": 9}
        return {"choices": choices, "usage": usage}

    result = Answer(0.0)
    # role, one token, half a character, two tokens at once, the totals
    chunks = [chunk("", 0), chunk("a", 1), chunk("", 2), chunk("bc", 4)]
    for second, each in enumerate([*chunks, chunk(None, 4)]):
        chat_module.take(result, each, float(second))
    assert result.token_s == [1.0, 2.0, 3.0]
    assert (result.tokens, result.text, result.prompt_tokens) == (4, "abc", 9)
    plain = Answer(0.0)  # a server that does not report running totals
    for second, text in enumerate(["", "a", "b"]):
        chat_module.take(plain, {"choices": [{"delta": {"content": text}}]}, second)
    assert (plain.tokens, plain.token_s) == (2, [1, 2])
    chat_module.take(plain, {"error": {"message": "out of memory"}}, 3.0)
    assert "out of memory" in plain.error


def test_goodput_counts_requests_that_meet_both_objectives():
    answers = [
        answer(10.5, 10.55),  # both exactly at the limit
        answer(10.501, 10.51),  # first token late
        answer(10.1, 10.2),  # tokens slow
        answer(10.1),  # a single token has no TPOT to violate
        answer(error="refused"),
    ]
    slo = Slo(500.0 + 1e-6, 50.0 + 1e-6)
    assert [a.meets(slo) for a in answers[:4]] == [True, False, False, True]
    figures = metrics.latency_figures(answers, 30.0, slo)
    assert figures["goodput_per_min"] == pytest.approx(4.0)
    assert (figures["completed"], figures["failed"]) == (4, 1)
    assert figures["output_throughput_tokens_per_s"] == pytest.approx(7 / 30)
    assert figures["request_throughput_per_s"] == pytest.approx(4 / 30)
    assert figures["input_tokens"] == 28
    # medians of 500 501 100 100 ms, and of 50 9 100 ms without the single token
    assert figures["p50_ttft_ms"] == pytest.approx(300)
    assert figures["p50_tpot_ms"] == pytest.approx(50)
    assert figures["p50_itl_ms"] == pytest.approx(50)
    assert figures["p99_itl_ms"] == pytest.approx(50 + 0.98 * 50)


def test_a_run_of_failures_has_no_latencies():
    figures = metrics.latency_figures([answer(error="x")], 1.0, SLO)
    assert figures["completed"] == 0
    assert not any(name.endswith("_ms") for name in figures)


TEXT = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:cache_config_info{block_size="32",num_gpu_blocks="101",x_num_gpu_blocks="7"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="a {b} c"} 0.25
vllm:num_preemptions_total{engine="0"} 3.0
vllm:num_preemptions_total{engine="1"} 2.0
vllm:num_preemptions_created{engine="0"} 1.7e+09
vllm:kv_policy_host_bytes{engine="0"} 1.048576e+06
vllm:time_to_first_token_seconds_bucket{le="0.1"} 4.0
"""


def test_metrics_are_read_from_prometheus_text():
    result = metrics.parse_metrics(TEXT)
    expected = {"blocks": 100.0, "usage": 0.25, "preemptions": 5.0}
    assert result == expected | {"host_bytes": 1048576.0}
    assert metrics.parse_metrics("nothing") == {}


def test_memory_counts_between_the_first_request_and_the_last_answer():
    def sample(at_s: float, usage: float, preemptions: float) -> dict[str, float]:
        queries = {"prefix_queries": 10 * preemptions, "prefix_hits": preemptions}
        gauges = {"at_s": at_s, "usage": usage, "host_bytes": 1000 * usage}
        return gauges | queries | {"blocks": 100.0, "preemptions": preemptions}

    samples = [sample(0.0, 0.9, 2.0), sample(1.0, 0.9, 2.0), sample(2.0, 0.2, 2.0)]
    samples += [sample(3.0, 0.6, 4.0), sample(9.0, 0.9, 5.0)]
    result = metrics.server_figures(samples, 1.5, 4.0)
    assert result["mean_held_blocks"] == pytest.approx(40)
    assert result["peak_held_blocks"] == 60
    # A gauge keeps the value of the last step, so the last sample counts for bytes.
    assert result["peak_host_bytes"] == 900
    assert result["preemptions"] == 3
    assert result["prefix_hit_share"] == pytest.approx(0.1)
    assert result["pool_blocks"] == 100
    assert result["samples"]["at_s"] == [0.5, 1.5]
    assert result["samples"]["held_blocks"] == [20, 60]
    assert metrics.server_figures([], 0.0, 1.0) == {}


def test_the_client_of_vllm_is_asked_for_what_is_reported():
    load = bench_module.BenchLoad(5, 100, 20)
    arguments = bench_module.bench_arguments("http://x", "m", load, 0.5, 3, SLO)
    pairs = dict(pairwise(arguments))
    assert pairs["--request-rate"] == "0.5"
    assert pairs["--metric-percentiles"] == "50,99"
    assert (pairs["--num-prompts"], pairs["--random-input-len"]) == ("5", "100")
    assert arguments[arguments.index("--goodput") + 1 :] == ["ttft:500.0", "tpot:50.0"]
    # either would put the first prompt into the prefix cache
    assert (pairs["--num-warmups"], pairs["--ready-check-timeout-sec"]) == ("0", "0")


# -- what is measured, and its rows ---------------------------------------------


def test_policies_are_names_and_json():
    text = 'stock, snapkv,{"name": "h2o", "budget": 64, "x": [1, 2]} ,full'
    assert rows_module.split_policies(text) == [
        {},
        {"name": "snapkv"},
        {"name": "h2o", "budget": 64, "x": [1, 2]},
        {"name": "full"},
    ]
    for wrong, why in {
        "snapkv,snapkv": "twice",
        '{"budget": 3}': "no 'name'",
        '{"name": "h2o"} full': "comma",
        " ": "no policy",
        '{"name": ': "Expecting value",
    }.items():
        with pytest.raises(ValueError, match=why):
            rows_module.split_policies(wrong)


def test_policies_take_turns():
    cells = rows_module.cells_of([{}, {"name": "full"}], ["chat"], [1.0, 2.0], 2)
    turns = [(c.repetition, c.label, c.rate) for c in cells]
    assert turns[:3] == [(0, "stock", 1.0), (0, "stock", 2.0), (0, "full", 1.0)]
    assert [turn[1] for turn in turns[::2]] == ["stock", "full"] * 2


def test_every_server_has_the_same_pool():
    arguments = POOL.arguments(5)
    pairs = dict(pairwise(arguments))
    assert POOL.blocks == 32  # 1000 tokens need 31.25
    assert pairs["--num-gpu-blocks-override"] == "33"
    assert pairs["--seed"] == "5"
    assert "--enable-prefix-caching" in arguments
    without = rows_module.Pool("m", 1000, 32, 2048, "auto", False, False, ("--x",))
    assert "--no-enable-prefix-caching" in without.arguments(5)
    assert "--enforce-eager" not in without.arguments(5)
    assert without.arguments(5)[-1] == "--x"


def made_row(policy="", rate=1.0, repetition=0, workload="chat", **figures):
    config = {"name": policy} if policy else {}
    cell = rows_module.Cell(config, workload, rate, repetition)
    settings = rows_module.settings_of(POOL, 0, LOAD, SLO)
    samples = {"at_s": [0.0, 0.5], "held_blocks": [3, 5], "host_bytes": [0, 2 << 20]}
    return rows_module.make_row(
        cell, settings, {"figures": figures, "samples": samples}
    )


def test_rows_survive_a_line_that_was_cut_off(tmp_path):
    out = tmp_path / "new" / "rows.jsonl"
    first, second = made_row(p50_ttft_ms=1.0), made_row("full", p50_ttft_ms=2.0)
    rows_module.append_row(out, first)
    whole = json.dumps(second)
    with out.open("a") as file:
        file.write(whole[: len(whole) // 2])
    assert list(rows_module.read_rows(out)) == [rows_module.key_of(first)]
    rows_module.append_row(out, second)
    assert list(rows_module.read_rows(out).values()) == [first, second]
    later = made_row(p50_ttft_ms=3.0)
    rows_module.append_row(out, later)
    assert list(rows_module.read_rows(out).values()) == [later, second]


def test_other_settings_are_other_measurements():
    keys = {rows_module.key_of(made_row())}
    keys.add(rows_module.key_of(made_row("full")))
    keys.add(rows_module.key_of(made_row(rate=2.0)))
    keys.add(rows_module.key_of(made_row(repetition=1)))
    for name, value in {
        "pool_tokens": 1,
        "turns": 9,
        "ttft_ms": 1.0,
        "seed": 4,
    }.items():
        row = made_row()
        assert name in row["settings"]
        row["settings"][name] = value
        keys.add(rows_module.key_of(row))
    assert len(keys) == 8
    assert made_row()["settings"]["model"] == "m"  # wherever the model's folder is


# -- report ---------------------------------------------------------------------


def sample_rows():
    rows = []
    for repetition, (stock, snap) in enumerate([(100, 50), (200, 80), (400, 400)]):
        same = {"repetition": repetition, "preemptions": 0}
        rows.append(made_row(p50_ttft_ms=stock, peak_host_bytes=0, **same))
        rows.append(made_row("snapkv", p50_ttft_ms=snap, peak_host_bytes=9, **same))
    rows.append(made_row("snapkv", rate=0.5, p50_ttft_ms=10))
    return rows


def test_summary_has_medians_spreads_and_ratios_of_turns():
    records = report_module.summarise(sample_rows())
    lines = [(record["policy"], record["rate_per_s"]) for record in records]
    assert lines == [("stock", 1.0), ("snapkv", 0.5), ("snapkv", 1.0)]
    stock, alone, snap = records
    assert (snap["p50_ttft_ms"], snap["p50_ttft_ms_min"]) == (80, 50)
    assert snap["p50_ttft_ms_max"] == 400
    assert snap["p50_ttft_ms_vs_stock"] == pytest.approx(0.5)  # of 0.5, 0.4, 1
    assert stock["p50_ttft_ms_vs_stock"] is None
    assert alone["p50_ttft_ms_vs_stock"] is None  # stock has no row there
    assert snap["peak_host_bytes_vs_stock"] is None  # the divisor is missing
    assert snap["p99_itl_ms"] is None
    assert report_module.show(snap, "p50_ttft_ms", 1.0, 0) == "80\n50..400\n×0.50"
    assert report_module.show(alone, "p50_ttft_ms", 1.0, 1) == "10.0"
    assert report_module.show(snap, "p99_itl_ms", 1.0, 1) == "-"


def test_report_writes_tables_and_files(tmp_path):
    other = made_row(p50_ttft_ms=7, workload="random")
    console = Console(record=True, width=200, file=io.StringIO())
    csv_file, json_file = tmp_path / "a" / "t.csv", tmp_path / "b" / "t.json"
    rows = [*sample_rows(), other]
    report_module.report(rows, console, csv_file, json_file)
    text = console.export_text()
    assert "×0.50" in text
    assert "pool_tokens 1000" in text
    lines = list(csv.DictReader(csv_file.open()))
    assert [line["policy"] for line in lines] == ["stock", "snapkv", "snapkv", "stock"]
    assert lines[2]["p50_ttft_ms_vs_stock"] == "0.5"
    assert lines[2]["p99_itl_ms"] == ""
    groups = json.loads(json_file.read_text())
    assert [group["workload"] for group in groups] == ["chat", "random"]
    assert groups[0]["settings"]["users"] == 4000
    report_module.report([], console, tmp_path / "none.csv")


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    written = report_module.draw(
        rows := sample_rows(), report_module.summarise(rows), tmp_path / "p", "chat"
    )
    names = ["latency.png", "latency.svg", "memory.png", "memory.svg"]
    assert [path.name for path in written] == [f"chat-{name}" for name in names]
    assert "host memory" in written[3].read_text()
    assert "snapkv" in written[1].read_text()
