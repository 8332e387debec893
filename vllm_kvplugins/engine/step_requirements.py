"""What a policy wants to be shown of a step, row by row.

Queries and observations are taken between layers, in Python. A CUDA graph that holds a
whole step makes no such calls when it is replayed: it may hold steps of which nothing
is wanted, and what follows from those (compactions, probes) comes after the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.engine.windows import first_kept
from vllm_kvplugins.plan.residency_plan import Compaction, ResidencyPlan
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.policies.capabilities import Trigger


@dataclass(frozen=True, slots=True)
class StepRequirements:
    """Of one row.

    Attributes:
        due: the compaction that the step completes.
        first_query: position of the first query that scores it.
        since: the step's queries are kept from this position on; None = none are.
        observes: the policy looks at the step.
    """

    due: Compaction | None
    first_query: int
    since: int | None
    observes: bool

    @property
    def of_layers(self) -> bool:
        """Whether layers have to hand anything over."""
        return self.observes or self.since is not None


NO_REQUIREMENTS = StepRequirements(None, 0, None, False)


class StepObserver:
    """What is wanted of a policy's requests.

    Args:
        sessions: requests may be continued: who observes a prompt observes the
            answer too, and the newest queries are kept, since the next request will
            not compute these tokens again.
    """

    def __init__(self, policy: KVCachePolicy, sessions: bool = False) -> None:
        self._policy = policy
        observation = policy.observation
        self._observes = observation.triggers if observation else Trigger(0)
        # also requests that are never compacted: one that goes on may be
        observes_all = sessions and observation is not None
        if observes_all:
            self._observes |= Trigger.DECODE_STEP
        self._keeps_newest = sessions and policy.queries_needed > 0
        self._always = observes_all or self._keeps_newest

    @property
    def lets_decode_alone(self) -> bool:
        """Whether most decoding steps need nothing from the host but page lists."""
        observes = Trigger.DECODE_STEP in self._observes
        drops = self._policy.host_storage is None
        return drops and not observes and not self._keeps_newest

    def of(self, row: Row, plan: ResidencyPlan) -> StepRequirements:
        """What is wanted of a row's step; ``NOTHING`` if it is not looked at."""
        if plan.is_static and not self._always:
            return NO_REQUIREMENTS
        tokens, wanted = row.after_tokens, self._policy.queries_needed
        cut = plan.next_cut(row.computed_tokens)
        assert cut is None or tokens <= cut, "a step ran past a compaction"
        first = tokens if cut is None else plan.window_start(cut, wanted)
        since = first_kept(tokens, wanted) if self._keeps_newest else first
        due = plan.due(row.computed_tokens, tokens) if tokens == cut else None
        decoding = row.computed_tokens >= row.prompt_tokens
        phase = Trigger.DECODE_STEP if decoding else Trigger.PREFILL_CHUNK
        observes = phase in self._observes
        return StepRequirements(due, first, since if since < tokens else None, observes)
