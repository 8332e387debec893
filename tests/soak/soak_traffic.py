"""Rounds of traffic against one server, and the invariants after each round."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import aiohttp
from soak_client import HANG_S, Client, Requests, SoakRequest, lead
from soak_nonsense import KNOWN_5XX, Case
from soak_server import Server, parse_metrics
from soak_sessions import Store
from soak_talks import Talks, replay

_ROUND_S = 8
_CALM_S = 60  # An idle server must be idle after this time.
_WARM_UP = 0.4  # share of the time; memory may grow until then
_MOST_GROWTH = 0.05
# Where two log-probabilities are this close, the shape of the batch may decide
_CLOSE = 1e-3
_AT_REST = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    # Blocks that requests hold; cached blocks count as free
    "vllm:kv_cache_usage_perc",
)
_POLICY_AT_REST = (
    "vllm:kv_policy_resident_tokens",
    "vllm:kv_policy_host_reserved_bytes",
    "vllm:kv_policy_held_requests",
)
_OWN = "own "  # prefix of the salts of requests that share nothing
_TALKS = 6  # number of conversations to compare, each of several requests


class Traffic:
    """One server under random traffic. Every check raises AssertionError.

    Args:
        expected: status per malformed request; None: record the answers.
        samples: answers compared with the same requests alone.
        preempted_differ: whether a policy says that preempted requests go on
            with other tokens; those are then not compared.
        store: checks of the server's sessions; None if it keeps none.
        restored_differ: whether a policy says that what goes on from a session has
            other tokens than a recomputed answer. Then only requests with a salt
            of their own are compared, and no conversations.

    Attributes:
        statuses: status of this server per malformed request.
        counts: what happened, so that a test can see that it did happen.
    """

    def __init__(
        self,
        server: Server,
        seed: int,
        cases: list[Case],
        expected: dict[str, int] | None = None,
        samples: int = 40,
        preempted_differ: bool = False,
        store: Store | None = None,
        restored_differ: bool = False,
    ) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.statuses: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.rss_bytes: list[int] = []
        self._requests = Requests(self.rng)
        self._cases = cases
        self._expected = expected
        self._samples = samples
        self._preempted_differ = preempted_differ
        self._store = store
        self._restored_differ = restored_differ
        self._talks = Talks(self.rng, self.counts)
        self._owners = 0  # salts of requests that share nothing
        self._answered: list[SoakRequest] = []
        # (time, number of preemptions so far)
        self._preemptions: list[tuple[float, float]] = []
        self._client: Client

    async def run(self, traffic_s: float) -> None:
        """Send all malformed requests, then traffic for a while, then check the idle
        server.
        """
        timeout = aiohttp.ClientTimeout(total=HANG_S)
        connector = aiohttp.TCPConnector(limit=0)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        async with session:
            self._client = Client(session, self.server.url)
            await self._rest()
            await self._all_nonsense()
            began_s = time.monotonic()
            while (spent_s := time.monotonic() - began_s) < traffic_s:
                await self._round(spent_s)
                await self._rest()
                rss_bytes = self.server.rss_bytes()
                if spent_s < traffic_s * _WARM_UP or not self.rss_bytes:
                    self.rss_bytes = [max([rss_bytes, *self.rss_bytes])]
                else:
                    self.rss_bytes.append(rss_bytes)
            await self._compare()
            await self._compare_talks()
            await self._rest()
            if self._store is not None:
                await self._store.check_continued(self._client, self.rng)
                await self._rest()
                await self._store.check_cleared(self._client)
                await self._rest()

    def check_memory(self) -> None:
        """Memory may grow during warm-up, and hardly afterwards."""
        warm_bytes, last_bytes = self.rss_bytes[0], self.rss_bytes[-1]
        assert last_bytes <= warm_bytes * (1 + _MOST_GROWTH), (
            f"memory grew from {warm_bytes} to {last_bytes} bytes: {self.rss_bytes}"
        )

    def summary(self) -> str:
        events = ", ".join(f"{count} {event}" for event, count in self.counts.items())
        mb = " ".join(str(rss_bytes // 10**6) for rss_bytes in self.rss_bytes)
        return f"{events}; MB when warm and after each round: {mb}"

    # -- parts of a round --------------------------------------------------------

    async def _round(self, spent_s: float) -> None:
        """Random clients for some seconds; then all requests may finish."""
        rng = self.rng
        # One client, a few clients, or more than the server runs at once.
        clients = rng.choice((1, 3, 8, 16, 30))
        ends_s = time.monotonic() + _ROUND_S
        watch = asyncio.create_task(self._watch())
        jobs = [
            self._one_client(random.Random(rng.randrange(1 << 30)), ends_s)
            for _ in range(clients)
        ]
        if clients >= 8:
            jobs += self._burst()
        try:
            await _together(jobs)
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch  # raises the error of the task
        await self._note_preemptions()
        self.counts["rounds"] += 1

    async def _one_client(self, rng: random.Random, ends_s: float) -> None:
        client = self._client
        while time.monotonic() < ends_s:
            self.server.check_alive()
            if rng.random() < self._talkative:
                await self._talks.turn(client, rng)
                continue
            request = self._requests.one(rng, short=rng.random() < 0.5)
            if self._restored_differ and rng.random() < 0.8:
                request.body["cache_salt"] = self._new_owner()
            dice = rng.random()
            if dice < 0.5:
                await client.ask(request)
                self.counts["answered"] += 1
                self._answered.append(request)
            elif dice < 0.65:  # mostly before the first token
                await client.hang_up(request, rng.uniform(0, 0.3), 10**6)
                self.counts["hung up early"] += 1
            elif dice < 0.8:
                request.body["stream"] = True
                request.body.pop("prompt_logprobs", None)
                await client.hang_up(request, HANG_S, rng.randint(1, 60))
                self.counts["hung up in a stream"] += 1
            elif dice < 0.95:
                await self._nonsense(rng.choice(self._cases))
            elif dice < 0.98:
                await client.half_a_request()
                self.counts["half requests"] += 1
            else:  # resetting the cache preempts all running requests
                await client.control("/reset_prefix_cache?reset_running_requests=true")
                self.counts["resets"] += 1
            await asyncio.sleep(rng.expovariate(10))

    @property
    def _talkative(self) -> float:
        """Probability that a client continues a conversation."""
        return 0.3 if self._store is None else 0.6

    def _new_owner(self) -> str:
        """A cache salt that no request has used."""
        self._owners += 1
        return f"{_OWN}{self._owners}"

    def _burst(self) -> list[Coroutine[Any, Any, None]]:
        """Many requests at once:

        malformed ones, and clients that disconnect at once.
        """
        rng = self.rng
        jobs = [self._nonsense(case) for case in rng.sample(self._cases, 30)]
        for _ in range(20):
            request = self._requests.one(rng)
            jobs.append(self._client.hang_up(request, rng.uniform(0, 1), 10**6))
        self.counts["bursts"] += 1
        return jobs

    async def _watch(self) -> None:
        while True:
            await self._note_preemptions()
            await asyncio.sleep(0.3)

    async def _note_preemptions(self) -> None:
        asked_s = time.monotonic()
        metrics = await self._metrics()
        if self._store is not None:
            self._store.check(metrics)
        self._preemptions.append((asked_s, metrics["vllm:num_preemptions_total"]))

    # -- nonsense ----------------------------------------------------------------

    async def _all_nonsense(self) -> None:
        """A few requests at a time, because some generate up to the context's limit."""
        remaining_cases = iter(self._cases)

        async def ask_on() -> None:
            for case in remaining_cases:
                await self._nonsense(case)

        await _together([ask_on() for _ in range(6)])

    async def _nonsense(self, case: Case) -> None:
        status = await self._client.status(case)
        self.counts["nonsense"] += 1
        before = self.statuses.setdefault(case.name, status)
        assert status == before, f"{case.name}: {status}, but {before} before"
        if status >= 500:
            known = case.name.split(" ", 1)[1]
            assert known in KNOWN_5XX, f"{case.name}: {status}\n{self.server.tail()}"
            self.counts["known 5xx of vLLM"] += 1
        if self._expected is not None:
            stock = self._expected[case.name]
            assert status == stock, f"{case.name}: {status}, stock vLLM {stock}"

    # -- what must hold afterwards ---------------------------------------------------

    async def _metrics(self) -> dict[str, float]:
        return parse_metrics(await self._client.text("/metrics"))

    async def _rest(self) -> None:
        """Without requests, the server must hold nothing and still answer.

        A request whose client has gone may arrive at the engine after that, so
        what is held now and then is waited for.
        """
        deadline_s = time.monotonic() + _CALM_S
        calm = 0
        while calm < 2:
            self.server.check_alive()
            held = await self._held()
            calm = 0 if held else calm + 1
            assert time.monotonic() < deadline_s, f"held without a request: {held}"
            await asyncio.sleep(0.2)
        await self._client.text("/health")
        if self._store is not None:
            await self._store.check_kept(self._client)

    async def _held(self) -> dict[str, float]:
        """What the server's metrics say that requests hold."""
        metrics = await self._metrics()
        names = _AT_REST if self.server.policy is None else _AT_REST + _POLICY_AT_REST
        held = {name: metrics[name] for name in names if metrics[name]}
        self.counts["preemptions"] = int(metrics["vllm:num_preemptions_total"])
        if self.server.policy is None:
            return held
        for name in ("compressions", "fetched_tokens"):
            count = metrics[f"vllm:kv_policy_{name}_total"]
            self.counts[name.replace("_", " ")] = int(count)
        failed = metrics["vllm:kv_policy_failed_indices_total"]
        assert not failed, f"{failed:.0f} indices or factors failed, see the log"
        if self._store is not None:
            self.counts |= self._store.check(metrics)
            # host memory of sessions stays reserved until they are dropped
            if metrics["vllm:kv_policy_sessions"]:
                held.pop("vllm:kv_policy_host_reserved_bytes", None)
        # Raises in the server if request indices or host pages leaked.
        body = {"method": "kv_policy_check_integrity"}
        (known,) = (await self._client.control("/collective_rpc", body))["results"]
        if known != "0":
            held["requests that the worker knows"] = float(known)
        return held

    # -- tokens ------------------------------------------------------------------------

    def _undisturbed(self, request: SoakRequest) -> bool:
        """Whether no request was preempted while this one ran."""
        before = [n for at_s, n in self._preemptions if at_s <= request.began_s]
        after = [n for at_s, n in self._preemptions if at_s >= request.ended_s]
        return bool(before and after) and before[-1] == after[0]

    async def _compare(self) -> None:
        """Compare greedy answers from the traffic with those of the same requests
        alone.
        """
        greedy = [request for request in self._answered if request.greedy]
        if self._preempted_differ:
            greedy = [request for request in greedy if self._undisturbed(request)]
        if self._restored_differ:
            greedy = [
                request
                for request in greedy
                if request.body.get("cache_salt", "").startswith(_OWN)
            ]
        for request in self.rng.sample(greedy, min(self._samples, len(greedy))):
            if self._store is None:
                reset = await self._client.control("/reset_prefix_cache")
                assert reset["success"], "the prefix cache cannot be emptied"
                alone = SoakRequest(request.path, request.body, request.choices)
            else:  # sessions are found independently of the prefix cache
                body = request.body | {"cache_salt": self._new_owner()}
                alone = SoakRequest(request.path, body, request.choices)
            await self._client.ask(alone)
            await self._same(request, alone)
            self.counts["compared"] += 1

    async def _compare_talks(self) -> None:
        """Compare whole conversations with the same conversations alone.

        Whatever was evicted, restored, read from a file or recomputed in between:
        under policies that work turn by turn a history is cut at the same places each
        time (docs/policies/flowkv.md, epicache.md), and without sessions each request
        stands for itself. Where a compressor that works on whole prompts goes on from
        a session, it has seen less than one that reads everything again, so that what
        others drove out would decide.
        """
        if self._restored_differ:
            return
        for talk in self._talks.sample(self.rng, _TALKS):
            for request, alone in await replay(self._client, talk, self._new_owner()):
                if not self._preempted_differ or self._undisturbed(request):
                    await self._same(request, alone)
                    self.counts["turns compared"] += 1

    async def _same(self, request: SoakRequest, alone: SoakRequest) -> None:
        """Tokens must be equal, except where two tokens are nearly tied."""
        for choice, (tokens, alone_tokens) in enumerate(
            zip(request.tokens, alone.tokens, strict=True)
        ):
            if tokens == alone_tokens:
                continue
            at = next(i for i in range(len(tokens)) if tokens[i] != alone_tokens[i])
            led = await lead(self._client, alone, choice, at)
            assert led < _CLOSE, (
                f"token {at} is {tokens[at]}, alone {alone_tokens[at]} with a lead of "
                f"{led:.4f}: {request.body}"
            )
            self.counts["near ties"] += 1


async def _together(jobs: list[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first failure cancels the others and is raised."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
