"""Images in prompts, on a tiny Qwen2.5-VL with M-RoPE and a real vision tower."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from architectures import IMAGE_TOKENS, write_vision
from harness import run_scenario
from policy_settings import SMALL_BUDGETS, configure
from scenarios_images import FIRST_IMAGE_POSITION, PROMPT_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SEED = 7
SETTINGS = SMALL_BUDGETS | {"skip_layers": 0}
NAMES = ("full", "snapkv", "icecache")
DROPS = "snapkv"
# Policies that undo RoPE or run tokens of their own do not support M-RoPE.
REFUSED = {"expected-attention": "KVP031", "kvzip": "KVP040", "infinipot": "KVP040"}


@functools.cache
def found() -> dict[str, Any]:
    """Policy -> what happened."""
    print("seed of the model", SEED)
    policies = {name: configure(name, SETTINGS) for name in (*NAMES, *REFUSED)}
    policies[DROPS]["sessions"] = True
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_vision(Path(folder, "model"), SEED))
        result: dict[str, Any] = run_scenario(
            "scenarios_images:images",
            {"model": model, "policies": {"stock": None, **policies}},
        )
    return result


@pytest.mark.proves(request="an image in the prompt (M-RoPE)", policy="name")
@pytest.mark.parametrize("name", NAMES)
def test_images_are_told_apart(name):
    """`full` equals stock; a prefix hit ends before another image; blocks are freed
    as planned and none leaks.
    """
    run, stock = found()[name], found()["stock"]
    for one in (run, stock):
        assert "error" not in one, one["error"]
    tokens, cached = run["tokens"], run["cached"]
    if name == "full":
        assert tokens == stock["tokens"]
        assert cached == stock["cached"]
    whole_blocks = FIRST_IMAGE_POSITION // 32 * 32
    assert 0 < cached["other-image"] <= whole_blocks
    assert cached["same"] >= whole_blocks
    assert tokens["same"] == tokens["first"] == tokens["one-together"]
    assert tokens["other-image"] == tokens["other-image-alone"]
    assert tokens["other-image"] == tokens["two-together"]
    answers = {tuple(tokens[f"{n}-together"]) for n in ("text", "one", "two")}
    assert len(answers) == 3, "the image changes nothing"
    wrong = [pair for pair in run["held"] if pair[0] != pair[1]]
    assert run["held"]
    assert not wrong
    assert run["left"] == run["tracked"] == run["unscored"] == 0
    assert (run["compactions"] >= 7) == (name != "full")


def test_image_tokens_are_scored_like_others():
    kept = set(found()[DROPS]["kept"])
    image = range(FIRST_IMAGE_POSITION, FIRST_IMAGE_POSITION + IMAGE_TOKENS)
    before = set(range(PROMPT_TOKENS))
    assert 0 < len(kept & set(image)) < IMAGE_TOKENS
    assert len(kept & (before - set(image))) > 0


def test_prompts_with_images_neither_start_nor_continue_a_session():
    """Nor does text with the same token ids continue one, or the reverse."""
    run = found()[DROPS]
    assert run["image"] == {"hits": 0, "saved": 0}
    assert run["image again"] == {"hits": 0, "saved": 0}
    assert run["text after image"] == {"hits": 0, "saved": 1}
    assert run["image after text"] == {"hits": 0, "saved": 1}
    assert run["text again"] == {"hits": 1, "saved": 2}, "sessions are on"


@pytest.mark.proves(
    request="an image in the prompt (M-RoPE)", policy="name", refused="code"
)
@pytest.mark.parametrize(("name", "code"), REFUSED.items())
def test_policies_that_need_text_positions_are_refused(name, code):
    """Refused at start-up, with the reason."""
    kind, message = found()[name]["error"]
    assert kind == "KVPolicyError"
    assert f"[{code}]" in message
