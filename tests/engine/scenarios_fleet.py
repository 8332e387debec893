"""An engine whose sessions are in a store that other engines use, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driver import Driver, make_llm
from replica import FaultyStorage
from scenarios_sessions import _ask, counts, directory, finish, settle, talks
from texts import random_tokens
from tiny_model import VOCABULARY


def unreliable(
    model: str, policy: dict[str, Any], fails_every: int, **arguments: Any
) -> dict[str, Any]:
    """Conversations, while each n-th operation of the store fails."""

    def prepare(driver: Driver) -> None:
        sessions = driver.scheduler.connector.sessions
        for files in (
            driver.worker.kv_policy.session_store._files,
            sessions._store._files,
        ):
            files.storage = FaultyStorage(files.storage)
            files.storage.fails_every = fails_every

    return talks(model, policy, prepare=prepare, **arguments)


def reset(model: str, policy: dict[str, Any], folder: str) -> dict[str, Any]:
    """A conversation whose engine drops all caches after its first turn."""

    def files() -> list[str]:
        return sorted(path.name for path in Path(folder).glob("*/*.safetensors"))

    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400))
    first = random_tokens(1, 400, VOCABULARY)
    answer, _ = _ask(driver, "first", first, [], "one", 12)
    finish(driver)
    report: dict[str, Any] = {"files": [files()]}
    assert driver.scheduler.reset_prefix_cache(reset_connector=True)
    settle(driver)
    finish(driver)
    report["known"] = directory(driver).num_sessions
    second = [*first, *answer, *random_tokens(2, 60, VOCABULARY)]
    ends = [len(first) + len(answer)]
    tokens, report["restored"] = _ask(driver, "second", second, ends, "one", 12)
    finish(driver)
    report["files"].append(files())
    third = [*second, *tokens, *random_tokens(3, 60, VOCABULARY)]
    ends.append(len(second) + len(tokens))
    _, report["in_memory"] = _ask(driver, "third", third, ends, "one", 12)
    finish(driver)
    return report | {"tracked": driver.check_policy_state(), "counts": counts(driver)}
