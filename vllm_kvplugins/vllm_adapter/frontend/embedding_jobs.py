"""What a server does for conversations while it idles.

It builds caches of episodes that no query has gone to yet. A build is a request of one
token with the history as its prompt: when it ends, its cache is kept as a session,
which is what the first query to that episode continues. One that is interrupted keeps
what it has read, too. Before that, segments of conversations that have grown are
embedded, which no query waits for.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.vllm_adapter.config.engine_config import policy_of
from vllm_kvplugins.vllm_adapter.config.turns import PATCHED_PROMPT, TURN_ENDS
from vllm_kvplugins.vllm_adapter.frontend.chat_episodes import LESSON, OTHERS

logger = init_logger("vllm.kv_policy")

_OURS = "kv-episode-"
_MOST_WAITING = 64
_LOOK_S = 0.05
_INSTALLED = "_kvplugins_builds"


@dataclass(frozen=True, slots=True)
class EpisodeBuild:
    """A cache to build.

    Attributes:
        history, patched_prompt: token ids.
        salt: whose it is.
    """

    history: tuple[int, ...]
    patched_prompt: tuple[int, ...]
    salt: str | None


class Builder:
    """Builds of one engine, one after another, newest conversations first.

    Args:
        start: runs a build to its end.
        busy: whether requests of clients are under way.
        eager: do not wait until none is.
        ahead: whether there are builds at all; without, lessons only.
    """

    def __init__(
        self,
        start: Callable[[EpisodeBuild], Awaitable[None]],
        busy: Callable[[], bool],
        eager: bool,
        ahead: bool = True,
    ) -> None:
        self._start, self._busy, self._eager = start, busy, eager
        self._ahead = ahead
        # by owner and patched prompt; a longer history takes an older one's place
        self._waiting: OrderedDict[Any, EpisodeBuild] = OrderedDict()
        self._lessons: deque[Callable[[], None]] = deque(maxlen=_MOST_WAITING)
        self._worker: asyncio.Task[None] | None = None
        self._running: asyncio.Future[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Builds that have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> bool:
        """Whether one is under way."""
        return self._running is not None

    def offer(
        self,
        builds: Iterable[EpisodeBuild],
        lesson: Callable[[], None] | None = None,
    ) -> None:
        """Ask for builds and a lesson; the oldest are given up when too many wait.

        Args:
            lesson: called in another thread; it may raise KVPolicyError.
        """
        for build in builds if self._ahead else ():
            self._wait(build)
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popitem(last=False)
        if lesson is not None:
            self._lessons.append(lesson)
        wanted = self._waiting or self._lessons
        if wanted and (self._worker is None or self._worker.done()):
            self._worker = asyncio.ensure_future(self._work())

    def interrupt(self) -> None:
        """A client asks for something: it comes first."""
        if self._running is not None and not self._eager:
            self._running.cancel()

    def _wait(self, build: EpisodeBuild) -> None:
        key = (build.salt, build.patched_prompt)
        self._waiting[key] = build
        self._waiting.move_to_end(key)

    async def _work(self) -> None:
        while self._waiting or self._lessons:
            while not self._eager and self._busy():
                await asyncio.sleep(_LOOK_S)
            if self._lessons:
                await self._learn(self._lessons.popleft())
                continue
            key, build = self._waiting.popitem()
            self._running = asyncio.ensure_future(self._start(build))
            try:
                await asyncio.wait([self._running])
            except asyncio.CancelledError:  # the engine goes away
                self._running.cancel()
                raise
            if self._running.cancelled():
                self._waiting.setdefault(key, build)
            elif (error := self._running.exception()) is not None:
                logger.warning("a cache of an episode was not built: %s", error)
            self._running = None

    async def _learn(self, lesson: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(lesson)
        except KVPolicyError as error:
            logger.warning("segments of a conversation were not embedded: %s", error)


_builders: WeakKeyDictionary[Any, Builder] = WeakKeyDictionary()


def install() -> None:
    """Wrap the place where a server's requests start; does nothing the second time."""
    if getattr(AsyncLLM, _INSTALLED, False):
        return
    setattr(AsyncLLM, _INSTALLED, True)
    original = AsyncLLM.add_request
    signature = inspect.signature(original)

    @functools.wraps(original)
    async def add_request(self: AsyncLLM, *args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(self, *args, **kwargs).arguments
        builder = None
        if not str(asked["request_id"]).startswith(_OURS):
            builder = _builder(self)
        if builder is None:
            return await original(self, *args, **kwargs)
        started = await original(self, *args, **kwargs)
        # not before: until then the engine is idle, and the build would begin again
        builder.interrupt()
        prompt = asked["prompt"]
        if isinstance(prompt, dict):
            builder.offer(_others(prompt), prompt.get(LESSON))
        return started

    AsyncLLM.add_request = add_request


def _builder(engine: Any) -> Builder | None:
    """The engine's; None if its policy has no episodes."""
    policy = policy_of(engine.vllm_config)
    routing = policy.episode_routing if policy is not None else None
    if routing is None:
        return None
    settings = routing.settings
    if engine not in _builders:
        _builders[engine] = Builder(
            functools.partial(_run, engine),
            engine.output_processor.has_unfinished_requests,
            eager=settings.build == "eager",
            ahead=settings.build != "never",
        )
    return _builders[engine]


def _others(prompt: dict[str, Any]) -> list[EpisodeBuild]:
    """Builds for the episodes that a request did not go to."""
    return [
        EpisodeBuild(
            tuple(prompt["prompt_token_ids"][: told[TURN_ENDS][-1]]),
            tuple(told[PATCHED_PROMPT]),
            prompt.get("cache_salt"),
        )
        for told in prompt.get(OTHERS, ())
    ]


async def _run(engine: Any, build: EpisodeBuild) -> None:
    # as rendered: there is nothing to tokenize
    prompt: dict[str, Any] = {
        "type": "token",
        "prompt_token_ids": list(build.history),
    }
    if build.salt is not None:
        prompt["cache_salt"] = build.salt
    told = {
        TURN_ENDS: [len(build.history)],
        PATCHED_PROMPT: list(build.patched_prompt),
    }
    params = SamplingParams(max_tokens=1, detokenize=False, extra_args=told)
    async for _ in engine.generate(prompt, params, f"{_OURS}{uuid.uuid4().hex}"):
        pass
