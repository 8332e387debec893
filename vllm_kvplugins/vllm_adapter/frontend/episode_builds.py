"""Work on conversations that a server does while it is idle.

- Episode builds: caches of episodes that no query has been routed to. A build is a
  request for one token with the history as its prompt. When the request ends, the
  engine keeps its cache as a session, which the first query of that episode continues.
  An interrupted build also keeps what it has computed.
- Embedding jobs: embeddings of new segments, so that no query waits for them. They run
  before builds.
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
from vllm_kvplugins.vllm_adapter.config.request_params import (
    LOOP_ENDS,
    PATCHED_PROMPT,
    TURN_ENDS,
    uses_sessions,
)
from vllm_kvplugins.vllm_adapter.frontend.chat_episodes import (
    EMBEDDING_JOB,
    OTHER_EPISODES,
)
from vllm_kvplugins.vllm_adapter.frontend.shared_prefix import PROMPT_KEY

logger = init_logger("vllm.kv_policy")

_REQUEST_PREFIX = "kv-episode-"
_MAX_WAITING = 64
_POLL_SECONDS = 0.05
_INSTALLED = "_kvplugins_builds"

EmbeddingJob = Callable[[], None]


@dataclass(frozen=True, slots=True)
class EpisodeBuild:
    """A cache to build.

    Attributes:
        history: token IDs of the prompt.
        patched_prompt: token IDs that identify the episode.
        salt: cache salt of the client's request.
        shared_prefix: tokens of its system prompt.
        turn_ends: token counts at which its turns end; empty: it is one turn.
        loop_ends: token counts at which parts of its tool loops end.
    """

    history: tuple[int, ...]
    patched_prompt: tuple[int, ...]
    salt: str | None
    shared_prefix: int = 0
    turn_ends: tuple[int, ...] = ()
    loop_ends: tuple[int, ...] = ()


class EpisodeBuilder:
    """Runs the builds and embedding jobs of one engine, one at a time.

    Builds of the newest conversation run first.

    Args:
        run_build: runs a build; returns when its request ends.
        is_busy: whether the engine has unfinished requests of clients.
        eager: start at once instead of waiting until the engine is idle.
        builds_ahead: whether to run builds; False: embedding jobs only.
    """

    def __init__(
        self,
        run_build: Callable[[EpisodeBuild], Awaitable[None]],
        is_busy: Callable[[], bool],
        eager: bool,
        builds_ahead: bool = True,
    ) -> None:
        self._run_build, self._is_busy, self._eager = run_build, is_busy, eager
        self._builds_ahead = builds_ahead
        # By salt and patched prompt: a longer history replaces a shorter one.
        self._waiting: OrderedDict[Any, EpisodeBuild] = OrderedDict()
        self._embedding_jobs: deque[EmbeddingJob] = deque(maxlen=_MAX_WAITING)
        self._worker: asyncio.Task[None] | None = None
        self._running: asyncio.Future[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Number of builds that have not started."""
        return len(self._waiting)

    @property
    def running(self) -> bool:
        """Whether a build is running."""
        return self._running is not None

    def submit(
        self,
        builds: Iterable[EpisodeBuild],
        embedding_job: EmbeddingJob | None = None,
    ) -> None:
        """Queue builds and an embedding job. Drops the oldest ones if too many wait.

        Args:
            embedding_job: called in another thread; may raise KVPolicyError.
        """
        for build in builds if self._builds_ahead else ():
            key = (build.salt, build.patched_prompt)
            self._waiting[key] = build
            self._waiting.move_to_end(key)
        while len(self._waiting) > _MAX_WAITING:
            self._waiting.popitem(last=False)
        if embedding_job is not None:
            self._embedding_jobs.append(embedding_job)
        has_work = self._waiting or self._embedding_jobs
        if has_work and (self._worker is None or self._worker.done()):
            self._worker = asyncio.ensure_future(self._work())

    def interrupt(self) -> None:
        """Cancel the running build, because a client's request has priority."""
        if self._running is not None and not self._eager:
            self._running.cancel()

    async def _work(self) -> None:
        while self._waiting or self._embedding_jobs:
            while not self._eager and self._is_busy():
                await asyncio.sleep(_POLL_SECONDS)
            if self._embedding_jobs:
                await self._embed(self._embedding_jobs.popleft())
                continue
            key, build = self._waiting.popitem()
            self._running = asyncio.ensure_future(self._run_build(build))
            try:
                await asyncio.wait([self._running])
            except asyncio.CancelledError:  # the engine shuts down
                self._running.cancel()
                raise
            if self._running.cancelled():
                # Resume later, unless a longer history was queued meanwhile.
                self._waiting.setdefault(key, build)
            elif (error := self._running.exception()) is not None:
                logger.warning("the cache of an episode was not built: %s", error)
            self._running = None

    async def _embed(self, embedding_job: EmbeddingJob) -> None:
        try:
            await asyncio.to_thread(embedding_job)
        except KVPolicyError as error:
            logger.warning("segments of a conversation were not embedded: %s", error)


_builders: WeakKeyDictionary[Any, EpisodeBuilder] = WeakKeyDictionary()  # by engine


def install() -> None:
    """Wrap the method with which a server adds requests to its engine; idempotent."""
    if getattr(AsyncLLM, _INSTALLED, False):
        return
    setattr(AsyncLLM, _INSTALLED, True)
    original = AsyncLLM.add_request
    signature = inspect.signature(original)

    @functools.wraps(original)
    async def add_request(self: AsyncLLM, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        builder = None
        if not str(arguments["request_id"]).startswith(_REQUEST_PREFIX):
            builder = builder_of(self)
        if builder is None:
            return await original(self, *args, **kwargs)
        output = await original(self, *args, **kwargs)
        # Not before: the engine would still be idle, and the build would start again.
        builder.interrupt()
        prompt = arguments["prompt"]
        if isinstance(prompt, dict):
            # A build leaves a session, which this request may not want.
            leaves_sessions = uses_sessions(arguments.get("params"))
            builds = _builds_of(prompt) if leaves_sessions else []
            builder.submit(builds, prompt.get(EMBEDDING_JOB))
        return output

    AsyncLLM.add_request = add_request


def builder_of(engine: Any) -> EpisodeBuilder | None:
    """The builder of an engine; None if its policy has no episodes."""
    policy = policy_of(engine.vllm_config)
    routing = policy.episode_routing if policy is not None else None
    if routing is None:
        return None
    settings = routing.settings
    if engine not in _builders:
        _builders[engine] = EpisodeBuilder(
            functools.partial(_run_build, engine),
            engine.output_processor.has_unfinished_requests,
            eager=settings.build == "eager",
            builds_ahead=settings.build != "never",
        )
    return _builders[engine]


def _builds_of(prompt: dict[str, Any]) -> list[EpisodeBuild]:
    """Builds of the episodes that a request was not routed to."""
    builds = []
    for parameters in prompt.get(OTHER_EPISODES, ()):
        history_tokens = parameters[TURN_ENDS][-1]
        loop_ends = parameters.get(LOOP_ENDS, ())
        builds.append(
            EpisodeBuild(
                tuple(prompt["prompt_token_ids"][:history_tokens]),
                tuple(parameters[PATCHED_PROMPT]),
                prompt.get("cache_salt"),
                prompt.get(PROMPT_KEY, 0),
                tuple(parameters[TURN_ENDS]),
                # Not those of the live turn.
                tuple(end for end in loop_ends if end <= history_tokens),
            )
        )
    return builds


async def _run_build(engine: Any, build: EpisodeBuild) -> None:
    # In the form of a rendered prompt, because there is nothing to tokenize.
    prompt: dict[str, Any] = {
        "type": "token",
        "prompt_token_ids": list(build.history),
    }
    if build.shared_prefix:
        prompt[PROMPT_KEY] = build.shared_prefix
    if build.salt is not None:
        prompt["cache_salt"] = build.salt
    parameters = {
        TURN_ENDS: list(build.turn_ends or [len(build.history)]),
        PATCHED_PROMPT: list(build.patched_prompt),
    }
    if build.loop_ends:
        parameters[LOOP_ENDS] = list(build.loop_ends)
    params = SamplingParams(max_tokens=1, detokenize=False, extra_args=parameters)
    request_id = f"{_REQUEST_PREFIX}{uuid.uuid4().hex}"
    async for _ in engine.generate(prompt, params, request_id):
        pass
