"""Random arrivals, aborts, preemptions and prefix hits on the tiny model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY

# Where two tokens are this close, batch shapes may decide which one is greedy.
_CLOSE = 1e-3
_MOST_TOKENS = 780  # of one request, prompt and answer; must fit the pool
_DRAIN_EVERY = 50  # rounds
_SAMPLES = 6  # requests compared with a run of their own, per drain


@dataclass
class Sent:
    prompt: list[int]
    max_tokens: int
    shared_prefix: int | None = None
    aborted: bool = False


class Fuzzer:
    """Rounds against one engine; every check raises.

    Attributes:
        counts: what happened, so that the test can see that it did happen.
        compares_preempted: compare tokens of preempted requests too.
        shortest: tokens of the shortest prompts.
        shares: half of the requests name their first part, which they have in common
            with others, as shared prefix.
    """

    def __init__(
        self,
        driver: Driver,
        seed: int,
        samples: int = _SAMPLES,
        shares: bool = False,
    ) -> None:
        self.driver = driver
        self.samples = samples
        self.shares = shares
        self.compares_preempted = True
        self.shortest = 1
        self.rng = random.Random(seed)
        self.prefixes = [random_tokens(seed + i, 500, VOCABULARY) for i in range(3)]
        self.sent: dict[str, Sent] = {}
        self.number = 0
        self.counts = dict.fromkeys(
            ("requests", "aborts", "hits", "compared", "differed", "close", "shared"),
            0,
        )

    def round(self) -> None:
        """Some requests come, some go, some steps pass."""
        rng, driver = self.rng, self.driver
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            if self._alive() and len(self._alive()) >= 12:
                break
            self._send()
        for _ in range(rng.randint(1, 8)):
            if driver.busy:
                driver.step()
            driver.check_blocks()
        if rng.random() < 0.05:  # vLLM preempts all requests
            driver.llm.reset_prefix_cache(reset_running_requests=True)
            driver.check_blocks()
        alive = self._alive()
        if alive and rng.random() < 0.2:
            self._abort(rng.choice(alive))
            driver.check_blocks()
        self._check_state()

    def drain(self) -> None:
        """Run all requests to their end, check for leaks, and compare tokens."""
        driver = self.driver
        driver.run()
        driver.step()  # the worker hears of the last ones only now
        driver.check_blocks()
        assert driver.free_blocks == driver.total_blocks, "blocks leaked"
        assert not driver.scheduler.requests, "requests leaked in the scheduler"
        assert not driver.manager.req_to_blocks, "block lists leaked"
        if hasattr(driver.manager, "freed_compactions"):
            assert not driver.manager.freed_compactions, "plan state leaked"
            assert driver.check_policy_state() == 0, "requests leaked in the worker"
            assert driver.runtime.tables.num_slot_indices == 0, "seats leaked"
        self.counts["hits"] += sum(driver.cached.get(name, 0) > 0 for name in self.sent)
        self._compare()
        self.sent.clear()

    # -- parts ------------------------------------------------------------------

    def _alive(self) -> list[str]:
        return [
            name
            for name, sent in self.sent.items()
            if not sent.aborted and name not in self.driver.finished
        ]

    def _send(self) -> None:
        rng = self.rng
        head = rng.choice(self.prefixes)[: rng.choice((0, 40, 130, 200, 333))]
        seed, length = rng.randrange(1 << 30), rng.randint(self.shortest, 120)
        tail = random_tokens(seed, length, VOCABULARY)
        prompt = head + tail
        # Long answers make the pool run dry, and so preempt.
        max_tokens = min(_MOST_TOKENS - len(prompt), rng.choice((20, 80, 400)))
        sent = Sent(prompt, rng.randint(1, max_tokens))
        if self.shares and rng.random() < 0.5:
            sent.shared_prefix = len(head)
            self.counts["shared"] += len(head) >= self.driver.block_size
        name = f"r{self.number}"
        self.number += 1
        self.counts["requests"] += 1
        self.sent[name] = sent
        self._ask(name, sent)

    def _ask(self, name: str, sent: Sent, margins: bool = False) -> None:
        """All but a few tokens of a prompt are history, for those who want to know."""
        spec = self.driver.manager.kv_cache_spec
        policy = getattr(spec, "policy", None)
        history = len(sent.prompt) - 20
        turns = policy.turns if policy else None
        has_history = turns is not None and turns.history_only and history > 0
        ends = [history] if has_history else None
        self.driver.add(
            name,
            sent.prompt,
            sent.max_tokens,
            margins,
            ends,
            shared_prefix=sent.shared_prefix,
        )

    def _abort(self, name: str) -> None:
        self.driver.abort([name])
        self.sent[name].aborted = True
        self.counts["aborts"] += 1

    def _check_state(self) -> None:
        driver = self.driver
        if not hasattr(driver.manager, "freed_compactions"):
            return
        driver.check_policy_state()
        live = set(driver.scheduler.requests)
        assert set(driver.manager.req_to_blocks) <= live, "blocks of dead requests"
        # One that ended in the last step is forgotten with the next.
        leaked = set(driver.runtime._requests) - live
        assert leaked <= set(driver.scheduler.finished_req_ids), (
            "state of dead requests"
        )

    def _compare(self) -> None:
        """Tokens of some requests against a run alone without cached prefixes."""
        driver = self.driver
        names = [
            name
            for name in self.sent
            if driver.tokens[name]
            and (self.compares_preempted or not _was_preempted(name, driver))
        ]
        for name in self.rng.sample(names, min(self.samples, len(names))):
            sent, actual = self.sent[name], driver.tokens[name]
            driver.llm.reset_prefix_cache()
            alone = f"{name}-alone"
            self._ask(alone, sent, margins=True)
            driver.run()
            expected = driver.tokens[alone]
            assert driver.cached[alone] == 0
            if not sent.aborted:
                assert len(actual) == len(expected) == sent.max_tokens
            self.counts["compared"] += 1
            first = _first_difference(actual, expected)
            if first is None:
                continue
            if driver.margins[alone][first] < _CLOSE:
                self.counts["close"] += 1
                continue
            self.counts["differed"] += 1
            print(
                f"{name}: token {first} of a {len(sent.prompt)}-token prompt is "
                f"{actual[first]}, alone {expected[first]} with a lead of "
                f"{driver.margins[alone][first]:.4f}"
            )


def _was_preempted(name: str, driver: Driver) -> bool:
    # vLLM appends to the names of requests.
    return any(each.startswith(f"{name}-") or each == name for each in driver.preempted)


def _first_difference(actual: list[int], expected: list[int]) -> int | None:
    for index, (a, b) in enumerate(zip(actual, expected, strict=False)):
        if a != b:
            return index
    return None


def fuzz(
    model: str,
    policy: dict[str, Any] | None,
    seed: int,
    rounds: int,
    blocks: int,
    compares_preempted: bool = True,
    shortest: int = 1,
    shares: bool = False,
    started: Callable[[Any], None] = lambda llm: None,
    **settings: Any,
) -> dict[str, int]:
    """``rounds`` rounds in a pool of ``blocks``; returns what happened.

    Args:
        shares: see :class:`Fuzzer`.
        started: called with the engine before the first round.
    """
    arguments: dict[str, Any] = {
        "num_gpu_blocks_override": blocks,
        "max_model_len": 800,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
    }
    llm = make_llm(model, policy, **(arguments | settings))
    started(llm)
    driver = Driver(llm)
    fuzzer = Fuzzer(driver, seed, shares=shares)
    fuzzer.compares_preempted, fuzzer.shortest = compares_preempted, shortest
    for number in range(1, rounds + 1):
        fuzzer.round()
        if number % _DRAIN_EVERY == 0 or number == rounds:
            fuzzer.drain()
    counts = fuzzer.counts
    counts["rounds"] = rounds
    counts["preemptions"] = driver.preemptions
    counts["preempted_compacted"] = driver.preempted_compacted
    counts["compactions"] = getattr(driver.manager, "compactions", 0)
    return counts
