"""The allocator `head-split`: its profiles, its pages, and what start-up says."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from vllm_kvplugins.budgets import parse_allocator
from vllm_kvplugins.budgets.head_profile import (
    HeadProfile,
    RepeatedDocument,
    mean_scores,
    read_head_profile,
    shipped_head_profiles,
    write_head_profile,
)
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.model_config import ConfigOnlyModel
from vllm_kvplugins.vllm_adapter.config import layer_budgets

BLOCK = 8
SCORES = ((0.1, 0.9), (0.5, 0.2))
(SMOLLM2,) = (path for path in shipped_head_profiles() if "smollm2" in path.name)


def fingerprint(**changes):
    config = {
        "architectures": ["AnyForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
    }
    return ConfigOnlyModel("m", "", config | changes).fingerprint()


def make_profile(scores=SCORES) -> HeadProfile:
    return HeadProfile(
        plugin="0",
        model="made",
        fingerprint=fingerprint(),
        dtype="float32",
        documents=(RepeatedDocument(name="a.txt", tokens=100, sha256="0" * 64),),
        scores=scores,
    )


def make_allocator():
    return parse_allocator({"name": "head-split", "profile": make_profile()})


# -- pages -----------------------------------------------------------------------


def scores_with_window(pages: int, stays: int) -> torch.Tensor:
    scores = torch.zeros(2, 2, pages * BLOCK)
    scores[:, :, -stays:] = torch.inf
    return scores


@pytest.mark.parametrize(
    ("average", "expected"),
    [
        (2, [[2, 2], [2, 2]]),  # what must stay takes everything
        (3, [[2, 6], [2, 2]]),  # a part of the first head
        (6, [[2, 10], [10, 2]]),
        (7, [[2, 10], [10, 6]]),  # the third head in the order of scores
        (10, [[10, 10], [10, 10]]),
    ],
)
def test_heads_that_look_back_most_get_all_they_can_use(average, expected):
    scores = scores_with_window(10, 2 * BLOCK)
    available = torch.full((2, 2), 10)
    pages = make_allocator().allocate(scores, average, BLOCK, available)
    assert pages.tolist() == expected


def test_a_head_with_few_pages_leaves_the_rest_to_the_next():
    available = torch.tensor([[10, 4], [10, 10]])
    pages = make_allocator().allocate(scores_with_window(10, 3), 3, BLOCK, available)
    assert pages.tolist() == [[1, 4], [6, 1]]


def test_heads_of_equal_scores_are_taken_in_their_order():
    allocator = parse_allocator(
        {"name": "head-split", "profile": make_profile(((0.5, 0.5), (0.5, 0.5)))}
    )
    available = torch.full((2, 2), 10)
    pages = allocator.allocate(scores_with_window(10, 3), 4, BLOCK, available)
    assert pages.tolist() == [[10, 4], [1, 1]]


def test_the_policy_keeps_sinks_and_newest_tokens_of_streaming_heads():
    from views import make_layer_view

    policy = parse_policy({"name": "duo-attention", "sinks": 2, "recent": 3})
    positions = torch.arange(9).expand(2, -1)
    view = make_layer_view(
        layer=0,
        keys=torch.zeros(2, 9, 4),
        positions=positions,
        queries=torch.zeros(2, 0, 4),
        query_positions=torch.arange(0),
        scale=1.0,
    )
    scores = policy.score(view)
    stays = scores == torch.inf
    assert stays[0].tolist() == [True] * 2 + [False] * 4 + [True] * 3
    middle = scores[0, 2:6]
    assert middle.tolist() == sorted(middle.tolist()), "a part of a head is its newest"


# -- files -----------------------------------------------------------------------


def test_a_file_says_what_was_written(tmp_path):
    write_head_profile(make_profile(), tmp_path / "p.json")
    assert read_head_profile(tmp_path / "p.json") == make_profile()


def test_scores_of_documents_are_averaged():
    assert mean_scores([((0.0, 1.0),), ((0.5, 0.0),)]) == ((0.25, 0.5),)


@pytest.mark.parametrize(
    "change",
    [
        None,
        "no json",
        {"format": "kvplugins-sensitivity"},
        {"version": 2},
        {"scores": [[0.1, 0.2]]},
        {"scores": [[0.1], [0.2]]},
        {"scores": [[0.1, 0.2], [0.1, 1.5]]},
        {"scores": [[0.1, 0.2], [0.1, float("nan")]]},
        {"documents": []},
        {"more": 1},
    ],
)
def test_other_files_are_refused_with_a_way_out(tmp_path, change):
    path = tmp_path / "p.json"
    if isinstance(change, dict):
        write_head_profile(make_profile(), path)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    elif change is not None:
        path.write_text(change)
    with pytest.raises(KVPolicyError) as error:
        parse_policy(
            {
                "name": "duo-attention",
                "allocator": {"name": "head-split", "profile": str(path)},
            }
        )
    assert codes_in(str(error.value)) == ("KVP114",)
    assert str(path) in str(error.value)
    assert "rank-heads" in str(error.value)


@pytest.mark.parametrize("path", shipped_head_profiles(), ids=lambda path: path.stem)
def test_shipped_profiles_are_of_their_models(path):
    profile = read_head_profile(path)
    assert profile.model.lower() == path.stem
    flat = [score for row in profile.scores for score in row]
    assert max(flat) > 0.5, "some head copies"
    assert sorted(flat)[len(flat) // 2] < 0.2, "most heads do not"


# -- start-up --------------------------------------------------------------------


def settle(request, model):
    return layer_budgets.resolve_allocator(
        request, parse_policy(request), lambda: model
    )


def test_the_shipped_profile_is_found_by_the_model(caplog):
    request = {"name": "duo-attention", "budget": 0.25}
    with caplog.at_level(logging.INFO, "vllm.kv_policy"):
        settled = settle(request, read_head_profile(SMOLLM2).fingerprint)
    allocator = parse_policy(settled).page_allocator()
    assert allocator.profile == SMOLLM2
    assert str(SMOLLM2) in caplog.records[0].message
    assert allocator.problems(30, 3) == []


def test_a_model_without_a_profile_is_refused():
    request = {"name": "duo-attention"}
    settled = parse_policy(settle(request, fingerprint())).page_allocator()
    (reason,) = settled.model_problems(fingerprint)
    assert codes_in(reason) == ("KVP116",)
    assert "rank-heads" in reason


def test_a_model_that_cannot_be_identified_is_refused():
    def unknown():
        raise KVPolicyError("[KVP628] no config.json")

    request = {"name": "duo-attention"}
    settled = layer_budgets.resolve_allocator(request, parse_policy(request), unknown)
    (reason,) = parse_policy(settled).page_allocator().model_problems(unknown)
    assert codes_in(reason) == ("KVP628",)


def test_a_profile_of_another_model_is_refused():
    allocator = make_allocator()
    assert allocator.model_problems(fingerprint) == []
    (reason,) = allocator.model_problems(lambda: fingerprint(hidden_size=128))
    assert codes_in(reason) == ("KVP116",)
    assert "hidden_size" in reason


def test_a_rank_with_a_part_of_the_heads_is_refused():
    assert make_allocator().problems(2, 2) == []
    for shape in ((2, 1), (1, 2)):
        (reason,) = make_allocator().problems(*shape)
        assert codes_in(reason) == ("KVP116",)


def test_sessions_depend_on_the_scores_and_not_on_the_path(tmp_path):
    write_head_profile(make_profile(), tmp_path / "p.json")
    of_file = parse_allocator({"name": "head-split", "profile": tmp_path / "p.json"})
    assert of_file.facts() == make_allocator().facts()
    other = make_profile(((0.2, 0.9), (0.5, 0.2)))
    other = parse_allocator({"name": "head-split", "profile": other})
    assert other.facts() != of_file.facts()
