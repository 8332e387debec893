"""What a policy requires of a step, row by row.

The engine takes queries and observations between layers, in Python. A CUDA graph that
holds a whole step makes no such calls when vLLM replays it. A graph may therefore hold
only steps without requirements on layers. Compactions and probes run after the step
and do not prevent a replay.
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
    """What the policy requires of one row.

    Attributes:
        due: the compaction that the step completes.
        first_query: position of the first query that scores it.
        since: keep the step's queries from this position on; None = keep none.
        observes: the policy observes the step.
        observed_from: position of the first token that it observes. Those of a shared
            prefix it never does, because other requests may have computed them.
    """

    due: Compaction | None
    first_query: int
    since: int | None
    observes: bool
    observed_from: int = 0

    @property
    def of_layers(self) -> bool:
        """Whether layers must hand over their queries."""
        return self.observes or self.since is not None


NO_REQUIREMENTS = StepRequirements(None, 0, None, False)


class StepObserver:
    """Works out what a policy requires of each row.

    Args:
        sessions: later requests may continue a request. The engine then keeps the
            newest queries at all times, and a policy that observes prompts observes
            answers as well: the next request does not compute these tokens again.
    """

    def __init__(self, policy: KVCachePolicy, sessions: bool = False) -> None:
        self._policy = policy
        observation = policy.observation
        self._observes = observation.triggers if observation else Trigger(0)
        # Also for requests that are never compacted: their continuation may be.
        observes_all = sessions and observation is not None
        if observes_all:
            self._observes |= Trigger.DECODE_STEP
        self._keeps_newest = sessions and policy.queries_needed > 0
        self._always = observes_all or self._keeps_newest

    @property
    def decode_needs_only_page_lists(self) -> bool:
        """Whether most decode steps need nothing from the host but page lists."""
        observes = Trigger.DECODE_STEP in self._observes
        drops = self._policy.host_storage is None
        return drops and not observes and not self._keeps_newest

    def of(self, row: Row, plan: ResidencyPlan) -> StepRequirements:
        """The requirements of a row; ``NO_REQUIREMENTS`` itself if there are none."""
        if plan.is_static and not self._always:
            return NO_REQUIREMENTS
        tokens, num_queries = row.after_tokens, self._policy.queries_needed
        cut = plan.next_cut(row.computed_tokens)
        assert cut is None or tokens <= cut, "the step ran past a compaction"
        assert cut != tokens or not row.draft_tokens, "a compaction includes drafts"
        first = tokens if cut is None else plan.window_start(cut, num_queries)
        since = first
        if self._keeps_newest:
            since = first_kept(row.accepted_tokens, num_queries)
        due = plan.due(row.computed_tokens, tokens) if tokens == cut else None
        decoding = row.computed_tokens >= row.prompt_tokens
        phase = Trigger.DECODE_STEP if decoding else Trigger.PREFILL_CHUNK
        observes = phase in self._observes and tokens > plan.shared_tokens
        return StepRequirements(
            due,
            first,
            since if since < tokens else None,
            observes,
            plan.shared_tokens,
        )
