"""Conversations whose blocks are still on the device at the next turn."""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from scenarios_sessions import counts, directory, finish, settle
from texts import random_tokens
from tiny_model import VOCABULARY

Policy = dict[str, Any]
FIRST, QUESTION, ANSWER = 400, 60, 20  # tokens


class Parking(Driver):
    """Counts the pages that sessions copy into the pool.

    Attributes:
        copied: pages since the start.
    """

    def __init__(self, model: str, policy: Policy, **settings: Any) -> None:
        from vllm_kvplugins.sessions import stored_pages

        arguments = {"num_gpu_blocks_override": 400, "skip_tokenizer_init": False}
        arguments |= {"max_model_len": 4096} | settings
        super().__init__(make_llm(model, policy, **arguments))
        self.copied, copy = (
            0,
            getattr(stored_pages.copy_pages, "stock", stored_pages.copy_pages),
        )

        def counted(into: Any, ids: Any, *source: Any) -> None:
            self.copied += ids.numel() if into is self.runtime.heap.pages else 0
            copy(into, ids, *source)

        counted.stock = copy
        stored_pages.copy_pages = counted

    @property
    def parked(self) -> int:
        """Free blocks that hold sessions."""
        return int(self.manager.device_sessions.num_blocks)

    def idle(self) -> None:
        """Ended requests are saved and parked, and their blocks count as free."""
        settle(self)
        self.check_blocks()
        self.check_policy_state()
        directory(self).check_integrity()

    def ask(
        self,
        name: str,
        prompt: list[int],
        ends: list[int],
        salt: str = "alice",
        guide: list[int] | None = None,
        max_tokens: int = ANSWER,
    ) -> dict[str, Any]:
        """An answer, and the tokens and pages that its start needed."""
        before, pages = counts(self), self.copied
        self.add(name, prompt, max_tokens, False, ends, salt, guide)
        self.run()
        self.idle()
        counters = counts(self)
        return {
            "answer": self.tokens[name],
            "restored": counters["restored_tokens"] - before["restored_tokens"],
            "in_place": counters["device_hits"] - before["device_hits"],
            "copied": self.copied - pages,
        }

    def end(self) -> dict[str, Any]:
        """Check that no request holds a block; returns the counters."""
        finish(self)
        assert self.free_blocks == self.total_blocks
        return {
            "tracked": self.check_policy_state(),
            "preemptions": self.preemptions,
            "counts": counts(self),
        }


class Talk:
    """One conversation of one owner."""

    def __init__(
        self, driver: Parking, owner: str, seed: int, guide: list[int] | None = None
    ) -> None:
        self.driver, self.owner, self.seed, self.guide = driver, owner, seed, guide
        self.prompt = random_tokens(seed, FIRST, VOCABULARY)
        # EpiCache reads a history before the first question; FlowKV does not
        self.ends = [FIRST - 50] if guide is not None else []
        self.turns = 0

    def name(self) -> str:
        return f"{self.owner}-{self.turns}"

    def turn(self, guide: list[int] | None = None) -> dict[str, Any]:
        """Ask the next question; returns its answer."""
        guide = self.guide if guide is None else guide
        ends = self.ends if guide is None else self.ends[-1:]
        report = self.driver.ask(self.name(), self.prompt, ends, self.owner, guide)
        self.hear(report["answer"])
        return report

    def hear(self, answer: list[int]) -> None:
        """Append the answer to the history, and a new question."""
        self.turns += 1
        self.prompt = self.prompt + answer
        self.ends = [*self.ends, len(self.prompt)]
        seed = 1000 * self.seed + self.turns
        self.prompt = self.prompt + random_tokens(seed, QUESTION, VOCABULARY)

    def recomputed(self) -> list[int]:
        """The answer without any cached tokens."""
        ends = self.ends if self.guide is None else self.ends[-1:]
        name = f"{self.name()}-recomputed"
        report = self.driver.ask(name, self.prompt, ends, name, self.guide)
        assert not report["restored"]
        answer: list[int] = report["answer"]
        return answer


def turns(
    model: str, policy: Policy, guides: list[Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """One conversation with a turn for each guide."""
    driver = Parking(model, policy, **settings)
    talk = Talk(driver, "alice", 3, guides[0])
    report = [talk.turn(guide) for guide in guides]
    return {"turns": report, "parked": driver.parked} | driver.end()


def others(model: str, policy: Policy) -> dict[str, Any]:
    """Other requests need the blocks of two ended conversations:

    first some, then all.
    """
    settings = {"num_gpu_blocks_override": 60, "max_model_len": 59 * 32}
    driver = Parking(model, policy, async_scheduling=False, **settings)
    talks = [Talk(driver, owner, seed) for seed, owner in enumerate(("old", "new"), 1)]
    for _ in range(3):
        for talk in talks:
            talk.turn()
    parked = driver.manager.device_sessions
    report: dict[str, Any] = {"parked": _sessions(driver)}
    free = driver.total_blocks - driver.parked

    def want(name: str, blocks: int) -> None:
        """Run a request that holds this many blocks at once and leaves no session."""
        prompt = random_tokens(90 + blocks, 32 * blocks - 5, VOCABULARY)
        held: list[int] = []
        driver.add(name, prompt, 2, salt=name)
        while driver.busy:
            driver.step()
            held.append(len(driver.held_blocks()))
        assert max(held) == blocks
        directory(driver).check_integrity()
        (left,) = (s for s in directory(driver) if len(s.tokens) == len(prompt) + 1)
        directory(driver)._remove(left.session_id)
        driver.idle()

    want("some", free + 1)
    report["after some"] = _sessions(driver)
    want("all", driver.total_blocks)
    report["after all"] = _sessions(driver)
    assert parked.num_blocks == 0
    report["later"] = [
        {"recomputed": talk.recomputed()} | talk.turn() for talk in talks
    ]
    return report | driver.end()


def _sessions(driver: Parking) -> list[int]:
    """Tokens of the sessions that are parked, oldest first."""
    lengths = {s.session_id: len(s.tokens) for s in directory(driver)}
    return [lengths[i] for i in driver.manager.device_sessions.session_ids]


def odds(model: str, policy: Policy) -> dict[str, Any]:
    """Special cases, each with the answer without any cached tokens."""
    driver = Parking(model, policy)
    report: dict[str, Any] = {}

    def talk(owner: str) -> Talk:
        begun = Talk(driver, owner, len(report) + 5)
        begun.turn()
        begun.turn()
        return begun

    def again(of: Talk, name: str) -> None:
        expected = of.recomputed()
        report[name] = of.turn() | {"recomputed": expected}

    # takes over the blocks, writes to the last one, and is aborted
    of = talk("aborts")
    driver.add("gone", of.prompt, 300, turn_ends=of.ends, salt=of.owner)
    driver.step_until(lambda: len(driver.tokens["gone"]) >= 3)
    driver.abort(["gone"])
    driver.idle()
    # left a session of its own that starts with the same tokens
    again(of, "aborted")
    # takes over the blocks and loses them to preemption
    of = talk("loses")
    expected, before = of.recomputed(), counts(driver)["device_hits"]
    driver.add("loses", of.prompt, ANSWER, turn_ends=of.ends, salt=of.owner)
    driver.step_until(lambda: len(driver.tokens["loses"]) >= 3)
    assert counts(driver)["device_hits"] == before + 1
    driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    driver.idle()
    took = counts(driver)["device_hits"] - before
    report["preempted"] = {"answer": driver.tokens["loses"], "recomputed": expected}
    report["preempted"] |= {"in_place": took, "times": driver.preemptions}
    # two requests continue one session at once, and a third one later
    of = talk("twins")
    expected, before, pages = of.recomputed(), counts(driver), driver.copied
    for twin in ("one", "two"):
        driver.add(twin, of.prompt, ANSWER, turn_ends=of.ends, salt=of.owner)
    driver.run()
    driver.idle()
    counters = counts(driver)
    report["twins"] = {
        "answers": [driver.tokens["one"], driver.tokens["two"]],
        "recomputed": expected,
        "hits": counters["hits"] - before["hits"],
        "in_place": counters["device_hits"] - before["device_hits"],
        "copied": driver.copied - pages,
    }
    # the last question differs: only the history before it is reused
    of = talk("edits")
    old_prompt = of.prompt
    of.turn()
    of.prompt = [*old_prompt[:-20], *random_tokens(77, 20, VOCABULARY)]
    of.ends, of.turns = of.ends[:-1], 30
    again(of, "branched")
    # Another client sends the same conversation.
    of = talk("says")
    of.owner = "mallory"
    report["mallory"] = of.turn()
    # the session is dropped, then all sessions are
    of = talk("old")
    was = driver.parked
    while (oldest := directory(driver).oldest()) is not None:
        directory(driver).evict(oldest)
    report["dropped"] = {"was": was, "parked": driver.parked}
    again(of, "evicted")
    of = talk("reset")
    assert driver.parked
    assert driver.scheduler.reset_prefix_cache()
    report["reset"] = {"parked": driver.parked}
    again(of, "after reset")
    of = talk("all")
    assert driver.parked
    assert driver.scheduler.reset_prefix_cache(reset_connector=True)
    report["cleared"] = {"parked": driver.parked}
    again(of, "after clearing")
    return report | driver.end()
