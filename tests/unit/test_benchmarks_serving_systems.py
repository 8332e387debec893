"""Which systems a serving comparison starts, their bytes, and datasets with answers."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

pytest.importorskip("aiohttp")
import _serving_bench as bench_module
import _serving_bytes as bytes_module
import _serving_server as server_module
import _serving_systems as systems
import pass_key_prompts
from _serving_bench import BenchArgumentError, BenchLoad
from _serving_rows import Pool

POOL = Pool("/m", 1024, 32, 2048, "float32", True, True)
SNAPKV = {"name": "snapkv", "budget": 64}


def options(system: dict) -> dict[str, str]:
    return dict(pairwise(systems.server_arguments(system, POOL, 0)))


# -- systems --------------------------------------------------------------------


def test_every_system_has_its_arguments():
    assert "--kv-policy" not in options({})
    assert options(SNAPKV)["--kv-policy"] == "snapkv"
    assert json.loads(options(SNAPKV)["--kv-policy-config"]) == {"budget": 64}
    offload = options({"name": "offload", "gib": 2})
    assert offload["--kv-offloading-backend"] == "native"
    assert offload["--kv-offloading-size"] == "2"
    assert options({"name": "fp8"})["--kv-cache-dtype"] == "fp8"
    lmcache = {"name": "lmcache", "gib": 3}
    transfer = json.loads(options(lmcache)["--kv-transfer-config"])
    assert transfer["kv_connector"] == "LMCacheConnectorV1"
    sizes = systems.server_environment(lmcache)
    assert sizes["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "3"
    assert systems.server_environment(SNAPKV) == {}


def test_pools_have_equal_bytes_unless_a_system_names_its_size():
    blocks = {"stock": 32, "offload": 32, "fp8": 4 * 32}
    for name, count in blocks.items():
        number = options({"name": name})["--num-gpu-blocks-override"]
        assert int(number) == count + 1, name
    own = options(SNAPKV | {"pool_tokens": 960})
    assert own["--num-gpu-blocks-override"] == "31"
    assert json.loads(own["--kv-policy-config"]) == {"budget": 64}


@pytest.mark.parametrize(
    ("system", "why"),
    [
        ({"name": "fp8", "gib": 1}, "no setting 'gib'"),
        ({"name": "stock", "budget": 3}, "no setting 'budget'"),
        ({"name": "offload", "gib": 0}, "positive"),
        ({"name": "stock", "pool_tokens": "many"}, "positive"),
    ],
)
def test_wrong_settings_of_alternatives_are_told(system, why):
    assert why in systems.problem_of(system)


def test_good_settings_have_no_problem():
    for system in ({}, SNAPKV, {"name": "lmcache", "gib": 0.5, "pool_tokens": 64}):
        assert systems.problem_of(system) == ""


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(systems, "find_spec", lambda name: None)
    assert "lmcache is not installed" in systems.missing_of({"name": "lmcache"})
    assert systems.missing_of({"name": "offload"}) == ""


def test_the_reason_is_the_error_that_caused_the_others():
    log = """\
(EngineCore pid=7) ERROR 11-24 Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-24 ValueError: fp8 needs AVX-512
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert server_module.reason_of(log) == "ValueError: fp8 needs AVX-512"
    assert server_module.reason_of("busy\n") == ""
    error = server_module.ServerError("not ready after 3 s; more\nlines", "busy")
    assert error.reason == "not ready after 3 s; more"


# -- bytes ----------------------------------------------------------------------


def row(system: dict, tables: int, host: int) -> dict:
    figures = {"pool_blocks": systems.pool_of(system, POOL).blocks}
    figures |= {"peak_device_table_bytes": tables, "peak_host_bytes": host}
    figures |= bytes_module.byte_figures(system, POOL, figures, numbers=100)
    return {"policy": system, "figures": figures}


def test_all_bytes_of_a_server_count():
    pool = 1024 * 400  # 100 numbers of 4 bytes per token
    stock = row({}, 0, 0)["figures"]
    assert stock["memory_bytes"] == stock["pool_bytes"] == pool
    assert row(SNAPKV, 50, 7)["figures"]["memory_bytes"] == pool + 57
    assert row({"name": "fp8"}, 0, 0)["figures"]["pool_bytes"] == pool
    offload = row({"name": "offload", "gib": 1}, 0, 0)["figures"]
    assert offload["memory_bytes"] == pool + (1 << 30)
    assert bytes_module.byte_figures({}, POOL, {"pool_blocks": 3}, 0) == {}


def test_a_comparison_at_unequal_bytes_is_labelled():
    pool = 1024 * 400
    more = {"name": "full"}
    rows = [row({}, 0, 0), row(SNAPKV, pool // 200, 0), row(more, 0, pool // 2)]
    stock, snapkv, full = bytes_module.compared_bytes(rows)
    assert [r["is_equal"] for r in (stock, snapkv, full)] == [True, True, False]
    assert full["share"] == pytest.approx(1.5)
    assert "UNEQUAL (150.0 % of stock's)" in bytes_module.verdict(full)
    assert bytes_module.verdict(snapkv).startswith("equal")
    # Only the pool's share is fixed: the worst run of a server counts.
    again = bytes_module.compared_bytes([*rows, row(SNAPKV, pool // 10, 0)])
    assert again[1]["is_equal"] is False


def test_unknown_bytes_are_no_comparison():
    unknown = {"policy": {}, "figures": {"pool_blocks": 3}}
    (record,) = bytes_module.compared_bytes([unknown])
    assert record["is_equal"] is None
    assert bytes_module.verdict(record) == "bytes not known"


# -- datasets -------------------------------------------------------------------


def write(path, lines) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_answers_are_scored_against_their_own_prompts():
    lines = [{"prompt": str(n), "answer": str(n)} for n in range(10, 15)]
    order = bench_module.sampled(lines, 12, 3)
    assert len(order) == 12
    assert {line["answer"] for line in order[:5]} == {str(n) for n in range(10, 15)}
    assert order != bench_module.sampled(lines, 12, 4)
    texts = [f"It is {line['answer']}." for line in order]
    assert bench_module.share_answered(order, texts) == 1.0
    texts[0] = texts[1] = "I do not know."
    assert bench_module.share_answered(order, texts) == pytest.approx(10 / 12)


def test_some_answers_are_an_error(tmp_path):
    lines = [{"prompt": "a", "answer": 1}, {"prompt": "b"}]
    load = BenchLoad(2, dataset="custom", path=write(tmp_path / "d.jsonl", lines))
    with pytest.raises(ValueError, match="1 lines have no 'answer'"):
        bench_module.answers_of(load)
    none = BenchLoad(2, dataset="custom", path=write(tmp_path / "e.jsonl", lines[1:]))
    assert bench_module.answers_of(none) == []


def test_loads_differ_by_what_they_send(tmp_path):
    file = write(tmp_path / "d.jsonl", [{"prompt": "a"}])
    load = BenchLoad(2, dataset="custom", path=file, max_concurrency=3, extra=("--x",))
    settings = load.settings()
    assert settings["dataset_path"] == "d.jsonl"  # wherever its folder is
    write(tmp_path / "d.jsonl", [{"prompt": "b"}])
    assert load.settings()["dataset_sha256"] != settings["dataset_sha256"]
    arguments = dict(pairwise(load.dataset_arguments()))
    assert arguments["--dataset-name"] == "custom"
    assert arguments["--max-concurrency"] == "3"
    assert load.dataset_arguments()[-1] == "--x"
    # Rows of earlier versions keep their key.
    plain = {"requests": 5, "input_tokens": 7, "output_tokens": 9}
    assert BenchLoad(5, 7, 9).settings() == plain


def test_what_a_dataset_needs_is_told_before_a_server_starts(tmp_path, monkeypatch):
    load = BenchLoad(2, dataset="custom", path=str(tmp_path / "none.jsonl"))
    monkeypatch.setattr(bench_module, "find_spec", lambda name: None)
    with pytest.raises(BenchArgumentError, match="pip install pandas"):
        bench_module.check_load(load)
    monkeypatch.setattr(bench_module, "find_spec", lambda name: name)
    with pytest.raises(BenchArgumentError, match="--dataset-path"):
        bench_module.check_load(load)


@pytest.mark.slow  # imports vLLM
def test_options_of_vllm_are_checked_by_vllm(tmp_path):
    pytest.importorskip("vllm")

    def check(dataset: str, *extra: str, path: str = "") -> None:
        bench_module.check_load(BenchLoad(2, dataset=dataset, path=path, extra=extra))

    check("sharegpt", "--sharegpt-output-len", "9", path=str(tmp_path / "s.json"))
    check("prefix_repetition", "--prefix-repetition-num-prefixes", "2")
    for dataset, extra, why in [
        ("sharegtp", (), "invalid choice"),
        ("sharegpt", ("--sharegpt-output-len", "many"), "invalid int"),
        ("sharegpt", ("--no-such-option", "1"), "unrecognized"),
        ("sharegpt", ("--seed", "1"), "set by this benchmark"),
    ]:
        with pytest.raises(BenchArgumentError, match=why):
            check(dataset, *extra)


class Letters:
    """A tokenizer with one token per character."""

    def __call__(self, text: str, **_: object) -> dict[str, str]:
        return {"input_ids": text}

    def decode(self, ids: str) -> str:
        return ids


def test_pass_key_prompts_hold_their_answer(tmp_path):
    (tmp_path / "essay.txt").write_text("One fish. Two fish. Red fish. " * 40)
    for texts in (None, tmp_path):
        lines = pass_key_prompts.prompts(Letters(), texts, 400, 5, 1)
        assert len({line["answer"] for line in lines}) == 5
        for line in lines:
            assert line["prompt"].count(line["answer"]) == 2
            assert line["prompt"].endswith("5-digit number only.")
