"""Sensitivity profiles: files, fingerprints, and the shipped ones."""

from __future__ import annotations

import json
from importlib import resources

import pytest
from profiles import make_profile, write_made

from vllm_kvplugins.budgets import sensitivity_profile as profiles
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.model_config import ConfigOnlyModel

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 100,
    "rope_theta": 10000.0,
}


def fingerprint(**changes):
    return ConfigOnlyModel("m", "", BASE | changes).fingerprint()


def test_a_file_says_what_was_written(tmp_path):
    profile = make_profile([0.1, 0.2], [0.3, 0.6])
    assert profile.sensitivity == pytest.approx((0.2, 0.4))
    profiles.write_profile(profile, tmp_path / "p.json")
    assert profiles.read_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "No such file"),
        ("no json", "Expecting value"),
        ("[1]", "valid dictionary"),
        ({"format": "other"}, "format: Input should be 'kvplugins-sensitivity'"),
        ({"version": 2}, "version: Input should be 1"),
        ({"sensitivity": [0.1]}, "1 sensitivities for 2 layers"),
        ({"sensitivity": [0.1, float("nan")]}, "in [0, 2]"),
        ({"sensitivity": [0.1, -0.1]}, "in [0, 2]"),
        ({"documents": []}, "documents: "),
        ({"more": 1}, "more: Extra inputs"),
        (
            {"settings": {"budget": 4, "sinks": 4, "dtype": "float32"}},
            "4 sinks leave nothing of a budget of 4",
        ),
    ],
)
def test_other_files_are_refused_with_a_way_out(tmp_path, change, words):
    path = tmp_path / "p.json"
    if isinstance(change, dict):
        write_made(path, [0.1, 0.2])
        change = json.dumps(json.loads(path.read_text()) | change)
    if change is not None:
        path.write_text(change)
    with pytest.raises(KVPolicyError) as error:
        profiles.read_profile(path)
    for part in ("KVP114", str(path), words, "kvplugins research calibrate"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["QwenForCausalLM"]}, "architecture"),
        ({"num_hidden_layers": 3}, "num_layers"),
        ({"num_attention_heads": 8, "head_dim": 16}, "num_heads"),
        ({"num_key_value_heads": 1}, "num_kv_heads"),
        ({"head_dim": 32}, "head_dim"),
        ({"hidden_size": 128, "head_dim": 16}, "hidden_size"),
        ({"vocab_size": 101}, "vocab_size"),
        ({"rope_theta": 5.0}, "rope"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope"),
    ],
)
def test_one_difference_is_named(changes, named):
    (difference,) = fingerprint().differences(fingerprint(**changes))
    assert difference.startswith(named + " ")


def test_both_forms_of_rope_are_one():
    old = fingerprint(rope_scaling={"type": "yarn", "factor": 4.0})
    new = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    assert old.rope == new
    assert old.differences(fingerprint(rope_parameters=new)) == []
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    assert fingerprint(rope_scaling=None).rope == plain


def test_what_a_config_does_not_say_does_not_count():
    bare = {key: BASE[key] for key in BASE if key not in ("vocab_size", "rope_theta")}
    result = ConfigOnlyModel("m", "", bare).fingerprint()
    assert (result.vocab_size, result.rope) == (None, None)
    assert result.differences(fingerprint()) == []


def test_shipped_profiles_are_sound_and_of_different_models():
    paths = profiles.shipped_profiles()
    assert [path.name for path in paths] == [
        "qwen2.5-coder-0.5b-instruct.json",
        "qwen2.5-coder-1.5b-instruct.json",
        "smollm2-135m-instruct.json",
    ]
    for path in paths:
        result = profiles.read_profile(path)
        assert result.sensitivity[0] == pytest.approx(0, abs=1e-6), "keys of embeddings"
        assert max(result.sensitivity) > 1e-4
        assert profiles.shipped_profile(result.fingerprint) == path
    assert profiles.shipped_profile(fingerprint()) is None


def test_the_shipped_profile_is_of_the_shipped_text():
    import hashlib

    text = (resources.files("vllm_kvplugins.training") / "harrow-bend.txt").read_bytes()
    for path in profiles.shipped_profiles():
        (document,) = profiles.read_profile(path).documents
        assert document.name == "harrow-bend.txt"
        assert document.sha256 == hashlib.sha256(text).hexdigest()
