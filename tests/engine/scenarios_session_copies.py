"""Conversations whose sessions slow threads copy while other requests compute."""

from __future__ import annotations

import time
from typing import Any

from driver import Driver
from scenarios_sessions import talks


def talks_saved_slowly(delay_s: float = 0.02, **arguments: Any) -> dict[str, Any]:
    """Conversations whose sessions a slow thread copies.

    Returns:
        As ``talks``, with the largest number of sessions that were being saved when a
        step ended that computed something.
    """
    from vllm_kvplugins.sessions.store import SessionStore
    from vllm_kvplugins.sessions.transfer import PendingSave

    init, finish, most = SessionStore.__init__, PendingSave.finish, [0]

    def copies_nothing_at_once(store: Any, *args: Any, **kwargs: Any) -> None:
        init(store, *args, **kwargs, copied_at_once_bytes=0)

    def slowly(pending: Any) -> Any:
        time.sleep(delay_s)
        return finish(pending)

    def count(driver: Driver) -> None:
        process = driver.scheduler.connector.sessions.process
        saving = driver.scheduler.connector.sessions._saving

        def processed(acks: Any) -> None:
            if driver.scheduler.running:
                most[0] = max(most[0], len(saving))
            process(acks)

        driver.scheduler.connector.sessions.process = processed

    SessionStore.__init__ = copies_nothing_at_once  # type: ignore[method-assign]
    PendingSave.finish = slowly  # type: ignore[method-assign]
    return talks(**arguments, prepare=count) | {"most_saving": most[0]}


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
