"""Utterances of chat messages:

which lines are speech, and which content is not text.
"""

from __future__ import annotations

import random

import pytest

from vllm_kvplugins.episodes.utterances import (
    NotText,
    Utterance,
    dialogue_text,
    utterances_of,
)


def user(content):
    return {"role": "user", "content": content}


def said(text):
    return [(u.speaker, u.text) for u in utterances_of([user(text)])]


def test_a_message_is_one_utterance_of_its_role():
    messages = [
        {"role": "system", "content": "You help."},
        user(" Hi there.\nHow are you? \n"),
        {"role": "assistant", "content": "Fine."},
    ]
    assert utterances_of(messages) == [
        Utterance("system", "You help."),
        Utterance("user", "Hi there.\nHow are you?"),
        Utterance("assistant", "Fine."),
    ]


@pytest.mark.parametrize("content", ["", " \n\t", None, [], ["", " "]])
def test_empty_messages_give_no_utterance(content):
    assert utterances_of([user(content), user("x")]) == [Utterance("user", "x")]


def test_no_messages_give_no_utterances():
    assert utterances_of([]) == []


def test_parts_of_text_are_joined_whatever_their_kind():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    assert said([*parts, {"text": "d"}]) == [("user", "a\nb\nc\nd")]
    assert said(iter(parts)) == [("user", "a\nb\nc")]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (user([{"type": "text", "text": "a"}, {"type": "image_url"}]), "'image_url'"),
        (user([{"type": "input_audio", "text": "a"}]), "'input_audio'"),
        (user([{"type": "text", "text": 3}]), "'text'"),
        (user([{}]), "'text'"),
        (user([7]), "'int'"),
        (user(7), "a int"),
        (user(b"bytes"), "a bytes"),
        (user({"text": "a"}), "a dict"),
        ({"content": "a"}, "is not {'role'"),
        ({"role": 1, "content": "a"}, "is not {'role'"),
        ("text", "is not {'role'"),
    ],
)
def test_what_is_no_text_is_said_with_its_place(message, words):
    with pytest.raises(NotText) as error:
        utterances_of([user("first"), message])
    assert isinstance(error.value, ValueError)
    assert words in str(error.value)
    assert "message 1" in str(error.value)


# -- dialogues in one message --------------------------------------------------------

SPLIT = {
    "two lines": ("Ann: hi\nBob: hello", [("Ann", "hi"), ("Bob", "hello")]),
    "blank lines do not count": (
        "Ann: hi\n\n\n\nBob: hello\n",
        [("Ann", "hi"), ("Bob", "hello")],
    ),
    "lines without a name go on": (
        "Ann: hi\nthere\nBob: at 10:30, see http://x.y: nice\nAnn: ok",
        [
            ("Ann", "hi\nthere"),
            ("Bob", "at 10:30, see http://x.y: nice"),
            ("Ann", "ok"),
        ],
    ),
    "what stands above is the role's": (
        "Our chat of 8 May\nAnn: hi\nBob: hello\nAnn: so",
        [("user", "Our chat of 8 May"), ("Ann", "hi"), ("Bob", "hello"), ("Ann", "so")],
    ),
    "names of several words": (
        "Dr. Jane van O'Neil: hi\nSpeaker 2: hello\nDr. Jane van O'Neil: so",
        [
            ("Dr. Jane van O'Neil", "hi"),
            ("Speaker 2", "hello"),
            ("Dr. Jane van O'Neil", "so"),
        ],
    ),
    "roles, though small": (
        "user: hi\nassistant: hello\nuser: so",
        [("user", "hi"), ("assistant", "hello"), ("user", "so")],
    ),
    "other scripts": (
        "小明：你好\n小红：你好\nЖеня: да\n小明：好",
        [("小明", "你好"), ("小红", "你好"), ("Женя", "да"), ("小明", "好")],
    ),
    "three who come back": (
        "Ann: a\nBob: b\nCid: c\nAnn: d",
        [("Ann", "a"), ("Bob", "b"), ("Cid", "c"), ("Ann", "d")],
    ),
    "a note within a dialogue": (
        "Ann: a\nNote: she smiles\nBob: b\nAnn: c",
        [("Ann", "a\nNote: she smiles"), ("Bob", "b"), ("Ann", "c")],
    ),
}


@pytest.mark.parametrize("case", SPLIT)
def test_a_pasted_dialogue_is_split(case):
    text, expected = SPLIT[case]
    assert said(text) == expected


WHOLE = {
    "one line": "Ann: hi",
    "one line and prose": "Ann: hi\nthat was all\nthat she said",
    "half of the lines": "Ann: hi\nBob: hello\nand then\nthey left",
    "notes in prose": "Note: read this.\nNote: and this.\nWarning: hot.",
    "a list of keys": "Name: Bob\nAge: seven\nCity: Rome",
    "keys in small letters": "name: bob\nhost: here\nname: eve\nhost: there",
    "python": "try: pass\nelse: pass\nelse: pass\nx = d[1: 2]",
    "code": "    Foo: int = 1\n    Foo: int = 2\nstd::swap(a, b)\nA::b: c\nA::b: d",
    "addresses": "http://a.b/c\nhttps://a.b/d\nhttp: //a\nhttp: //b",
    "times": "10:30 tea\n11:00 coffee\n12: lunch\n12: nap",
    "a log": "INFO: up\nERROR: down\nINFO: up again",
    "nothing said": "Ann:\nBob:\nAnn: ",
    "no space": "Ann:hi\nBob:hello\nAnn:so",
    "a letter": "From: ann\nTo: bob\nSubject: tea\nDate: today",
    "long beginnings": "We all met at noon: x\nWe all met at noon: y",
    "numbers": "1. First: x\n2. Second: y\n1. First: z",
    "bullets": "- Ann: x\n- Bob: y\n- Ann: z",
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_only_looks_like_a_dialogue_stays_whole(case):
    assert said(WHOLE[case]) == [("user", WHOLE[case].strip())]


def test_a_dialogue_s_text_is_read_back():
    utterances = [
        Utterance("Ann", "hi"),
        Utterance("Bob", "a\nb"),
        Utterance("Ann", "ok"),
    ]
    assert utterances_of([user(dialogue_text(utterances))]) == utterances


@pytest.mark.parametrize("seed", range(5))
def test_a_history_s_beginning_gives_the_beginning_of_its_utterances(seed):
    rng = random.Random(seed)
    texts = [*WHOLE.values(), *(text for text, _ in SPLIT.values()), "", None]
    messages = [
        {"role": rng.choice(["user", "assistant"]), "content": rng.choice(texts)}
        for _ in range(30)
    ]
    whole = utterances_of(messages)
    for end in range(31):
        begun = utterances_of(messages[:end])
        assert begun == whole[: len(begun)], f"seed {seed}"
