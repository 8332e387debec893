"""Routes chat requests to episodes (EpiCache).

::

    messages ──> history | query ──> EpisodeRouter.route ──> episode's patched prompt
                    └─ number of tokens                └─ clusterings of session_dir

Runs in threads of the front end. The engine sees only token counts and token IDs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

from vllm_kvplugins.episodes.encoder import load_encoder
from vllm_kvplugins.episodes.routing import EpisodeRouter, Route
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import (
    NotText,
    Utterance,
    dialogue_text,
    utterances_of,
)
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.plan.geometry import Lengths
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.sessions.clusterings import ClusteringFiles
from vllm_kvplugins.vllm_adapter.config.clustering_config import clustering_files
from vllm_kvplugins.vllm_adapter.config.engine_config import geometry_of
from vllm_kvplugins.vllm_adapter.config.request_params import (
    KV_EPISODE,
    LOOP_ENDS,
    PATCHED_PROMPT,
    TURN_ENDS,
    uses_sessions,
)
from vllm_kvplugins.vllm_adapter.frontend import session_choice, shared_prefix
from vllm_kvplugins.vllm_adapter.frontend.conversation_turns import questions_of
from vllm_kvplugins.vllm_adapter.scheduler import clustering_metrics

logger = init_logger("vllm.kv_policy")

# Keys in a rendered prompt, next to its tokens.
# Parameters of requests to the conversation's other episodes.
OTHER_EPISODES = "kv_policy_other_episodes"
# A callable that embeds segments without a vector; to be called when the engine idles.
EMBEDDING_JOB = "kv_policy_embedding_job"
# A callable that saves the clustering that was used; returns at once.
CLUSTERING_JOB = "kv_policy_clustering_job"

_NOT_CONVERSATION = ("system", "developer")  # roles


@dataclass(slots=True)
class EpisodeFrontend:
    """Router and tokenizer for the episodes of one renderer.

    Attributes:
        tokenizer: a copy: threads of the renderer use the original.
        clusterings: where the router's clusterings are saved; None: nowhere.
    """

    router: EpisodeRouter
    tokenizer: Any
    clusterings: ClusteringFiles | None = None
    lock: Lock = field(default_factory=Lock)

    def tokens(self, text: str, max_tokens: int) -> list[int]:
        """Token IDs of a text. Of a long text, those in the middle: the medoid."""
        with self.lock:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        first = max(len(ids) - max_tokens, 0) // 2
        return ids[first : first + max_tokens]


_frontends: WeakKeyDictionary[Any, EpisodeFrontend] = WeakKeyDictionary()  # by renderer
_frontends_lock = Lock()


def request_parameters(
    renderer: Any,
    policy: KVCachePolicy,
    messages: Sequence[Any],
    live: int,
    prompt: Any,
    found: dict[str, list[int]],
) -> dict[str, Any]:
    """Parameters of a chat request: turn ends, and the patched prompt of its episode.

    A chat that begins with a long tool loop has no episodes yet. Its question, for
    which the loop gathers facts, is the patched prompt.

    Writes ``OTHER_EPISODES``, ``EMBEDDING_JOB`` and ``CLUSTERING_JOB`` into the prompt.

    Args:
        live: index of the first message of the live turn.
        prompt: the rendered prompt.
        found: where finished turns and parts of tool loops end, in tokens.

    Returns:
        Empty if the chat is not compressed: its history is shorter than budget and
        block, or has parts that are not text.

    Raises:
        VLLMValidationError: the encoder failed.
    """
    tokens = prompt["prompt_token_ids"]
    geometry = geometry_of(renderer.config)
    prefix = shared_prefix.tokens_of(renderer.config, policy, prompt)
    shared = min(prefix, len(tokens) - 1) // geometry.block_size
    ends = policy.find_turn_ends(tokens, found[TURN_ENDS])
    loops = policy.find_tool_loops(tokens, ends, found.get(LOOP_ENDS))
    lengths = Lengths(len(tokens), ends, shared_blocks=shared, loops=loops)
    if policy.plan_request(lengths, geometry).is_static:
        return {}
    parameters: dict[str, Any] = dict(found)
    routing = policy.episode_routing
    if routing is None:
        return parameters
    try:
        history = _conversation(messages[:live])
        # Without the answers of a tool loop: it stays in one episode.
        query = dialogue_text(utterances_of(questions_of(messages, live)))
    except NotText as error:
        logger.warning_once("a chat is not compressed: %s", str(error))
        return {}
    frontend = _frontend(renderer, routing.settings)
    max_tokens = routing.patched_prompt_tokens
    if not history:
        if not loops or not query:
            return {}
        return parameters | {PATCHED_PROMPT: frontend.tokens(query, max_tokens)}
    owner = prompt.get("cache_salt") or ""
    route = _route(frontend.router, owner, history, query)
    by_guide = {
        guide: parameters | {PATCHED_PROMPT: frontend.tokens(guide, max_tokens)}
        for guide in route.guides
    }
    episode = {KV_EPISODE: [route.episode, len(route.guides)]}
    own = by_guide.pop(route.guide) | episode
    prompt[OTHER_EPISODES] = list(by_guide.values())
    if route.unknown_segments:
        prompt[EMBEDDING_JOB] = functools.partial(
            frontend.router.embed_new_segments, owner, history
        )
    if frontend.clusterings is not None:
        ids = np.asarray(tokens[: max(found[TURN_ENDS], default=0)], np.int32)
        prompt[CLUSTERING_JOB] = functools.partial(
            frontend.clusterings.save, route.record, ids
        )
    return own


def save_clustering(prompt: Any, sampling_params: Any) -> None:
    """Save the clustering of a rendered chat, if its request may leave a session."""
    job: Callable[[], None] | None = (
        prompt.get(CLUSTERING_JOB) if isinstance(prompt, dict) else None
    )
    if job is not None and uses_sessions(sampling_params):
        job()


def prepare(renderer: Any, policy: KVCachePolicy) -> None:
    """Get ready for the chats of a renderer: old clusterings are deleted from now on.

    Does not load the encoder.
    """
    routing = policy.episode_routing
    if routing is not None:
        _frontend(renderer, routing.settings)


def _conversation(messages: Sequence[Any]) -> list[Utterance]:
    """Utterances of users and assistants; instructions to the model are left out."""
    return utterances_of(
        [m for m in messages if m.get("role") not in _NOT_CONVERSATION]
    )


def _route(
    router: EpisodeRouter, owner: str, history: list[Utterance], query: str
) -> Route:
    try:
        route = router.route(owner, history, query, session_choice.may_read())
    except KVPolicyError as error:
        raise VLLMValidationError(str(error), parameter="messages") from error
    assert route is not None, "the history is not empty"
    logger.debug(
        "episode %d of %d (cosine %.2f, switched: %s, found: %s): encode %.1f ms, "
        "match %.1f ms",
        route.episode,
        len(route.guides),
        route.similarity,
        route.switched,
        route.found,
        route.encode_ms,
        route.match_ms,
    )
    return route


def load_encoder_ahead(renderer: Any, settings: EpisodeSettings) -> None:
    """Load the encoder in a thread, so that no chat waits for it.

    If it cannot be loaded, the log says so now, and each chat tries again.
    """

    def load() -> None:
        try:
            _frontend(renderer, settings).router.load()
        except KVPolicyError as error:
            logger.error("%s", error)

    Thread(target=load, name="kvp-encoder", daemon=True).start()


def _frontend(renderer: Any, settings: EpisodeSettings) -> EpisodeFrontend:
    with _frontends_lock:
        frontend = _frontends.get(renderer)
        if frontend is None:
            counted = clustering_metrics.count
            clusterings = clustering_files(renderer.config, settings, counted)
            router = EpisodeRouter(settings, load_encoder, store=clusterings)
            tokenizer = copy.deepcopy(renderer.get_tokenizer())
            frontend = EpisodeFrontend(router, tokenizer, clusterings)
            _frontends[renderer] = frontend
        return frontend
