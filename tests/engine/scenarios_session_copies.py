"""Conversations whose sessions slow threads copy while other requests compute."""

from __future__ import annotations

import time
from typing import Any

from driver import Driver, make_llm
from scenarios_sessions import _ask, counts, directory, finish, talks
from texts import random_tokens
from tiny_model import VOCABULARY


def talks_saved_slowly(delay_s: float = 0.02, **arguments: Any) -> dict[str, Any]:
    """Conversations whose sessions a slow thread copies.

    Returns:
        As ``talks``, with the largest number of sessions that were being saved when a
        step ended that computed something.
    """
    most = [0]

    def count(driver: Driver) -> None:
        process = driver.scheduler.connector.sessions.process
        saving = driver.scheduler.connector.sessions._saving

        def processed(acks: Any) -> None:
            if driver.scheduler.running:
                most[0] = max(most[0], len(saving))
            process(acks)

        driver.scheduler.connector.sessions.process = processed

    _save_slowly(delay_s)
    return talks(**arguments, prepare=count) | {"most_saving": most[0]}


def _save_slowly(delay_s: float) -> None:
    """Let a thread copy every session, and sleep before it begins."""
    from vllm_kvplugins.sessions.store import SessionStore
    from vllm_kvplugins.sessions.transfer import PendingSave

    init, finish_copy = SessionStore.__init__, PendingSave.finish

    def copies_nothing_at_once(store: Any, *args: Any, **kwargs: Any) -> None:
        init(store, *args, **kwargs, copied_at_once_bytes=0)

    def slowly(pending: Any) -> Any:
        time.sleep(delay_s)
        return finish_copy(pending)

    SessionStore.__init__ = copies_nothing_at_once  # type: ignore[method-assign]
    PendingSave.finish = slowly  # type: ignore[method-assign]


def reset_while_saving(
    model: str, policy: dict[str, Any], has_command: bool
) -> dict[str, Any]:
    """A conversation whose engine resets its prefix cache while a session is saved.

    Another request then fills the blocks.

    Args:
        has_command: whether the workers know that they are to save it.
    """
    _save_slowly(0.5)
    settings = {"num_gpu_blocks_override": 40, "max_model_len": 1150}
    driver = Driver(make_llm(model, policy, **settings))
    first = random_tokens(1, 400, VOCABULARY)
    driver.add("first", first, 12, turn_ends=[], salt="one")
    driver.run()
    if has_command:
        driver.step()
    report: dict[str, Any] = {
        "saving": len(driver.scheduler.connector.sessions._saving),
        "was_reset": driver.scheduler.reset_prefix_cache(),
        "known": directory(driver).num_sessions,
    }
    other = random_tokens(2, 1000, VOCABULARY)
    driver.add("other", other, 12, turn_ends=[], salt="two")
    driver.run()
    history = [*first, *driver.tokens["first"]]
    second, ends = [*history, *random_tokens(3, 60, VOCABULARY)], [len(history)]
    tokens, report["restored"] = _ask(driver, "second", second, ends, "one", 12)
    finish(driver)
    alone, _ = _ask(driver, "alone", second, ends, "three", 12)
    finish(driver)
    driver.check_blocks()
    report |= {"tokens": tokens, "alone": alone, "failures": counts(driver)["failures"]}
    return report | {"tracked": driver.check_policy_state()}


def talks_placed(delay_s: float = 0.02, **arguments: Any) -> dict[str, Any]:
    """Conversations whose sessions a slow thread copies to the device.

    No session stays on the device, and even small ones are copied ahead.

    Returns:
        As ``talks``, with the number of sessions that requests have continued in place,
        and of steps that computed something while one was copied.
    """
    from vllm_kvplugins.sessions.transfer import PendingPlacement

    finish, counted = PendingPlacement.finish, {"in_place": 0, "meanwhile": 0}

    def slowly(pending: Any) -> Any:
        time.sleep(delay_s)
        return finish(pending)

    def prepare(driver: Driver) -> None:
        sessions = driver.scheduler.connector.sessions
        sessions._min_placed_bytes = 0
        sessions._manager.device_sessions.add = lambda *arguments: None
        load, process = sessions.directory.load, sessions.process

        def loaded(match: Any, request: str, prompt: int, blocks: Any, *rest: Any):
            counted["in_place"] += bool(rest[0])
            load(match, request, prompt, blocks, *rest)

        def processed(acks: Any) -> None:
            counted["meanwhile"] += bool(sessions._placed and driver.scheduler.running)
            process(acks)

        sessions.directory.load, sessions.process = loaded, processed

    PendingPlacement.finish = slowly  # type: ignore[method-assign]
    return talks(**arguments, prepare=prepare) | counted
