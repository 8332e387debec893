"""Conversations over several requests, continued from what was saved."""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY

ANSWER = 21


class Talk:
    """One conversation: grows by an answer and a question with every request."""

    def __init__(self, driver: Driver, name: str, seed: int, salt: str | None) -> None:
        self.driver, self.name, self.salt = driver, name, salt
        self.seed = seed
        self.prompt: list[int] = []
        self.ends: list[int] = []
        self.turn = 0
        self.answers: list[list[int]] = []
        self.request: str | None = None

    def ask(self, tokens: int, answer: int = ANSWER) -> None:
        """Send the history and a new question of so many tokens."""
        from vllm import SamplingParams

        self.turn += 1
        question = random_tokens(100 * self.seed + self.turn, tokens, VOCABULARY)
        self.prompt = self.prompt + question
        self.request = f"{self.name}-{self.turn}"
        params = SamplingParams(
            temperature=0,
            max_tokens=answer,
            ignore_eos=True,
            detokenize=False,
            extra_args={"turn_ends": list(self.ends)} if self.ends else None,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(self.prompt)}
        if self.salt is not None:
            prompt["cache_salt"] = self.salt
        self.driver.tokens[self.request] = []
        self.driver.engine.add_request(self.request, prompt, params)

    def hear(self) -> None:
        """The answer becomes part of the history, and ends a turn."""
        assert self.request is not None
        answer = self.driver.tokens[self.request]
        self.answers.append(answer)
        self.prompt = self.prompt + answer
        self.ends.append(len(self.prompt))


def keeper(driver: Driver) -> Any:
    return driver.scheduler.connector.sessions.keeper


def counts(driver: Driver) -> dict[str, int]:
    from dataclasses import asdict

    sessions = driver.scheduler.connector.sessions
    return asdict(sessions.keeper.counts) if sessions else {}


def settle(driver: Driver) -> None:
    """Idle steps: what has ended is saved, and said to be."""
    for _ in range(3):
        driver.step()


def talks(
    model: str,
    policy: dict[str, Any],
    questions: list[int],
    number: int = 1,
    settings: dict[str, Any] | None = None,
    salts: list[str | None] | None = None,
) -> dict[str, Any]:
    """So many conversations at once, turn by turn.

    Returns:
        answers [conversation][turn], cached tokens [conversation][turn], lengths of
        prompts, counts, sessions kept and what is left in the worker.
    """
    arguments = {"num_gpu_blocks_override": 400} | (settings or {})
    driver = Driver(make_llm(model, policy, **arguments))
    salts = salts or [None] * number
    several = [Talk(driver, f"talk{i}", i + 1, salts[i]) for i in range(number)]
    prompts, cached = [], []
    for tokens in questions:
        for talk in several:
            talk.ask(tokens)
        driver.run()
        prompts.append([len(talk.prompt) for talk in several])
        cached.append([driver.cached.get(talk.request, 0) for talk in several])
        for talk in several:
            talk.hear()
        settle(driver)
        driver.check_blocks()
    sessions = driver.scheduler.connector.sessions
    if sessions:
        sessions.keeper.check_integrity()
    return {
        "answers": [talk.answers for talk in several],
        "prompts": prompts,
        "cached": cached,
        "counts": counts(driver),
        "sessions": len(sessions.keeper) if sessions else 0,
        "tracked": driver.check_policy_state(),
        "preemptions": driver.preemptions,
    }


def resident_or_restored(
    model: str, policy: dict[str, Any], prompt: int, first: int, more: int
) -> dict[str, Any]:
    """An answer in one request, and in two: the second begins with the first's."""
    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400))
    tokens = random_tokens(3, prompt, VOCABULARY)
    whole = _answer(driver, "whole", tokens, first + more)
    begun = _answer(driver, "begun", tokens, first)
    rest = _answer(driver, "begun", tokens + begun, more)
    return {
        "whole": whole,
        "parts": begun + rest,
        "cached": driver.cached["begun"],
        "counts": counts(driver),
        "tracked": driver.check_policy_state(),
    }


def _answer(driver: Driver, salt: str, tokens: list[int], most: int) -> list[int]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=most, ignore_eos=True, detokenize=False
    )
    prompt = {"prompt_token_ids": tokens, "cache_salt": salt}
    driver.engine.add_request(salt, prompt, params)
    driver.run()
    settle(driver)
    return driver.tokens[salt]
