"""Episodes of chat requests: where the history ends, and what to ask it.

::

    messages ──> history | query ──> EpisodeBook.route ──> patched prompt of the episode
                    └─ its end in tokens

Runs in the front end, in its threads; the engine sees token counts and ids only.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

from vllm_kvplugins.episodes.book import EpisodeRouter
from vllm_kvplugins.episodes.encoder import load_encoder
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import NotText, dialogue_text, utterances_of
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.plan.geometry import Lengths
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.config.engine_config import geometry_of
from vllm_kvplugins.vllm_adapter.config.turns import PATCHED_PROMPT, TURN_ENDS

logger = init_logger("vllm.kv_policy")

# Beside the tokens in a rendered prompt: what requests to the other episodes are told.
OTHERS = "kv_policy_other_episodes"
# And what may wait until nobody asks: a call that embeds the newest segments.
LESSON = "kv_policy_episode_lesson"


@dataclass(slots=True)
class EpisodeFrontend:
    """One front end's episodes."""

    book: EpisodeRouter
    tokenizer: Any  # of its own: those of the renderer are in use by its threads
    lock: Lock = field(default_factory=Lock)

    def tokens(self, text: str, most: int) -> list[int]:
        """Of a text; of a longer one its middle, where the medoid is."""
        with self.lock:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        first = max(len(ids) - most, 0) // 2
        return ids[first : first + most]


_desks: WeakKeyDictionary[Any, EpisodeFrontend] = WeakKeyDictionary()
_desks_lock = Lock()


def keep_parts(conversations: Sequence[Sequence[Any]]) -> None:
    """Make lists of contents that can be read only once, before anybody reads them."""
    for messages in conversations:
        for message in messages:
            content = message.get("content")
            if isinstance(content, Iterator):
                message["content"] = list(content)


def history_of(messages: Sequence[Any]) -> list[int]:
    """How many messages come before the query, the last one of the user; none: []."""
    asked = [n for n, message in enumerate(messages) if message.get("role") == "user"]
    return [asked[-1]] if asked and asked[-1] else []


def parameters(
    renderer: Any,
    policy: KVCachePolicy,
    messages: Sequence[Any],
    prompt: Any,
    ends: list[int],
) -> dict[str, Any]:
    """What a chat request is told: turn ends, and the patched prompt of its episode.

    Args:
        prompt: rendered.
        ends: where its history ends, if that could be found.

    Returns:
        Nothing for histories that are not compressed: shorter than budget and block,
        or with parts that are no text. What requests to the other episodes would be
        told is put into the prompt, under ``OTHERS``.

    Raises:
        VLLMValidationError: the encoder fails.
    """
    tokens = prompt["prompt_token_ids"]
    plan = policy.plan(Lengths(len(tokens), tuple(ends)), geometry_of(renderer.config))
    if plan.is_static:
        return {}
    found: dict[str, Any] = {TURN_ENDS: ends}
    routing = policy.episode_routing
    if routing is None:
        return found
    (count,) = history_of(messages)
    try:
        history = _spoken(messages[:count])
        query = dialogue_text(utterances_of(messages[count:]))
    except NotText as error:
        logger.warning_once("a chat is not compressed: %s", str(error))
        return {}
    if not history:
        return {}
    desk = _desk(renderer, routing.settings)
    owner = prompt.get("cache_salt") or ""
    try:
        route = desk.book.route(owner, history, query)
    except KVPolicyError as error:
        raise VLLMValidationError(str(error), parameter="messages") from error
    assert route is not None, "there is a history"
    logger.debug(
        "episode %d of %d (cosine %.2f, switched: %s): encode %.1f ms, match %.1f ms",
        route.episode,
        len(route.guides),
        route.similarity,
        route.switched,
        route.encode_ms,
        route.match_ms,
    )
    most = routing.patched_prompt_tokens
    told = {g: found | {PATCHED_PROMPT: desk.tokens(g, most)} for g in route.guides}
    mine = told.pop(route.guide)
    prompt[OTHERS] = list(told.values())
    if route.unknown_segments:
        prompt[LESSON] = functools.partial(desk.book.learn, owner, history)
    return mine


def _spoken(messages: Sequence[Any]) -> Any:
    """Utterances of a history; what the system is told is no conversation."""
    said = [m for m in messages if m.get("role") not in ("system", "developer")]
    return utterances_of(said)


def _desk(renderer: Any, settings: EpisodeSettings) -> EpisodeFrontend:
    with _desks_lock:
        desk = _desks.get(renderer)
        if desk is None:
            book = EpisodeRouter(settings, load_encoder)
            desk = EpisodeFrontend(book, copy.deepcopy(renderer.get_tokenizer()))
            _desks[renderer] = desk
        return desk
