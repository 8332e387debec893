"""Speculative decoding on the tiny model: an engine without it, then one with it."""

from __future__ import annotations

import random
from typing import Any

import scenarios_fuzz
import scenarios_sessions
import torch
from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY

_DRAFTS = 3
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": _DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
_QUESTION = 20  # tokens of the last turn
_KEY = 24  # first tokens of a prompt that tell it from all others


class Oracle:
    """Proposes the tokens that follow, some of them wrong.

    Replaces the lookup of n-grams: a model with random weights repeats so little that
    the lookup would hardly ever be right.
    """

    def __init__(self, driver: Driver, seed: int) -> None:
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._rng = random.Random(seed)
        runner = driver.worker.model_runner
        if hasattr(runner, "req_states"):
            self._states = runner.req_states
            runner.speculator.propose = self._propose_v2
        else:
            runner.drafter.propose = self._propose_v1

    def _propose_v1(
        self, count: int, sampled: Any, lengths: Any, tokens: Any, **unused: Any
    ) -> list[list[int]]:
        drafts: list[list[int]] = []
        for row, new in enumerate(sampled):
            known = tokens[row, : lengths[row]].tolist()
            drafts.append(self._drafts(known, count) if new else [])
        return drafts

    def _propose_v2(self, batch: Any, *_: Any, **unused: Any) -> torch.Tensor:
        """A fixed number of drafts per row; where none is known, a wrong one."""
        states = self._states
        drafts = torch.zeros(batch.num_reqs, _DRAFTS, dtype=torch.long)
        for row, state in enumerate(batch.idx_mapping.tolist()):
            length = int(states.total_len.gpu[state])
            known = states.all_token_ids.gpu[state, :length].tolist()
            after = self._drafts(known, _DRAFTS)
            drafts[row, : len(after)] = torch.tensor(after, dtype=torch.long)
        return drafts

    def _drafts(self, known: list[int], count: int) -> list[int]:
        answer = self._answers.get(tuple(known[:_KEY]), [])
        after = answer[len(known) : len(known) + count]
        return [self._spoilt(token) for token in after]

    def _spoilt(self, token: int) -> int:
        wrong = self._rng.random() < 0.25
        return self._rng.randrange(3, VOCABULARY) if wrong else token

    def learn(self, sequence: list[int]) -> None:
        """Propose the tokens of this sequence to the request that starts with it."""
        self._answers[tuple(sequence[:_KEY])] = sequence


def prompts(seed: int, lengths: list[int]) -> dict[str, list[int]]:
    """Prompts that differ from their first tokens on."""
    return {
        f"p{length}": random_tokens(seed + length, length, VOCABULARY)
        for length in lengths
    }


def acceptance(llm: Any) -> dict[str, int]:
    """vLLM's counters of drafts."""
    values = {metric.name: metric for metric in llm.get_metrics()}
    names = {"drafts": "draft_tokens", "accepted": "accepted_tokens"}
    return {
        name: int(values[f"vllm:spec_decode_num_{long}"].value)
        for name, long in names.items()
    }


def speculate(
    model: str,
    policy: dict[str, Any] | None,
    seed: int,
    lengths: list[int],
    max_tokens: int,
    drafter: dict[str, Any] | None = None,
    compares_stock: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Tokens without and with speculation, all at once and one by one.

    Args:
        drafter: vLLM's setting; None: an oracle, which knows the tokens.
        compares_stock: the engine without speculation has no policy either.

    Returns:
        Per kind of run, tokens by request; drafts and accepted drafts; preemptions;
        the most blocks that each request held, and the bounds of its plan; names of
        the attention backends of the drafter's layers.
    """
    sent = prompts(seed, lengths)
    settings = {"skip_tokenizer_init": False, "disable_log_stats": False} | settings
    plain = Driver(make_llm(model, None if compares_stock else policy, **settings))
    expected = _generate(plain, sent, max_tokens)
    llm = make_llm(model, policy, speculative_config=drafter or NGRAM, **settings)
    driver = Driver(llm)
    if drafter is None:
        oracle = Oracle(driver, seed)
        for name, prompt in sent.items():
            oracle.learn(prompt + expected[name])
    held, together = _watched(driver, sent, max_tokens)
    alone = {}
    for name, prompt in sent.items():
        alone |= _generate(driver, {f"{name}-alone": prompt}, max_tokens)
    return {
        "plain": expected,
        "together": together,
        "alone": {name: alone[f"{name}-alone"] for name in sent},
        "held": held,
        "compactions": driver.manager.compactions,
        "preemptions": driver.preemptions,
        "runner": "V2" if hasattr(driver.worker.model_runner, "req_states") else "V1",
        "draft_backends": _draft_backends(driver),
        **acceptance(llm),
        **_left_behind(driver),
    }


def _draft_backends(driver: Driver) -> list[str]:
    context = getattr(driver.worker, "kv_policy", None)
    names = context.draft_layers if context else ()
    config = driver.worker.vllm_config.compilation_config
    return [config.static_forward_context[name].attn_backend.__name__ for name in names]


def _add(driver: Driver, sent: dict[str, list[int]], max_tokens: int) -> None:
    """Send prompts; those of conversations end a turn before the question."""
    policy = getattr(driver.manager.kv_cache_spec, "policy", None)
    turns = policy.turns if policy else None
    patched = random_tokens(9, 40, VOCABULARY) if turns and turns.history_only else None
    for name, prompt in sent.items():
        ends = [len(prompt) - _QUESTION] if turns else None
        driver.add(name, prompt, max_tokens, turn_ends=ends, patched=patched)


def _generate(
    driver: Driver, sent: dict[str, list[int]], max_tokens: int
) -> dict[str, list[int]]:
    _add(driver, sent, max_tokens)
    driver.run()
    return {name: driver.tokens[name] for name in sent}


def _watched(
    driver: Driver, sent: dict[str, list[int]], max_tokens: int
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Run all prompts together.

    Returns:
        By request, the most blocks that it held, and the most that its plan allows;
        tokens by request.
    """
    _add(driver, sent, max_tokens)
    held: dict[str, list[int]] = {}
    while driver.busy:
        driver.step()
        driver.check_blocks()
        driver.check_policy_state()
        for request in driver.scheduler.running:
            blocks = driver.manager.req_to_blocks[request.request_id]
            now = sum(not block.is_null for block in blocks)
            most, _ = held.get(request.request_id.split("-")[0], (0, 0))
            # With room for the drafts of the step that ended, and of the last token.
            plan, ahead = driver.manager.plans.of(request), driver.lookahead_tokens
            bound = plan.peak_blocks(request.num_tokens + _DRAFTS, slots_ahead=ahead)
            held[request.request_id.split("-")[0]] = [max(most, now), bound]
    return held, {name: driver.tokens[name] for name in sent}


def _left_behind(driver: Driver) -> dict[str, int]:
    driver.step()  # the worker hears of the last requests only now
    driver.check_blocks()
    return {
        "tracked": driver.check_policy_state(),
        "held_blocks": len(driver.held_blocks()),
    }


def talks(
    model: str, policy: dict[str, Any], questions: list[int], number: int, seed: int
) -> dict[str, Any]:
    """Conversations that continue sessions, without and with speculation."""
    plain = scenarios_sessions.talks(model, policy, questions, number)
    drivers = []

    def prepare(driver: Driver) -> None:
        drivers.append(driver)
        drafter = Oracle(driver, seed)
        for tokens, *_ in plain["histories"]:
            drafter.learn(tokens)

    settings = {"speculative_config": NGRAM, "disable_log_stats": False}
    run = scenarios_sessions.talks(
        model, policy, questions, number, settings, prepare=prepare
    )
    return {"plain": plain, "speculating": run, **acceptance(drivers[0].llm)}


def drafted_talks(
    model: str,
    policy: dict[str, Any],
    drafter: dict[str, Any],
    settings: dict[str, Any] | None = None,
    evicts_behind: int | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Conversations with a drafter.

    Args:
        evicts_behind: after each turn, vLLM's prefix cache keeps the first so many
            blocks of a request and no others; None: it keeps all.
        arguments: of ``scenarios_sessions:talks``.

    Returns:
        What ``talks`` returns; per turn, drafts and accepted drafts since the start;
        the model runner.
    """
    turns: list[dict[str, int]] = []
    runners: list[str] = []
    first_blocks: set[int] = set()

    def prepare(driver: Driver) -> None:
        free = driver.manager.pop_blocks_for_free

        def noted(request_id: str) -> list[Any]:
            blocks = driver.manager.req_to_blocks.get(request_id, ())
            first_blocks.update(b.block_id for b in blocks[: evicts_behind or 0])
            freed: list[Any] = free(request_id)
            return freed

        driver.manager.pop_blocks_for_free = noted

    def after_turn(driver: Driver) -> None:
        if evicts_behind is not None:
            pool = driver.scheduler.kv_cache_manager.block_pool
            cached = {b.block_id for b in pool.blocks if b.block_hash is not None}
            assert cached & first_blocks, "the prefix is not in the prefix cache"
            pool.evict_blocks(cached - first_blocks)
        turns.append(acceptance(driver.llm))
        is_v2 = hasattr(driver.worker.model_runner, "req_states")
        runners.append("V2" if is_v2 else "V1")

    drafts = {"speculative_config": drafter, "disable_log_stats": False}
    settings = {"skip_tokenizer_init": False, **drafts, **(settings or {})}
    run = scenarios_sessions.talks(
        model,
        policy,
        settings=settings,
        prepare=prepare,
        after_turn=after_turn,
        **arguments,
    )
    return run | {"turns": turns, "runner": runners[0]}


def drafted_odds(
    model: str, policy: dict[str, Any], drafter: dict[str, Any]
) -> dict[str, Any]:
    """``scenarios_sessions:odds`` with a drafter, with drafts and accepted drafts."""
    settings = {"speculative_config": drafter, "disable_log_stats": False}
    return scenarios_sessions.odds(
        model,
        policy,
        settings | {"skip_tokenizer_init": False},
        at_end=lambda driver: acceptance(driver.llm),
    )


def stock_acceptance(
    model: str,
    drafter: dict[str, Any],
    seed: int,
    lengths: list[int],
    max_tokens: int,
    **settings: Any,
) -> dict[str, int]:
    """Drafts and accepted drafts without a policy, in the steps of ``speculate``."""
    settings |= {"skip_tokenizer_init": False, "disable_log_stats": False}
    settings |= {"speculative_config": drafter, "async_scheduling": False}
    llm = make_llm(model, None, **{"max_model_len": 4096, **settings})
    driver, sent = Driver(llm), prompts(seed, lengths)
    driver.generate(sent, max_tokens)
    for name, prompt in sent.items():
        driver.generate({f"{name}-alone": prompt}, max_tokens)
    return acceptance(llm)


def fuzz(
    model: str,
    policy: dict[str, Any],
    drafter: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, int]:
    """Random traffic of an engine that looks n-grams up, or has a drafter."""
    llms: list[Any] = []
    settings = {"speculative_config": drafter or NGRAM, "disable_log_stats": False}
    counts = scenarios_fuzz.fuzz(
        model, policy, started=llms.append, **settings, **arguments
    )
    return counts | acceptance(llms[0])
