"""Messages of one kind are logged ever more seldom."""

from __future__ import annotations

from vllm_kvplugins.log_throttle import LogThrottle


def test_the_first_tenth_and_hundredth_of_a_kind_are_said():
    seldom = LogThrottle()
    said = [seldom.format(f"a prompt of {n} tokens at 0.{n}") for n in range(1, 1001)]
    assert [n for n, text in enumerate(said, 1) if text] == [1, 10, 100, 1000]
    assert said[0] == "a prompt of 1 tokens at 0.1"
    assert said[99] == "a prompt of 100 tokens at 0.100 (request 100 of this kind)"


def test_kinds_are_counted_apart():
    seldom = LogThrottle()
    assert all(seldom.format(text) for text in ("a 1", "b 1"))
    assert not seldom.format("a 2")
