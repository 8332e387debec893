"""The same requests on several ranks of tensor parallelism."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from driver import Driver, make_llm
from scenarios_sessions import Talk, counts, directory, settle
from scenarios_speculation import acceptance
from texts import random_tokens

# Padded to whole 64s, as vLLM does, it divides by 2 and 3.
VOCABULARY = 960
LENGTHS = {"short": 40, "long": 192, "odd": 211}
MAX_TOKENS = 12


def _parallel_llm(
    model: str, policy: dict[str, Any] | None, ranks: int, **settings: Any
) -> Any:
    return make_llm(
        model,
        policy,
        enable_prefix_caching=False,
        max_model_len=1024,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp" if ranks > 1 else None,
        num_gpu_blocks_override=64,
        skip_tokenizer_init=False,
        **settings,
    )


def on_ranks(model: str, ranks: int, policies: list[dict[str, Any] | None]) -> Any:
    """What happened under each policy."""
    rows = []
    for policy in policies:
        llm = _parallel_llm(model, policy, ranks)
        driver = Driver(llm)
        prompts = {
            name: random_tokens(seed, length, VOCABULARY)
            for seed, (name, length) in enumerate(LENGTHS.items())
        }
        result: dict[str, Any] = {"tokens": driver.generate(prompts, MAX_TOKENS)}
        if policy is not None:
            for _ in range(4):  # the workers hear that requests are gone
                driver.step()
            held = llm.collective_rpc("kv_policy_check_integrity")
            result |= {"compactions": driver.manager.compactions, "held": held}
        result["left"] = driver.total_blocks - driver.free_blocks
        rows.append(result)
        driver.core.model_executor.shutdown()
    return rows


def _conversations(
    model: str, policy: dict[str, Any], ranks: int, drafter: dict[str, Any] | None
) -> tuple[Any, Driver, list[Talk]]:
    """An engine, its driver, and a new conversation for each of ``LENGTHS``.

    Args:
        drafter: vLLM's setting, or None.
    """
    settings: dict[str, Any] = {}
    if drafter is not None:
        settings = {"disable_log_stats": False, "speculative_config": drafter}
    llm = _parallel_llm(model, policy, ranks, **settings)
    driver = Driver(llm)
    talks = [
        Talk(driver, name, seed, vocabulary=VOCABULARY)
        for seed, name in enumerate(LENGTHS)
    ]
    return llm, driver, talks


def drafted(
    model: str, ranks: int, cases: list[tuple[dict[str, Any], dict[str, Any] | None]]
) -> list[dict[str, Any]]:
    """Conversations of two turns, by policy and drafter.

    Args:
        cases: policy, and vLLM's setting for a drafter or None.

    Returns:
        Per case: answers by conversation and turn; tokens of the second turn that a
        session restored; drafts and accepted drafts, as they were after each turn;
        compactions; requests that the ranks still know; bytes of sessions by the
        metric and on each rank.
    """
    rows = []
    for policy, drafter in cases:
        llm, driver, talks = _conversations(model, policy, ranks, drafter)
        accepted = []
        for turn in range(2):
            for talk in talks:
                talk.ask(60 if turn else LENGTHS[talk.name])
            driver.run()
            settle(driver)
            for talk in talks:
                talk.hear()
            accepted.append(acceptance(llm) if drafter else {})
        row = {
            "answers": [talk.answers for talk in talks],
            "restored": [driver.cached.get(f"{name}-2", 0) for name in LENGTHS],
            "accepted": accepted,
            "compactions": driver.manager.compactions,
            "held": llm.collective_rpc("kv_policy_check_integrity"),
        }
        if policy.get("sessions", True):
            held = llm.collective_rpc("kv_policy_held_sessions")
            row["session_bytes"] = directory(driver).held_bytes
            row["session_bytes_of_ranks"] = [num_bytes for _, num_bytes in held]
        rows.append(row)
        driver.core.model_executor.shutdown()
    return rows


def turns(
    model: str,
    ranks: int,
    policy: dict[str, Any],
    questions: list[int],
    histories: list[Any] | None = None,
    drafter: dict[str, Any] | None = None,
    folder: str | None = None,
) -> dict[str, Any]:
    """Turns of several conversations, whose histories other engines began.

    Args:
        questions: their tokens, by turn.
        histories: as the last engine returned them; None: there are none.
        drafter: vLLM's setting, or None.
        folder: where sessions are written; None: there are none.

    Returns:
        Answers [conversation][turn], and histories; tokens that were computed before
        the new question, by turn and conversation; counts of sessions; drafts and how
        many were right; requests that the ranks still know.
    """
    had = len(list(Path(folder).glob("*/*.safetensors"))) if folder else 0
    llm, driver, talks = _conversations(model, policy, ranks, drafter)
    for talk, history in zip(talks, histories or [], strict=False):
        talk.prompt, talk.ends, talk.turn = history
    recomputed = []
    for question in questions:
        known = [len(talk.prompt) for talk in talks]
        for talk in talks:
            talk.ask(question)
        driver.run()
        for talk in talks:
            talk.hear()
        settle(driver)
        restored = [driver.cached.get(str(talk.request), 0) for talk in talks]
        recomputed.append([k - r for k, r in zip(known, restored, strict=True)])
    if folder is not None:
        _wait_for_files(Path(folder), had + len(questions) * len(talks) * ranks)
        directory(driver).check_integrity()
    row = {
        "answers": [talk.answers for talk in talks],
        "histories": [[talk.prompt, talk.ends, talk.turn] for talk in talks],
        "recomputed": recomputed,
        "counts": counts(driver),
        "accepted": acceptance(llm) if drafter else {},
        "held": llm.collective_rpc("kv_policy_check_integrity"),
    }
    driver.core.model_executor.shutdown()
    return row


def _wait_for_files(folder: Path, count: int) -> None:
    """Wait until all ranks have written their files; an idle engine reports none."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*/*.safetensors"))) < count:
        assert time.monotonic() < deadline, "files are not written"
        time.sleep(0.05)
