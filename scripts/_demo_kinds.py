"""Which demo shows what a policy does, and whether it did it.

The kind of a policy comes from its capabilities (``policies.kinds``), so policies of
other packages have a demo, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from _demo_client import Message, Reply, Server
from _demo_talks import Step

STOCK = "none"  # as --policy: vLLM without this plugin
_COUNTERS = {
    name: f"vllm:kv_policy_{name}_total"
    for name in (
        "blocks_freed",
        "compressions",
        "selected_tokens",
        "fetched_tokens",
        "session_hits",
        "session_restored_tokens",
    )
}


# -- plans -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One demo: a policy, its settings, and what to ask.

    Attributes:
        policy: name of the policy, or ``STOCK``.
        kind: value of a ``PolicyKind``, or ``STOCK``.
        talk: key of ``_demo_talks.TALKS``.
        settings: JSON for ``--kv-policy-config``; empty: the defaults.
        encoder: whether the policy loads a sentence encoder.
    """

    policy: str
    kind: str
    talk: str
    settings: str = ""
    encoder: bool = False


def plan_of(name: str, settings: str = "") -> Plan:
    """The demo of one policy.

    Args:
        settings: JSON that the user gave; empty: the demo chooses.

    Raises:
        KVPolicyError: the policy or its settings are refused.
    """
    if name == STOCK:
        return Plan(STOCK, STOCK, "document")
    from vllm_kvplugins.config import is_auto, parse_auto, parse_options, parse_policy
    from vllm_kvplugins.policies import PolicyKind, kind_of

    options = parse_options(settings) if settings else {}
    if is_auto(name):  # serve.sh checks its settings here, and shows no demo
        parse_auto({"name": name} | options)
        return Plan(name, name, "document", settings)
    policy = parse_policy({"name": name} | options)
    kind = kind_of(policy)
    if not settings and (fitting := _fitting_settings(type(policy), kind)):
        settings = json.dumps(fitting)
    talks = {PolicyKind.TURNS: "turns", PolicyKind.EPISODES: "topics"}
    encoder = policy.episode_routing is not None
    return Plan(name, kind.value, talks.get(kind, "document"), settings, encoder)


def _fitting_settings(policy: Any, kind: Any) -> dict[str, Any]:
    """Settings that suit the demo where the defaults are made for longer texts."""
    if kind == "episodes":
        return {"budget": 256, "prefill_block": 64}
    if kind == "eviction" and "window" in policy.model_fields:
        # The length of the demo's question. A window that reaches back into the
        # document lets the document vote for itself, and the small model loses the key.
        return {"window": 20}
    return {}


# -- results ---------------------------------------------------------------------------


@dataclass
class Answer:
    """A question and what became of it.

    Attributes:
        question: its last line.
        whole_blocks: blocks that the whole cache of the request takes.
        counts: growth of the policy's counters.
    """

    question: str
    expected: str | None
    text: str
    prompt_tokens: int
    tokens: int
    first_s: float
    total_s: float
    held_blocks: int
    peak_blocks: int
    whole_blocks: int
    host_bytes: int = 0
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def is_right(self) -> bool | None:
        """Whether the answer holds the expected words; None: not judged."""
        if self.expected is None:
            return None
        return self.expected.lower() in self.text.lower()


@dataclass
class Result:
    """One demo's answers.

    Attributes:
        episodes: lines of the server's log that name the episode of a query.
        failure: why there are no answers.
    """

    plan: Plan
    model: str = ""
    block_size: int = 0
    pool_blocks: int = 0
    answers: list[Answer] = field(default_factory=list)
    episodes: list[str] | None = None
    failure: str = ""

    @property
    def judged(self) -> list[bool]:
        """For each question with a known answer, whether it was right."""
        return [a.is_right for a in self.answers if a.is_right is not None]

    @property
    def last(self) -> Answer:
        return self.answers[-1]

    @property
    def first_s(self) -> float:
        """Time to the first token of the last question."""
        return self.last.first_s

    @property
    def host_mib(self) -> float:
        """Most host memory reserved during an answer."""
        return max(a.host_bytes for a in self.answers) / 2**20

    @property
    def tokens_per_s(self) -> float:
        """While answering, over all questions."""
        seconds = sum(a.total_s - a.first_s for a in self.answers)
        tokens = sum(max(a.tokens - 1, 0) for a in self.answers)
        return tokens / seconds if seconds > 0 else 0.0

    def count(self, name: str) -> int:
        """Growth of a counter over the whole demo."""
        return round(sum(a.counts.get(name, 0.0) for a in self.answers))

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        """Undo ``as_json``."""
        data = dict(data)
        plan = Plan(**data.pop("plan"))
        answers = [Answer(**answer) for answer in data.pop("answers")]
        return cls(plan, answers=answers, **data)


def run_talk(server: Server, plan: Plan, steps: list[Step]) -> Result:
    """Ask all questions of one conversation, in order."""
    result = Result(plan, server.model, server.block_size, server.pool_blocks)
    messages: list[Message] = []
    for step in steps:
        messages += [*step.before, {"role": "user", "content": step.question}]
        before = _counts(server)
        reply = server.ask(messages, step.max_tokens, step.to_the_end)
        after = _settled(server, before, plan.kind)
        counts = {name: after[name] - before[name] for name in after}
        result.answers.append(_answer(step, reply, server.block_size, counts))
        answer = reply.text if step.reply is None else step.reply
        messages.append({"role": "assistant", "content": answer})
    return result


def _answer(step: Step, reply: Reply, size: int, counts: dict[str, float]) -> Answer:
    # the last token's keys and values are never computed
    tokens = reply.prompt_tokens + max(reply.tokens - 1, 0)
    return Answer(
        question=step.question.splitlines()[-1],
        expected=step.expected,
        text=reply.text,
        prompt_tokens=reply.prompt_tokens,
        tokens=reply.tokens,
        first_s=reply.first_s,
        total_s=reply.total_s,
        held_blocks=reply.held_blocks,
        peak_blocks=reply.peak_blocks,
        whole_blocks=-(-tokens // size),
        host_bytes=reply.host_bytes,
        counts=counts,
    )


def _counts(server: Server) -> dict[str, float]:
    metrics = server.metrics()
    return {name: metrics.get(full, 0.0) for name, full in _COUNTERS.items()}


def _settled(server: Server, before: dict[str, float], kind: str) -> dict[str, float]:
    """Counters after a request; they trail the answer by an engine step or two."""
    import time

    deadline = time.perf_counter() + (2.0 if kind not in (STOCK, "full") else 0.0)
    last = _counts(server)
    while time.perf_counter() < deadline:
        time.sleep(0.2)
        now = _counts(server)
        if now == last and now != before:
            return now
        last = now
    return last


# -- what has to have happened ---------------------------------------------------------


def problems(result: Result, known_model: bool = False) -> list[str]:
    """Why a demo did not show what the policy is for; empty if it did.

    A wrong answer of a small model is no problem, unless nothing was dropped.

    Args:
        known_model: the model answers all questions when nothing is dropped.
    """
    if result.failure:
        return [result.failure]
    kind = result.plan.kind
    found = [
        f"no block was seen in use while {answer.question!r} was answered"
        for answer in result.answers
        if answer.expected is not None and not answer.held_blocks
    ]
    found += _MECHANISMS[kind](result) if kind in _MECHANISMS else []
    if kind in (STOCK, "full") and known_model and not all(result.judged):
        found.append(
            "the answer is wrong although every token was kept; the default model "
            "answers this, so something is broken"
        )
    return found


def _grew(result: Result, *counters: str) -> list[str]:
    return [
        f"{name.replace('_', ' ')}: 0; is the budget above the length of the text?"
        for name in counters
        if not result.count(name)
    ]


def _less_than_whole(result: Result) -> list[str]:
    last = result.last
    if last.held_blocks < last.whole_blocks:
        return []
    return [
        f"{last.held_blocks} blocks were held, and the whole cache takes "
        f"{last.whole_blocks}"
    ]


def _eviction(result: Result) -> list[str]:
    return _grew(result, "compressions", "blocks_freed") + _less_than_whole(result)


def _full(result: Result) -> list[str]:
    freed, last = result.count("blocks_freed"), result.last
    found = [f"{freed} blocks were freed; none should be"] if freed else []
    if last.held_blocks < last.whole_blocks - 1:  # the answer still grew
        found.append(f"only {last.held_blocks} of {last.whole_blocks} blocks were held")
    return found


def _turns(result: Result) -> list[str]:
    """Each question after the first closes one turn and continues the session."""
    found = _less_than_whole(result)
    for number, answer in enumerate(result.answers[1:], 2):
        compressions = round(answer.counts["compressions"])
        if compressions != 1:
            found.append(
                f"question {number} closed one turn and led to {compressions} "
                "compressions"
            )
        if not answer.counts["session_hits"]:
            found.append(f"question {number} did not continue the session")
    return found


def _episodes(result: Result) -> list[str]:
    """Every query has an episode; what is held stays flat while the history grows."""
    found = _grew(result, "compressions", "blocks_freed") + _less_than_whole(result)
    held = [answer.held_blocks for answer in result.answers]
    growth = result.last.whole_blocks - result.answers[0].whole_blocks
    if max(held) - min(held) > max(growth / 2, 2):
        found.append(f"the blocks held are not flat: {', '.join(map(str, held))}")
    if result.plan.encoder and result.episodes is not None:
        missing = len(result.answers) - len(result.episodes)
        if missing > 0:
            found.append(f"{missing} questions were not routed to an episode")
    return found


def _retrieval(result: Result) -> list[str]:
    needed = _grew(result, "selected_tokens", "fetched_tokens")
    return needed + _less_than_whole(result)


_MECHANISMS: dict[str, Callable[[Result], list[str]]] = {
    "eviction": _eviction,
    "full": _full,
    "turns": _turns,
    "episodes": _episodes,
    "retrieval": _retrieval,
    "spans": _retrieval,  # selected: zoomed tokens; fetched: reconstructed ones
}
