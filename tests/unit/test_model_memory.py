"""KV memory of hybrid models, as doctor, size and recommend report it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from vllm_kvplugins.cli import app, doctor
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.model_config import read_model_config
from vllm_kvplugins.model_memory import ModelMemory
from vllm_kvplugins.other_layers import OtherLayers

# Gemma-3-270m: 3 full and 15 sliding layers, so six groups of three layers.
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_size": 640,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 32768,
}
TOKEN_BYTES = 3 * 1 * 256 * 2 * 2  # of the three full layers
BLOCK_BYTES = 32 * TOKEN_BYTES
WINDOW_BLOCKS = 5 * (512 // 32 + 1)
runner = CliRunner()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    return str(tmp_path)


@pytest.fixture(autouse=True)
def no_machine(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", ())
    monkeypatch.setenv("COLUMNS", "200")


def report(folder: str, **changes):
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
        json.dump(GEMMA | changes, file)
    done = runner.invoke(app, ["doctor", folder, "--json"])
    return done.exit_code, json.loads(done.stdout)["model"]


def size(folder: str, *arguments: str):
    fixed = ["size", folder, "--policy", "snapkv", "--json"]
    done = runner.invoke(app, [*fixed, *arguments])
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


def test_doctor_reports_the_managed_layers_and_their_bytes(folder):
    code, model = report(folder)
    assert code == 0
    assert (model["managed_layers"], model["num_layers"]) == (3, 18)
    assert model["kv_bytes_per_token"] == TOKEN_BYTES
    assert model["block_bytes"] == BLOCK_BYTES
    assert model["page_bytes"] * model["pages_per_block"] == BLOCK_BYTES
    assert model["other_bytes"] == WINDOW_BLOCKS * BLOCK_BYTES
    shares = {int(n): share for n, share in model["managed_share"].items()}
    assert max(shares) <= GEMMA["max_position_embeddings"]
    for tokens, share in shares.items():
        blocks = tokens // 32
        others = 5 * min(17, blocks)
        assert share == pytest.approx(blocks / (blocks + others), abs=1e-4)


def test_half_of_the_memory_lies_in_the_managed_layers_from_the_reported_length(folder):
    _, model = report(folder)
    memory = ModelMemory.of(read_model_config(folder, "bfloat16"), 32)
    half = model["half_tokens"]
    assert memory.managed_share(half) >= 0.5 > memory.managed_share(half - 32)
    assert f"below {half:,} tokens" in runner.invoke(app, ["doctor", folder]).stdout


def test_a_model_with_full_attention_only_has_nothing_else(folder):
    _, model = report(folder, sliding_window=None)
    assert model["managed_layers"] == model["num_layers"] == 18
    assert model["other_bytes"] == model["half_tokens"] == 0
    assert set(model["managed_share"].values()) == {1.0}


def test_a_model_that_no_policy_can_run_with_gives_all_reasons(folder):
    code, model = report(folder, kv_lora_rank=512, is_encoder_decoder=True)
    assert code == 1
    assert set(codes_in("\n".join(model["problems"]))) == {"KVP011", "KVP014"}
    assert "managed_layers" not in model


def test_a_model_that_every_policy_refuses_is_refused(folder):
    types = ["full_attention", "full_attention", "sliding_attention"] * 6
    code, model = report(folder, layer_types=types)
    assert code == 1
    assert set(codes_in("\n".join(model["problems"]))) == {"KVP043"}


def test_a_layer_with_two_caches_counts_once(folder):
    """Each layer of Falcon-H1 has attention and Mamba-2."""
    mamba = {"n_heads": 8, "d_head": 32, "d_state": 16, "n_groups": 1, "d_conv": 4}
    fields = {f"mamba_{name}": value for name, value in mamba.items()}
    code, model = report(folder, model_type="falcon_h1", sliding_window=None, **fields)
    assert code == 0
    assert model["managed_layers"] == model["num_layers"] == 18


def test_doctor_lists_the_policies_that_refuse_a_model(folder):
    _, model = report(folder, attn_logit_softcapping=50.0)
    assert "icecache" in model["refused_policies"]
    assert "snapkv" not in model["refused_policies"]


def test_size_counts_the_blocks_of_windows(folder):
    request = size(folder, "--context", "8000", "--answer", "2")
    stock, held = request["stock_request"], request["request"]
    assert request["kv_bytes_per_token"] == TOKEN_BYTES
    assert (
        stock["end"]["blocks"] == 251 + WINDOW_BLOCKS
    )  # the last token is not computed
    assert held["end"]["blocks"] == 17 + WINDOW_BLOCKS
    # one step of the prompt computes up to 1024 tokens, which windows must cover
    chunk = ("--max-num-batched-tokens", "1024")
    peak = size(folder, "--context", "8000", *chunk)["stock_request"]["prefill_peak"]
    assert peak["blocks"] == 250 + 5 * (1535 // 32 + 1 + 1)


def test_a_pool_fits_fewer_requests_because_of_windows(folder):
    arguments = ("--context", "8000", "--answer", "2", "--pool-gib", "1")
    with_windows = size(folder, *arguments)["pool"]
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
        json.dump(GEMMA | {"sliding_window": None, "num_hidden_layers": 3}, file)
    without = size(folder, *arguments)["pool"]
    assert with_windows["decoding_alone"] < without["decoding_alone"] / 4


def test_recommend_counts_windows_too(folder):
    def stock_fits(memory: str, window: int | None) -> bool:
        with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
            json.dump(GEMMA | {"sliding_window": window}, file)
        arguments = ["--context", "8000", "--memory", memory, "--workload", "document"]
        done = runner.invoke(app, ["recommend", folder, *arguments, "--json"])
        return json.loads(done.stdout)["policy"] == "stock"

    # 266 blocks of 3 layers and 85 of windows take 33 MiB; all layers in full, 150 MiB
    assert stock_fits("40MiB", 512)
    assert not stock_fits("40MiB", None)
    assert not stock_fits("28MiB", 512)


def test_blocks_of_windows_and_chunks():
    layers = OtherLayers({512: 5}, {1024: 2})
    assert layers.blocks(64, 1, 32) == 7 * 2
    assert layers.blocks(100_000, 1, 32) == 5 * 17 + 2 * 33
    assert layers.blocks(100_000, 2048, 32) == 5 * (2559 // 32 + 2) + 2 * 96
    assert OtherLayers().blocks(100_000, 2048, 32) == 0
