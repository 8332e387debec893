"""Conversations over several requests that continue saved sessions."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY

ANSWER = 21


class Talk:
    """One conversation, which grows by an answer and a question with every request.

    Args:
        prefix: first tokens, which other conversations may have too.
    """

    def __init__(
        self,
        driver: Driver,
        name: str,
        seed: int,
        prefix: list[int] | None = None,
        vocabulary: int = VOCABULARY,
    ) -> None:
        self.driver, self.name, self.seed = driver, name, seed
        self.vocabulary = vocabulary
        self.prompt: list[int] = prefix or []
        self.ends: list[int] = []
        self.turn = 0
        self.answers: list[list[int]] = []
        self.request: str | None = None

    def ask(self, tokens: int) -> None:
        """Send the history and a new question of this length."""
        self.turn += 1
        seed = 100 * self.seed + self.turn
        question = random_tokens(seed, tokens, self.vocabulary)
        self.prompt = self.prompt + question
        self.request = f"{self.name}-{self.turn}"
        self.driver.add(self.request, self.prompt, ANSWER, turn_ends=list(self.ends))

    def hear(self) -> None:
        """Append the answer to the history, and end the turn."""
        assert self.request is not None
        answer = self.driver.tokens[self.request]
        self.answers.append(answer)
        self.prompt = self.prompt + answer
        self.ends.append(len(self.prompt))


def directory(driver: Driver) -> Any:
    return driver.scheduler.connector.sessions.directory


def counts(driver: Driver) -> dict[str, int]:
    from dataclasses import asdict

    sessions = driver.scheduler.connector.sessions
    return asdict(sessions.directory.counts) if sessions else {}


def settle(driver: Driver) -> None:
    """Run idle steps until ended requests are saved and reported."""
    for _ in range(3):
        driver.step()
    sessions = driver.scheduler.connector.sessions
    while sessions is not None and sessions.needs_step:  # as vLLM does
        driver.step()


def talks(
    model: str,
    policy: dict[str, Any],
    questions: list[int],
    number: int = 1,
    settings: dict[str, Any] | None = None,
    histories: list[Any] | None = None,
    prepare: Callable[[Driver], None] | None = None,
    prefix: int = 0,
    after_turn: Callable[[Driver], None] = lambda driver: None,
) -> dict[str, Any]:
    """Run several conversations at once, turn by turn.

    Args:
        prefix: number of first tokens that all conversations have in common.
        histories: of conversations that another process began.
        prepare: called with the driver before the first request.
        after_turn: called with the driver when all conversations have an answer.

    Returns:
        answers [conversation][turn], cached tokens and lengths of prompts
        [turn][conversation], counts, histories, and what is left in the worker.
    """
    arguments = {"num_gpu_blocks_override": 400} | (settings or {})
    driver = Driver(make_llm(model, policy, **arguments))
    if prepare is not None:
        prepare(driver)
    first = random_tokens(7, prefix, VOCABULARY)
    several = [Talk(driver, f"talk{i}", i + 1, first) for i in range(number)]
    for talk, history in zip(several, histories or [], strict=False):
        talk.prompt, talk.ends, talk.turn = history
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
        after_turn(driver)
    finish(driver)
    return {
        "answers": [talk.answers for talk in several],
        "prompts": prompts,
        "cached": cached,
        "counts": counts(driver),
        "histories": [[talk.prompt, talk.ends, talk.turn] for talk in several],
        "tracked": driver.check_policy_state(),
        "preemptions": driver.preemptions,
    }


def stored(
    model: str,
    policies: list[dict[str, Any]],
    prompt: int,
    question: int,
    settings: dict[str, Any],
) -> list[dict[str, Any]]:
    """The second turn of a conversation under each policy, loaded from the host.

    The first answers are those of the first policy, so that all restore the same text.

    Returns:
        Tokens of the second answers, restored tokens, bytes of the first session by the
        metric and in the worker, which excludes the host tier, and size of its file.
    """
    report: list[dict[str, Any]] = []
    answer: list[int] = []
    for policy in policies:
        llm = make_llm(model, policy, disable_log_stats=False, **settings)
        driver = Driver(llm)
        first = random_tokens(1, prompt, VOCABULARY)
        spoken, _ = _ask(driver, "first", first, [], "one", ANSWER)
        answer = answer or spoken
        store = driver.worker.kv_policy.session_store
        store.wait_for_writes()
        settle(driver)
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        num_bytes = int(metrics["vllm:kv_policy_session_bytes"].value)
        held = store.held_bytes
        files = Path(policy.get("session_dir", "/nowhere")).glob("*/*.safetensors")
        file_bytes = sum(file.stat().st_size for file in files)
        second = [*first, *answer, *random_tokens(2, question, VOCABULARY)]
        ends = [len(first) + len(answer)]
        tokens, restored = _ask(driver, "second", second, ends, "one", ANSWER)
        store.wait_for_writes()
        settle(driver)
        directory(driver).check_integrity()
        report.append(
            {
                "tokens": tokens,
                "restored": restored,
                "bytes": num_bytes,
                "held": held,
                "file_bytes": file_bytes,
                "tracked": driver.check_policy_state(),
            }
        )
        del driver, llm
    return report


def finish(driver: Driver) -> None:
    """Wait until all files are written, and check the accounting."""
    store = driver.worker.kv_policy.session_store
    if store is not None:
        store.wait_for_writes()
        settle(driver)
        directory(driver).check_integrity()
        (sizes,) = driver.llm.collective_rpc("kv_policy_held_sessions")
        assert sizes[0] == store.num_held
        if driver.manager.kv_cache_spec.policy.retrieval is None:
            # Tokens of a retriever on the host are counted elsewhere.
            assert sizes[1] == directory(driver).held_bytes


def odds(
    model: str,
    policy: dict[str, Any],
    settings: dict[str, Any] | None = None,
    at_end: Callable[[Driver], dict[str, Any]] = lambda driver: {},
) -> dict[str, Any]:
    """Special cases of a conversation, each next to the same request recomputed
    under an unused cache salt.

    Args:
        at_end: called with the driver; what it returns is added to the report.
    """
    arguments = {"num_gpu_blocks_override": 400} | (settings or {})
    driver = Driver(make_llm(model, policy, **arguments))
    fresh = 0

    def ask(prompt: list[int], ends: list[int], salt: str, max_tokens: int = 12) -> Any:
        """The answer, and the number of restored tokens."""
        nonlocal fresh
        fresh += 1
        return _ask(driver, f"r{fresh}", prompt, ends, salt, max_tokens)

    def recomputed(
        prompt: list[int], ends: list[int], max_tokens: int = 12
    ) -> list[int]:
        return ask(prompt, ends, f"new {fresh}", max_tokens)[0]

    report: dict[str, Any] = {}
    first = random_tokens(1, 400, VOCABULARY)
    answer, _ = ask(first, [], "alice", 30)
    end = len(first) + len(answer)
    second = [*first, *answer, *random_tokens(2, 90, VOCABULARY)]
    more, restored = ask(second, [end], "alice")
    report["restored"] = restored
    report["continued"] = (more, recomputed(second, [end]))
    # Another client sends the same conversation.
    report["mallory"] = ask(second, [end], "mallory")[1]
    # edit the second message; then continue the original conversation
    edited = [*second[: end + 9], *random_tokens(3, 70, VOCABULARY)]
    other_answer, report["edited_restored"] = ask(edited, [end], "alice")
    report["edited"] = (other_answer, recomputed(edited, [end]))
    both = [end, len(second) + len(more)]
    third = [*second, *more, *random_tokens(4, 60, VOCABULARY)]
    other_answer, report["sibling_restored"] = ask(third, both, "alice")
    report["sibling"] = (other_answer, recomputed(third, both))
    # a client disconnects during an answer and comes back
    driver.add("leaves", second, 400, turn_ends=[end], salt="bob")
    driver.step_until(lambda: len(driver.tokens["leaves"]) >= 40)
    driver.abort(["leaves"])
    settle(driver)
    partial = driver.tokens["leaves"][:35]
    back = [*second, *partial, *random_tokens(5, 50, VOCABULARY)]
    ends = [end, len(second) + len(partial)]
    other_answer, report["left_restored"] = ask(back, ends, "bob")
    report["left"] = (other_answer, recomputed(back, ends))
    # two requests continue one session at once
    longer = [[*third, *random_tokens(6 + i, 40, VOCABULARY)] for i in range(2)]
    twins = [f"twin{i}" for i in range(2)]
    for twin, prompt in zip(twins, longer, strict=True):
        driver.add(twin, prompt, 12, turn_ends=both, salt="alice")
    driver.run()
    report["twins"] = [
        (driver.tokens[twin], recomputed(prompt, both))
        for twin, prompt in zip(twins, longer, strict=True)
    ]
    report["twins_restored"] = [driver.cached.get(twin, 0) for twin in twins]
    # a request that declines sessions neither continues one nor leaves one
    before, known = counts(driver), {s.session_id for s in directory(driver)}
    driver.add("declines", third, 12, turn_ends=both, salt="alice", kv_session=False)
    driver.run()
    settle(driver)
    after, now = counts(driver), {s.session_id for s in directory(driver)}
    report["declined"] = (driver.tokens["declines"], recomputed(third, both))
    report["declined_changes"] = [after != before, now != known]
    # a session that began in the prefix cache, whose tokens have no queries
    ask(first[:192], [], "carol", 3)
    directory(driver).clear()
    short, report["hit_restored"] = ask(first[:210], [], "carol", 9)
    long = [*first[:210], *short, *random_tokens(8, 150, VOCABULARY)]
    other_answer, report["cached_restored"] = ask(long, [219], "carol")
    report["cached"] = (other_answer, recomputed(long, [219]))
    finish(driver)
    report |= at_end(driver)
    return report | {"tracked": driver.check_policy_state(), "counts": counts(driver)}


def earlier_turns(
    model: str, policy: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """A conversation whose messages are then edited, the last one first.

    Returns:
        For each edit: the answer, the recomputed one, and the number of tokens between
        the edit and what was restored. Bytes of all sessions, and of those in memory.
    """
    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400, **settings))
    prompt, ends = random_tokens(1, 200, VOCABULARY), []
    turns = []
    for turn in range(5):
        answer, _ = _ask(driver, f"turn{turn}", prompt, ends, "alice", 21)
        turns.append((prompt, list(ends)))
        ends = [*ends, len(prompt) + len(answer)]
        prompt = [*prompt, *answer, *random_tokens(10 + turn, 90, VOCABULARY)]
    sessions = directory(driver)
    report: dict[str, Any] = {
        "reduced": len(sessions.reduced),
        "whole_bytes": sum(each.num_bytes for each in sessions),
        "held_bytes": sessions.held_bytes,
    }
    edits = []
    for number, (known, known_ends) in enumerate(reversed(turns[1:])):
        end = known_ends[-1]
        edited = [*known[:end], *random_tokens(20 + number, 60, VOCABULARY)]
        one = _ask(driver, f"edit{number}", edited, known_ends, "alice", 12)
        other = _ask(driver, f"again{number}", edited, known_ends, "bob", 12)
        edits.append((one[0], other[0], end - one[1]))
    finish(driver)
    return report | {"edits": edits, "counts": counts(driver)}


def faults(model: str, policy: dict[str, Any], folder: str) -> dict[str, Any]:
    """A full disk, full memory, and damaged files."""
    from pathlib import Path

    from vllm_kvplugins.sessions import tensor_file

    # room for about two sessions of 400 tokens
    policy = policy | {"session_dir": folder, "session_memory": "1MiB"}
    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400))
    whole = tensor_file.write
    report: dict[str, Any] = {}

    def full(path: Path, tensors: Any, about: Any) -> int:
        raise OSError(28, "No space left on device")

    prompts = {i: random_tokens(i, 400, VOCABULARY) for i in range(6)}
    answers = {}
    for i, prompt in prompts.items():
        tensor_file.write = full if i == 5 else whole
        answers[i], _ = _ask(driver, f"a{i}", prompt, [], "s", 12)
        finish(driver)
    tensor_file.write = whole
    report["files"] = len(list(Path(folder).glob("*/*.safetensors")))
    report["failures"] = counts(driver)["failures"]
    paths = {}
    for session in directory(driver):
        for i, prompt in prompts.items():
            if session.tokens[:400].tolist() == prompt:
                paths[i] = driver.worker.kv_policy.session_store._files.path(
                    session.session_id, 0
                )
    # 0: a flipped bit; 1: a truncated file; 2: a removed file
    raw = bytearray(paths[0].read_bytes())
    raw[-5] ^= 1
    paths[0].write_bytes(bytes(raw))
    paths[1].write_bytes(paths[1].read_bytes()[:-4000])
    paths[2].unlink()
    report["later"] = []
    for i, prompt in prompts.items():
        question = random_tokens(50 + i, 40, VOCABULARY)
        longer, ends = [*prompt, *answers[i], *question], [400 + len(answers[i])]
        other_answer, restored = _ask(driver, f"b{i}", longer, ends, "s", 12)
        fresh, _ = _ask(driver, f"c{i}", longer, ends, f"new{i}", 12)
        report["later"].append((other_answer == fresh, restored))
        finish(driver)
    return report | {"tracked": driver.check_policy_state(), "counts": counts(driver)}


def retrieved(model: str, policy: dict[str, Any]) -> dict[str, Any]:
    """Conversations with tokens on the host, one of which is abandoned."""
    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400))
    several = [Talk(driver, f"talk{i}", i + 1) for i in range(3)]
    restored = []
    for tokens in (400, 60, 50):
        for talk in several:
            talk.ask(tokens)
        driver.run()
        restored.append([driver.cached.get(talk.request, 0) for talk in several])
        for talk in several:
            talk.hear()
        settle(driver)
        driver.check_blocks()
    held = driver.scheduler.connector.host.reserved_bytes
    # larger than the memory that sessions leave, so that they are evicted
    driver.add("large", random_tokens(77, 3000, VOCABULARY), 8)
    driver.run()
    settle(driver)
    directory(driver).check_integrity()
    return {
        "answers": [talk.answers for talk in several],
        "restored": restored,
        "held": held,
        "large": driver.tokens["large"],
        "counts": counts(driver),
        "tracked": driver.check_policy_state(),
    }


def rewound(
    model: str, policies: list[dict[str, Any]], number: int, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Conversations that go back to an earlier token, several at once.

    Each comes with the same requests under other salts, which go back nowhere.
    """
    return [_rewound(model, policy, number, settings) for policy in policies]


def _rewound(
    model: str, policy: dict[str, Any], number: int, settings: dict[str, Any]
) -> dict[str, Any]:
    settings = {"num_gpu_blocks_override": 400} | settings
    driver = Driver(make_llm(model, policy, **settings))
    report: dict[str, Any] = {}

    def ask(name: str, prompts: list[list[int]], salt: str) -> list[list[int]]:
        """The answers to prompts that run at the same time."""
        before = counts(driver)
        names = [f"{name} {salt} {i}" for i in range(len(prompts))]
        for i, (each, prompt) in enumerate(zip(names, prompts, strict=True)):
            driver.add(each, prompt, ANSWER, salt=f"{salt} {i}")
        driver.run()
        settle(driver)
        driver.check_blocks()
        directory(driver).check_integrity()
        after = counts(driver)
        changed = {key: after[key] - before[key] for key in after}
        changed["least"] = min(driver.cached.get(each, 0) for each in names)
        report.setdefault("changes", {})[f"{name} {salt}"] = changed
        return [driver.tokens[each] for each in names]

    def tokens(part: int, count: int) -> list[list[int]]:
        seeds = [1000 * (i + 1) + part for i in range(number)]
        return [random_tokens(seed, count, VOCABULARY) for seed in seeds]

    def joined(*parts: list[list[int]]) -> list[list[int]]:
        return [list(chain(*each)) for each in zip(*parts, strict=True)]

    first = tokens(1, 440)
    answers = ask("first", first, "us")
    again = ask("regenerate", first, "us")
    second = joined(first, answers, tokens(2, 50))
    replies = ask("second", second, "us")
    late = joined(first, answers, tokens(3, 60))
    late_replies = ask("edit late", late, "us")
    early = joined([prompt[:260] for prompt in first], tokens(4, 200))
    early_answers = ask("edit early", early, "us")
    third = joined(second, replies, tokens(5, 40))
    third_replies = ask("third", third, "us")
    # what others give who do not go back
    report["regenerate"] = answers, again
    report["early"] = early_answers, ask("first", early, "new")
    for name, prompts, got in (
        ("late", [late], [late_replies]),
        ("third", [second, third], [replies, third_replies]),
    ):
        ask("first", first, name)
        same = [ask(f"turn {i}", each, name) for i, each in enumerate(prompts)]
        report[name] = got, same
    directory(driver).clear()
    settle(driver)
    finish(driver)
    (extension,) = driver.worker.kv_policy.runtime.extensions
    tier = extension.tier
    return report | {
        "policy": policy,
        "tracked": driver.check_policy_state(),
        "reserved": driver.scheduler.connector.host.reserved_bytes,
        "host_pages": len(tier.pages) - tier.num_free,
    }


def cut_off(model: str, policy: dict[str, Any]) -> dict[str, Any]:
    """An answer that is regenerated where host memory has room for one request."""
    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400))
    prompt = random_tokens(1, 440, VOCABULARY)
    report: dict[str, Any] = {}
    report["first"], _ = _ask(driver, "first", prompt, [], "one", 40)
    report["again"], report["restored"] = _ask(driver, "again", prompt, [], "one", 40)
    report["sessions"] = directory(driver).num_sessions
    directory(driver).clear()
    settle(driver)
    finish(driver)
    (extension,) = driver.worker.kv_policy.runtime.extensions
    return report | {
        "tracked": driver.check_policy_state(),
        "reserved": driver.scheduler.connector.host.reserved_bytes,
        "host_pages": len(extension.tier.pages) - extension.tier.num_free,
        "counts": counts(driver),
    }


def resident_or_restored(
    model: str, policies: list[dict[str, Any]], prompt: int, first: int, more: int
) -> list[dict[str, Any]]:
    """An answer in one request, and in two:

    the second starts with the first one's answer.
    """
    report = []
    tokens = random_tokens(3, prompt, VOCABULARY)
    for policy in policies:
        driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400))
        whole, _ = _ask(driver, "whole", tokens, [], "one", first + more)
        begun, _ = _ask(driver, "begun", tokens, [], "two", first)
        rest, restored = _ask(driver, "rest", tokens + begun, [], "two", more)
        each = {"whole": whole, "parts": begun + rest, "restored": restored}
        # a short prompt finds its start in the prefix cache, and is compacted
        # as a part of the next one
        _ask(driver, "warm", tokens[:70], [], "three", 4)
        short, _ = _ask(driver, "short", tokens[:100], [], "three", 9)
        longer = [*tokens[:100], *short, *random_tokens(9, 150, VOCABULARY)]
        other_answer, _ = _ask(driver, "longer", longer, [], "three", 12)
        fresh, _ = _ask(driver, "fresh", longer, [], "four", 12)
        report.append(each | {"warm": other_answer, "cold": fresh})
        finish(driver)
    return report


def _ask(
    driver: Driver,
    name: str,
    prompt: list[int],
    ends: list[int],
    salt: str,
    max_tokens: int,
) -> tuple[list[int], int]:
    """The answer, and how many prompt tokens were restored."""
    before = counts(driver)["restored_tokens"]
    driver.add(name, prompt, max_tokens, turn_ends=ends, salt=salt)
    driver.run()
    settle(driver)
    return driver.tokens[name], counts(driver)["restored_tokens"] - before


def failed_loads(
    model: str, policy: dict[str, Any], settings: dict[str, Any], after: int
) -> dict[str, Any]:
    """A device without room for the pages of a session.

    Two ask the same and more behind a session that cannot be loaded: the second has
    its blocks from the first, out of the prefix cache, unless it was compressed.
    Another request runs meanwhile.

    Args:
        after: copies that go well before one does not.
    """
    from vllm_kvplugins.sessions import stored_pages

    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400, **settings))
    copy, left = stored_pages.copy_pages, [0]

    def no_room(target: Any, ids: Any, source: Any, source_ids: Any) -> None:
        if ids is not None:  # copies to the pool
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("CUDA out of memory (made up)")
        copy(target, ids, source, source_ids)

    first = random_tokens(1, 200, VOCABULARY)
    answer, _ = _ask(driver, "a", first, [], "s", 12)
    ends, both = [212], [*first, *answer, *random_tokens(2, 90, VOCABULARY)]
    more, _ = _ask(driver, "b", both, ends, "s", 12)
    third = [*both, *more, *random_tokens(3, 60, VOCABULARY)]
    ends = [212, len(both) + len(more)]
    settle(driver)
    assert driver.llm.reset_prefix_cache()
    report: dict[str, Any] = {"sessions": directory(driver).num_sessions}
    stored_pages.copy_pages, left[0] = no_room, after
    driver.add("other", random_tokens(9, 50, VOCABULARY), 40, salt="other")
    driver.step_until(lambda: len(driver.tokens["other"]) >= 3)
    for name in ("c", "d"):
        driver.add(name, third, 12, turn_ends=ends, salt="s")
    driver.run()
    stored_pages.copy_pages = copy
    report["hits"] = counts(driver)["hits"]
    for name in ("c2", "other2"):
        prompt = third if name == "c2" else random_tokens(9, 50, VOCABULARY)
        max_tokens, other_answer = (12, ends) if name == "c2" else (40, [])
        driver.add(name, prompt, max_tokens, turn_ends=other_answer, salt=f"new {name}")
        driver.run()
    tokens = driver.tokens
    report["equal"] = [
        tokens["c"] == tokens["c2"],
        tokens["d"] == tokens["c2"],
        tokens["other"] == tokens["other2"],
    ]
    report["preemptions"] = driver.preemptions
    scheduling = driver.llm.llm_engine.vllm_config.scheduler_config
    report["ahead"] = scheduling.async_scheduling
    settle(driver)
    directory(driver).check_integrity()
    # not their bytes: tokens of a retriever on the host are counted elsewhere
    (held,) = driver.llm.collective_rpc("kv_policy_held_sessions")
    assert held[0] == directory(driver).num_sessions
    driver.check_blocks()
    return report | {"tracked": driver.check_policy_state(), "counts": counts(driver)}


def expires_while_idle(
    model: str, policy: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Send one request, and no message until its session's file is gone.

    Returns:
        The number of files before, the seconds until they were gone, and what the
        worker still holds.
    """
    from vllm import SamplingParams

    folder = Path(policy["session_dir"])

    def files() -> int:
        return len(list(folder.glob("*/*.safetensors")))

    def wait(condition: Callable[[], bool]) -> float:
        since = time.monotonic()
        while not condition() and time.monotonic() - since < 30:
            time.sleep(0.02)
        return time.monotonic() - since

    llm = make_llm(model, policy, num_gpu_blocks_override=400, **settings)
    prompt = random_tokens(1, 200, VOCABULARY)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    wait(lambda: files() > 0)
    before = files()
    seconds = wait(lambda: files() == 0)
    return {
        "client": type(llm.llm_engine.engine_core).__name__,
        "ahead": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "files": before,
        "seconds": seconds,
        "held": llm.collective_rpc("kv_policy_held_sessions"),
    }
