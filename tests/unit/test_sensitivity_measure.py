"""Sensitivity of a tiny model against plain torch, and its command."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from cli_errors import refused
from tiny_model import (
    KV_HEADS,
    LAYERS,
    LLAMA,
    VOCABULARY,
    masked_logits,
    write_tiny_model,
)
from typer.testing import CliRunner

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

from vllm_kvplugins.budgets.sensitivity_profile import MeasureSettings, read_profile
from vllm_kvplugins.cli import app
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.training import sensitivity

SEED = 20261122
TOKENS = 90
WORDS = ("Repeat", "Summarize", "the", "context", "else")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), SEED)


@pytest.fixture(scope="module")
def model(folder):
    return sensitivity.load_model(str(folder), "float32")


@pytest.fixture(scope="module")
def tokens():
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(VOCABULARY, (TOKENS,), generator=generator).tolist()


def settings(budget=16, sinks=3):
    return MeasureSettings(budget=budget, sinks=sinks, dtype="float32")


def seen(query, key, budget, sinks):
    return key <= query and (key < sinks or query - key < budget - sinks)


def plain_sensitivity(folder, tokens, budget, sinks):
    """Equations 8 and 9, from a model written out in torch."""
    count, keys = len(tokens), []
    for limit in (count + sinks, budget):
        mask = torch.tensor(
            [[seen(q, k, limit, sinks) for k in range(count)] for q in range(count)]
        )
        layers: list = []
        visible = mask.expand(LAYERS, KV_HEADS, -1, -1)
        masked_logits(folder, tokens, visible, layers)
        keys.append([key for _, key in layers])
    return [
        1 - float(torch.cosine_similarity(full, block, dim=-1).mean())
        for full, block in zip(*keys, strict=True)
    ]


@pytest.mark.parametrize(("budget", "sinks"), [(16, 3), (5, 0), (2, 1), (80, 10)])
@pytest.mark.parametrize("at_a_time", [7, 512])
def test_sensitivity_is_that_of_a_plain_model(
    folder, model, tokens, budget, sinks, at_a_time, monkeypatch
):
    monkeypatch.setattr(sensitivity, "_QUERIES_AT_A_TIME", at_a_time)
    result = sensitivity.layer_sensitivity(model, tokens, settings(budget, sinks))
    expected = plain_sensitivity(folder, tokens, budget, sinks)
    assert result == pytest.approx(expected, abs=1e-5)
    assert result[0] == pytest.approx(0, abs=1e-6), "its keys see no attention"
    assert result[1] > 1e-3


def test_the_cosine_is_the_same_before_rope(model, tokens):
    """W_K of the layer's input, which the paper compares, is not rotated."""
    projected = []
    layer = model.model.layers[1].self_attn.k_proj
    hook = layer.register_forward_hook(lambda m, i, out: projected.append(out))
    try:
        result = sensitivity.layer_sensitivity(model, tokens, settings())
    finally:
        hook.remove()
    (keys,) = projected  # [2, tokens, heads * head_dim]
    before = keys.unflatten(2, (KV_HEADS, -1)).transpose(1, 2)
    expected = 1 - sensitivity.mean_cosine(before[0], before[1])
    assert result[1] == pytest.approx(expected, abs=1e-6)


def test_the_mask_is_the_one_in_the_picture():
    picture = ["1.....", "11....", "111...", "1111..", "1.111.", "1..111"]
    mask = sensitivity.block_mask(0, 6, settings(4, 1))
    assert ["".join(".1"[int(s)] for s in row) for row in mask] == picture
    assert torch.equal(sensitivity.block_mask(4, 2, settings(4, 1)), mask[4:])


def test_a_smaller_budget_changes_keys_more(model, tokens):
    last = [
        sensitivity.layer_sensitivity(model, tokens, settings(budget, 2))[1]
        for budget in (4, 16, 64)
    ]
    assert last == sorted(last, reverse=True)


def test_layers_are_counted_and_nothing_is_left_behind(model, tokens):
    layers: list = []
    sensitivity.layer_sensitivity(model, tokens, settings(), layers.append)
    assert layers == list(range(LAYERS))
    assert not any(hasattr(m, "kvp_running") for m in model.modules())


def test_a_text_in_which_nothing_is_masked_is_refused(model, tokens):
    with pytest.raises(ValueError, match="16 tokens are not more than"):
        sensitivity.layer_sensitivity(model, tokens[:16], settings())


def test_a_model_with_its_own_attention_is_refused(model, tokens, monkeypatch):
    layer = model.model.layers[1].self_attn
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **_: (hidden_states, 0))
    with pytest.raises(KVPolicyError, match=r"KVP626.*1 of 2 layers"):
        sensitivity.layer_sensitivity(model, tokens, settings())


def test_keys_that_are_not_finite_are_refused(folder, tokens, tmp_path):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    broken = sensitivity.load_model(str(tmp_path), "float32")
    with pytest.raises(KVPolicyError, match=r"KVP627.*layer 1"):
        sensitivity.layer_sensitivity(broken, tokens, settings())


# -- the command -----------------------------------------------------------------


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def write_text(path, seed, words=200):
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (words,), generator=generator).tolist()
    path.write_text(" ".join(WORDS[i] for i in picks))
    return path


def calibrate(folder, out, *arguments):
    command = ["research", "calibrate", str(folder), "-o", str(out)]
    return CliRunner().invoke(app, [*command, *map(str, arguments)])


def test_the_command_writes_a_profile_of_all_documents(folder, model, tmp_path):
    print("seed", SEED)
    texts = [write_text(tmp_path / f"{i}.txt", SEED + i) for i in range(2)]
    out = tmp_path / "profile.json"
    options = ("--document", texts[0], "--document", texts[1])
    done = calibrate(folder, out, *options, "--budget", 32, "--max-tokens", 120)
    assert done.exit_code == 0, done.output
    result = read_profile(out)
    assert result.model == folder.name
    assert result.settings == MeasureSettings(budget=32, sinks=4, dtype="float32")
    assert result.fingerprint.vocab_size == VOCABULARY
    assert result.fingerprint.rope["rope_theta"] == LLAMA["rope_theta"]
    ids = {word: LLAMA_IDS.get(word, 0) for word in WORDS}
    for text, document in zip(texts, result.documents, strict=True):
        assert (document.name, document.tokens) == (text.name, 120)
        assert document.sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
        tokens = [ids[word] for word in text.read_text().split()][:120]
        expected = sensitivity.layer_sensitivity(model, tokens, result.settings)
        assert document.sensitivity == pytest.approx(expected, abs=1e-6)
    both = [document.sensitivity[1] for document in result.documents]
    assert both[0] != both[1]
    assert result.sensitivity[1] == pytest.approx(sum(both) / 2)
    assert "most sensitive: layer 1" in done.stdout
    assert "read 120 tokens of 0.txt" in done.stdout


LLAMA_IDS = {"Repeat": 5, "Summarize": 6, "the": 7, "context": 8}


def test_the_text_of_the_package_is_the_default(folder, tmp_path):
    out = tmp_path / "profile.json"
    done = calibrate(folder, out, "--budget", 64, "--max-tokens", 200)
    assert done.exit_code == 0, done.output
    assert read_profile(out).documents[0].name == "harrow-bend.txt"


def test_a_profile_serves_its_own_model_and_no_other(folder, tmp_path):
    from vllm_kvplugins.budgets import parse_allocator
    from vllm_kvplugins.model_config import read_model_config

    out = tmp_path / "profile.json"
    assert calibrate(folder, out, "--budget", 64, "--max-tokens", 200).exit_code == 0
    allocator = parse_allocator({"name": "sensitivity", "profile": str(out)})
    config = read_model_config(str(folder), "float32")
    assert allocator.model_problems(config.fingerprint) == []
    config.config["vocab_size"] = 7
    assert (
        "vocab_size 1000 there, 7 here"
        in allocator.model_problems(config.fingerprint)[0]
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--document", "none.txt"], "KVP601"),
        (["--document", "EMPTY"], "KVP601"),
        (["--document", "SHORT"], "KVP640"),
        (["--document", "SHORT", "--document", "SHORT"], "KVP641"),
        (["--budget", "100", "--max-tokens", "100"], "KVP640"),
        (["--budget", "4"], "KVP603"),
        (["-o", "missing/p.json"], "KVP602"),
    ],
)
def test_mistakes_give_one_message(folder, tmp_path, arguments, code):
    files = {"SHORT": write_text(tmp_path / "short.txt", 0, 30)}
    files["EMPTY"] = tmp_path / "empty.txt"
    files["EMPTY"].write_text(" \n")
    out = tmp_path / "p.json"
    done = calibrate(folder, out, *(files.get(a, a) for a in arguments))
    assert done.exit_code == 1, done.output
    assert codes_in(done.stderr) == (code,)
    assert "Traceback" not in done.output
    assert not out.exists()


def test_no_model_is_one_line(tmp_path):
    message = refused(calibrate(tmp_path / "none", tmp_path / "p.json"))
    assert codes_in(message) == ("KVP628",)


def test_a_folder_without_weights_is_said(folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    done = calibrate(tmp_path, tmp_path / "p.json")
    assert done.exit_code == 1
    assert codes_in(done.stderr) == ("KVP625",)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    done = calibrate(tmp_path, tmp_path / "p.json")
    assert codes_in(done.stderr) == ("KVP625",)


def test_models_that_no_policy_runs_on_are_refused(folder, tmp_path):
    config = LLAMA | {"sliding_window": 64, "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = calibrate(tmp_path, tmp_path / "p.json")
    assert done.exit_code == 1
    assert "cannot be calibrated" in done.stderr


# -- into the cache ----------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("KVP_MODEL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm_kvplugins" / "sensitivity"


def calibrate_into_cache(folder):
    command = ["research", "calibrate", str(folder)]
    options = ["--budget", "64", "--max-tokens", "200"]
    return CliRunner().invoke(app, [*command, *options])


def test_without_a_path_the_profile_is_where_servers_look(folder, cache):
    from vllm_kvplugins.budgets.profile_cache import cached_profile
    from vllm_kvplugins.model_config import read_model_config

    done = calibrate_into_cache(folder)
    assert done.exit_code == 0, done.output
    found = cached_profile(read_model_config(str(folder), "float32").fingerprint())
    assert found.profile is not None
    assert found.profile.settings.budget == 64
    assert list(cache.iterdir()) == [found.path]
    assert f"wrote {found.path}" in done.stdout
    assert "from their next start on" in done.stdout


def test_a_shipped_profile_that_hides_the_new_one_is_said(folder, cache, monkeypatch):
    from vllm_kvplugins.budgets import sensitivity_profile

    shipped = sensitivity_profile.shipped_profiles()[0]
    monkeypatch.setattr(sensitivity_profile, "shipped_profile", lambda model: shipped)
    done = calibrate_into_cache(folder)
    assert done.exit_code == 0, done.output
    assert f"servers use the shipped {shipped.name} before it" in done.stdout


def test_a_cache_that_cannot_be_written_is_said_before_the_run(folder, cache, tmp_path):
    (tmp_path / "cache").write_text("a file in the place of the folder")
    done = calibrate_into_cache(folder)
    assert done.exit_code == 1
    assert codes_in(done.stderr) == ("KVP602",)
    assert "-o" in done.stderr
