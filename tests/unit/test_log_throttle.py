"""LogThrottle passes the 1st, 10th, 100th, … message of a kind."""

from __future__ import annotations

from vllm_kvplugins.log_throttle import LogThrottle


def test_passes_messages_one_ten_and_hundred():
    throttle = LogThrottle()
    passed = [
        throttle.format(f"a prompt of {n} tokens at 0.{n}") for n in range(1, 1001)
    ]
    assert [n for n, text in enumerate(passed, 1) if text] == [1, 10, 100, 1000]
    assert passed[0] == "a prompt of 1 tokens at 0.1"
    assert passed[99] == "a prompt of 100 tokens at 0.100 (request 100 of this kind)"


def test_counts_each_kind_separately():
    throttle = LogThrottle()
    assert all(throttle.format(text) for text in ("a 1", "b 1"))
    assert not throttle.format("a 2")


def test_digests_in_names_do_not_make_a_kind():
    """As of the temporary file of each session that cannot be written."""
    throttle = LogThrottle()
    names = [f"{number:032x}.{(7 * number):032x}.part" for number in range(1, 100)]
    texts = [throttle.format(f"[Errno 28] no space: {name}") for name in names]
    assert sum(text is not None for text in texts) == 2
    assert throttle.format("[Errno 28] no face: x.part") is not None
