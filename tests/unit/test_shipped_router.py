"""The shipped router: its model, and its quality on that model."""

from __future__ import annotations

import json

import pytest

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.model_config import ModelFingerprint
from vllm_kvplugins.policies.sekv import SHIPPED, SeKV
from vllm_kvplugins.routers.files import RouterFacts, read_router, shipped_router

SMOLLM2 = ModelFingerprint(
    architecture="LlamaForCausalLM",
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    vocab_size=49152,
    rope={"rope_theta": 100000.0, "rope_type": "default"},
)


def test_it_is_one_of_smollm2_and_small():
    path = shipped_router()
    assert path.stat().st_size < 1.3e6
    router, facts = read_router(path)
    assert facts.fingerprint.differences(SMOLLM2) == []
    assert router.projection.shape == (30, 9, 32, 64)
    assert router.max_rank >= SeKV().rank, "it must serve the default rank"


def test_it_decides_better_than_mean_key_on_texts_it_has_not_seen():
    report = read_router(shipped_router())[1].report
    assert report.zoom_f1["router"] > report.zoom_f1["mean_key"]
    assert report.zoom_f1_in_room["router"] > report.zoom_f1_in_room["mean_key"]
    assert report.covered_in_room["router"] > report.covered_in_room["mean_key"]


def test_what_it_was_made_of_stands_beside_it():
    path = shipped_router()
    metadata = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    facts = RouterFacts.model_validate(metadata["facts"])
    assert facts == read_router(path)[1]
    for option, value in (
        ("--examples", facts.settings["examples"]),
        ("--steps", facts.settings["steps"]),
        ("--lengths", ",".join(map(str, facts.settings["lengths"]))),
    ):
        assert f"{option} {value}" in metadata["commands"][-1]
    assert {"name", "from", "licence"} == set().union(*metadata["texts"])
    assert metadata["pass_keys"].keys() == {"shipped", "mean-key", "command"}


def test_the_policy_takes_it_and_refuses_other_models():
    policy = parse_policy({"name": "sekv", "router": SHIPPED})
    assert isinstance(policy, SeKV)
    assert policy.trained is not None
    assert policy.remarks == []
    assert policy.model_problems(lambda: SMOLLM2) == []
    other = SMOLLM2.model_copy(update={"num_layers": 24})
    (problem,) = policy.model_problems(lambda: other)
    assert "num_layers 30" in problem
    assert codes_in(problem) == ("KVP116",)


def test_mean_key_stays_the_default():
    assert SeKV().trained is None
    with pytest.raises(ValueError, match="a smaller rank"):
        parse_policy({"name": "sekv", "router": SHIPPED, "rank": 48})
