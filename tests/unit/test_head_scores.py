"""Scores of heads against attention that transformers computes, and their command."""

from __future__ import annotations

import pytest
import torch
from tiny_model import VOCABULARY, write_tiny_model
from typer.testing import CliRunner

pytest.importorskip("transformers")

from vllm_kvplugins.budgets.head_profile import read_head_profile
from vllm_kvplugins.cli import app
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.training import head_scores

SEED = 20261128
TOKENS, REQUEST = 90, [5, 7, 8]
WORDS = ("Repeat", "Summarize", "the", "context", "else")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), SEED)


@pytest.fixture(scope="module")
def model(folder):
    return head_scores.load_model(str(folder), "float32")


@pytest.fixture(scope="module")
def tokens():
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(VOCABULARY, (TOKENS,), generator=generator).tolist()


def plain_scores(folder, tokens):
    """From the attention weights of transformers' own model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    kv_heads = model.config.num_key_value_heads
    ids = torch.tensor([[*tokens, *REQUEST, *tokens]])
    with torch.no_grad():
        layers = model(ids, output_attentions=True).attentions
    rows = []
    for weights in layers:
        again = weights[0, :, len(tokens) + len(REQUEST) :, : len(tokens)]
        peak = again.unflatten(0, (kv_heads, -1)).amax((1, 2))
        rows.append(peak[:, 4:-32].mean(1).tolist())
    return rows


@pytest.mark.parametrize("at_a_time", [1, 7, 95, 512])
def test_scores_are_those_of_whole_attention_matrices(
    folder, model, tokens, at_a_time, monkeypatch
):
    monkeypatch.setattr(head_scores, "_QUERIES_AT_A_TIME", at_a_time)
    scores = head_scores.head_scores(model, tokens, REQUEST)
    for row, expected in zip(scores, plain_scores(folder, tokens), strict=True):
        assert row == pytest.approx(expected, abs=1e-5)


def test_every_layer_is_reported_and_nothing_stays(model, tokens):
    layers: list = []
    head_scores.head_scores(model, tokens, REQUEST, layers.append)
    assert layers == [0, 1]
    assert not any(hasattr(m, "kvp_running") for m in model.modules())


def test_a_text_without_tokens_to_score_is_refused(model, tokens):
    with pytest.raises(ValueError, match="36 tokens"):
        head_scores.head_scores(model, tokens[:36], REQUEST)


def test_a_model_with_its_own_attention_is_refused(model, tokens, monkeypatch):
    layer = model.model.layers[1].self_attn
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **_: (hidden_states, 0))
    with pytest.raises(KVPolicyError, match=r"KVP626.*1 of 2 layers"):
        head_scores.head_scores(model, tokens, REQUEST)


def test_attention_that_is_not_finite_is_refused(model, tokens, monkeypatch):
    weight = model.model.layers[1].self_attn.k_proj.weight
    monkeypatch.setattr(weight, "data", torch.full_like(weight, torch.nan))
    with pytest.raises(KVPolicyError, match=r"KVP627.*layer 1"):
        head_scores.head_scores(model, tokens, REQUEST)


# -- the command -----------------------------------------------------------------


def rank_heads(folder, out, *arguments):
    command = ["research", "rank-heads", str(folder), "-o", str(out)]
    return CliRunner().invoke(app, [*command, *map(str, arguments)])


def write_text(path, words):
    generator = torch.Generator().manual_seed(SEED)
    picks = torch.randint(len(WORDS), (words,), generator=generator).tolist()
    path.write_text(" ".join(WORDS[i] for i in picks))
    return path


def test_the_command_writes_a_profile_that_serves_its_model(folder, tmp_path):
    from vllm_kvplugins.budgets import parse_allocator
    from vllm_kvplugins.model_config import read_model_config

    out = tmp_path / "heads.json"
    text = write_text(tmp_path / "text.txt", 200)
    done = rank_heads(folder, out, "--document", text, "--max-tokens", 100)
    assert done.exit_code == 0, done.output
    profile = read_head_profile(out)
    assert (profile.documents[0].name, profile.documents[0].tokens) == ("text.txt", 100)
    assert len(profile.scores) == profile.fingerprint.num_layers
    allocator = parse_allocator({"name": "head-split", "profile": str(out)})
    model = read_model_config(str(folder), "float32").fingerprint
    assert allocator.model_problems(model) == []
    assert "repeated 100 tokens of text.txt" in done.stdout


def test_a_text_is_cut_so_that_it_fits_twice_into_the_model(folder, tmp_path):
    from vllm_kvplugins.model_config import read_model_config

    positions = read_model_config(str(folder), "float32").max_positions
    text = write_text(tmp_path / "text.txt", positions)
    out = tmp_path / "heads.json"
    done = rank_heads(folder, out, "--document", text, "--max-tokens", positions)
    assert done.exit_code == 0, done.output
    (document,) = read_head_profile(out).documents
    assert positions / 4 < document.tokens < positions / 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--document", "none.txt"], "KVP601"),
        (["--document", "SHORT"], "KVP640"),
        (["--document", "SHORT", "--document", "SHORT"], "KVP641"),
        (["-o", "missing/p.json"], "KVP602"),
    ],
)
def test_mistakes_give_one_message(folder, tmp_path, arguments, code, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    files = {"SHORT": write_text(tmp_path / "short.txt", 30)}
    out = tmp_path / "heads.json"
    done = rank_heads(folder, out, *(files.get(a, a) for a in arguments))
    assert done.exit_code == 1, done.output
    assert codes_in(done.stderr) == (code,)
    assert "Traceback" not in done.output
    assert not out.exists()
