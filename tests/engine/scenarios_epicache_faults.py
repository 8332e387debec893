"""Episodes whose requests end early, and sessions that do not fit into memory."""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from scenarios_sessions import counts, directory, settle
from texts import random_tokens
from tiny_model import VOCABULARY

HISTORY, QUERY, ANSWER = 600, 45, 12


def _driver(model: str, policy: dict[str, Any]) -> Driver:
    settings = {"skip_tokenizer_init": False, "max_model_len": 4096}
    return Driver(make_llm(model, policy, num_gpu_blocks_override=200, **settings))


def aborted(
    model: str, policy: dict[str, Any], guides: list[list[int]], leaves_at: list[int]
) -> list[dict[str, Any]]:
    """Abort builds and first questions at several points of their prefill.

    Another client's episode is read at the same time. Then the same episode is queried
    again, and once more under a cache salt that no request has used.

    Returns:
        Per kind and place: tokens "read" before the abort, tokens "restored" after it,
        "answers" (after the abort, and recomputed), answers of the "company" with
        and without the abort, blocks "held" afterwards, requests "tracked" in the
        worker.
    """
    driver = _driver(model, policy)
    history = random_tokens(1, HISTORY, VOCABULARY)
    other = random_tokens(2, HISTORY, VOCABULARY)
    prompt = history + random_tokens(3, QUERY, VOCABULARY)

    def ask(name: str, salt: str, tokens: list[int], guide: list[int]) -> list[int]:
        driver.add(name, tokens, ANSWER, False, [HISTORY], salt, guide)
        driver.run()
        settle(driver)
        return driver.tokens[name]

    alone = ask("alone", "alone", other + prompt[HISTORY:], guides[1])
    recomputed = ask("recomputed", "recomputed", prompt, guides[0])
    rows = []
    for kind, tokens, max_tokens in (
        ("build", history, 1),
        ("question", prompt, ANSWER),
    ):
        for place in leaves_at:
            salt = f"{kind}{place}"
            company = f"{salt} company"
            beside = other + prompt[HISTORY:]
            driver.add(company, beside, ANSWER, False, [HISTORY], company, guides[1])
            driver.add(salt, tokens, max_tokens, False, [HISTORY], salt, guides[0])
            read = _leave(driver, salt, place)
            driver.run()
            settle(driver)
            driver.check_blocks()
            state = {
                "held": len(driver.held_blocks()),
                "tracked": driver.check_policy_state(),
                "commands": _num_pending(driver),
            }
            before = counts(driver)["restored_tokens"]
            answer = ask(f"{salt} again", salt, prompt, guides[0])
            rows.append(
                state
                | {"kind": kind, "place": place, "read": read}
                | {"restored": counts(driver)["restored_tokens"] - before}
                | {"company": (driver.tokens[company], alone)}
                | {"answers": (answer, recomputed), "decoded": driver.tokens[salt]}
            )
            directory(driver).check_integrity()
    return rows


def _leave(driver: Driver, name: str, place: int) -> int:
    """Abort a request once so much of it is read; how much it was."""
    requests = driver.scheduler.requests
    (request,) = (r for n, r in requests.items() if n.startswith(f"{name}-"))
    driver.step_until(lambda: request.num_computed_tokens >= place)
    read = int(request.num_computed_tokens)
    driver.abort([name])
    return read


def _num_pending(driver: Driver) -> int:
    """Sessions that are still on their way into memory."""
    return len(directory(driver).pending)


def full(
    model: str, policy: dict[str, Any], guides: list[list[int]], memory: list[str]
) -> list[dict[str, Any]]:
    """The same conversation in several amounts of memory for sessions.

    Returns:
        Per amount: answers [turn], tokens restored [turn], and counts.
    """
    rows = []
    for amount in memory:
        driver = _driver(model, policy | {"session_memory": amount})
        prompt = random_tokens(1, HISTORY, VOCABULARY)
        answers, restored = [], []
        for turn, episode in enumerate([0, 0, 1, 0]):
            end, name = len(prompt), f"turn{turn}"
            prompt = prompt + random_tokens(10 + turn, QUERY, VOCABULARY)
            before = counts(driver)["restored_tokens"]
            driver.add(name, prompt, ANSWER, False, [end], "s", guides[episode])
            driver.run()
            settle(driver)
            driver.check_blocks()
            directory(driver).check_integrity()
            answers.append(driver.tokens[name])
            restored.append(counts(driver)["restored_tokens"] - before)
            prompt = prompt + answers[-1]
        rows.append(
            {
                "answers": answers,
                "restored": restored,
                "counts": counts(driver),
                "tracked": driver.check_policy_state(),
            }
        )
    return rows
