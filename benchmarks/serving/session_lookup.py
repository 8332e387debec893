"""Time and memory of the session index, when many sessions share a system prompt.

Every session has the same system prompt and a random continuation. Look-ups return the
first match, which the scheduler uses if the request can start from it, or all matches,
the worst case. They are measured for four prompts: the next turn of a session, an
edited last message, a new conversation with the same system prompt, and a prompt that
shares nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions.commands import Session, Tokens
from vllm_kvplugins.sessions.index import SessionIndex

VOCABULARY = 49152


def sessions_of(number: int, system: Tokens, tokens: int, rng: np.random.Generator):
    """Half of them compacted after the system prompt, half never."""
    for i in range(number):
        own = rng.integers(0, VOCABULARY, tokens, np.int32)
        ids = np.concatenate([system, own])
        at = len(system) + tokens // 2
        stop = at // 32
        compaction = Compaction(at, BlockSpan(0, stop), BlockSpan(stop - 2, stop))
        yield Session(
            f"s{i}", "owner", ids, compaction if i % 2 else None, 1, len(ids) - 72
        )


def seconds(call: Callable[[], object], rounds: int) -> list[float]:
    """Time of each call, ascending."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)


def prompts_of(
    some: list[Session], system: Tokens, rng: np.random.Generator
) -> dict[str, Callable[[], Tokens]]:
    """One random prompt per call, by what it is."""

    def new(tokens: int) -> Tokens:
        return rng.integers(0, VOCABULARY, tokens, np.int32)

    def any_session() -> Tokens:
        return some[rng.integers(len(some))].tokens

    return {
        "next turn": lambda: np.concatenate([any_session(), new(100)]),
        "edited": lambda: np.concatenate([any_session()[:-50], new(100)]),
        "new conversation": lambda: np.concatenate([system, new(100)]),
        "nothing shared": lambda: new(2000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--system-tokens", type=int, default=2048)
    parser.add_argument("--own-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2000)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    system = rng.integers(0, VOCABULARY, args.system_tokens, np.int32)
    index, some, adding = SessionIndex(32), [], []
    tracemalloc.start()
    own = 0
    for session in sessions_of(args.sessions, system, args.own_tokens, rng):
        before = tracemalloc.get_traced_memory()[0]
        index.add(session)
        own += tracemalloc.get_traced_memory()[0] - before
        if len(some) < 1000:
            some.append(session)
    tracemalloc.stop()
    print(
        f"{args.sessions} sessions of {args.system_tokens} + {args.own_tokens} tokens: "
        f"the index takes {own / args.sessions:.0f} bytes per session, without the "
        f"sessions' own {4 * (args.system_tokens + args.own_tokens)}"
    )
    print(f"{'call':20} {'median us':>10} {'99 % us':>10}")
    for name, prompt in prompts_of(some, system, rng).items():
        asked = iter([prompt() for _ in range(2 * args.rounds)])
        times = seconds(
            lambda asked=asked: next(index.find("owner", next(asked)), None),
            args.rounds,
        )
        _print(name, times)
        times = seconds(
            lambda asked=asked: list(index.find("owner", next(asked))), args.rounds
        )
        _print("  all matches", times)
    for session in some:
        adding += seconds(lambda session=session: index.remove(session.session_id), 1)
    _print("remove", sorted(adding))
    adding.clear()
    for session in some:
        adding += seconds(lambda session=session: index.add(session), 1)
    _print("add", sorted(adding))


def _print(name: str, times: list[float]) -> None:
    median, late = statistics.median(times), times[int(len(times) * 0.99)]
    print(f"{name:20} {median * 1e6:10.1f} {late * 1e6:10.1f}")


if __name__ == "__main__":
    main()
