"""Invariants of a server's sessions."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from soak_client import Client, SoakRequest, random_words
from soak_model import NAME
from soak_nonsense import COMPLETIONS
from soak_server import parse_metrics

from vllm_kvplugins.budgets import parse_bytes

_SETTLED_S = 30
_COUNTERS = ("hits", "misses", "evictions", "refused")
# Prompts from this length on must not be in any prefix cache.
_PROMPT, _ANSWER, _MORE, _IDLE_S = 200, 8, 20, 1


class Store:
    """The session store of one server, according to its metrics and its worker.

    Args:
        policy: its settings, with limits.
        folder: in which the server runs.
    """

    def __init__(self, policy: dict[str, Any], folder: Path) -> None:
        self._folder = (
            folder / policy["session_dir"] if "session_dir" in policy else None
        )
        memory, disk = policy.get("session_memory"), policy.get("session_disk")
        assert memory, "a soak of sessions needs a session_memory that is too small"
        self._memory_bytes = int(parse_bytes(memory))
        self._disk_bytes = int(parse_bytes(disk)) if disk else None
        # host memory of a retriever is counted at its maximum
        self._offloads = "host_memory" in policy

    def check(self, metrics: dict[str, float]) -> dict[str, int]:
        """Check that the store is within its limits and that no session was lost to an
        error.

        Returns:
            What has happened so far.
        """
        held = metrics["vllm:kv_policy_session_bytes"]
        assert 0 <= held <= self._memory_bytes, (
            f"sessions hold {held:.0f} bytes, session_memory is {self._memory_bytes}"
        )
        written = metrics["vllm:kv_policy_session_disk_bytes"]
        disk_limit = self._disk_bytes or 0
        assert 0 <= written <= disk_limit, (
            f"session files have {written:.0f} bytes, session_disk is {disk_limit}"
        )
        failures = metrics["vllm:kv_policy_session_failures_total"]
        assert not failures, f"{failures:.0f} sessions lost to errors, see the log"
        return {
            f"session {name}": int(metrics[f"vllm:kv_policy_session_{name}_total"])
            for name in _COUNTERS
        }

    async def check_kept(self, client: Client) -> None:
        """Check on an idle server that worker and scheduler agree about the sessions.

        Orders and reports travel with steps, and a server at rest makes none, so one
        that is behind gets a request too short to leave a session.
        """
        deadline_s = time.monotonic() + _SETTLED_S
        while (problem := await self._difference(client)) is not None:
            assert time.monotonic() < deadline_s, problem
            await client.ask(_completion([11], 1, "nobody"))
            await asyncio.sleep(0.2)

    async def _difference(self, client: Client) -> str | None:
        """The difference between the metrics and the worker's state; None if they
        agree.
        """
        metrics = await _metrics(client)
        self.check(metrics)
        body = {"method": "kv_policy_held_sessions"}
        (has,) = (await client.control("/collective_rpc", body))["results"]
        sessions = int(metrics["vllm:kv_policy_sessions"])
        held = int(metrics["vllm:kv_policy_session_bytes"])
        # the metrics do not say which sessions with files are also in memory
        same = has[0] <= sessions if self._disk_bytes else has[0] == sessions
        same &= has[1] <= held if self._offloads else has[1] == held
        summary = f"{sessions} sessions in all, {held} bytes in memory"
        return None if same else f"counted {summary}, but the worker has {has}"

    async def check_continued(self, client: Client, rng: random.Random) -> None:
        """Check that only the owner finds a session that was unused for a while."""
        prompt, owner = random_words(rng, _PROMPT), f"idle {rng.random()}"
        first = _completion(prompt, _ANSWER, owner)
        await client.ask(first)
        await asyncio.sleep(_IDLE_S)
        prompt = prompt + first.tokens[0] + random_words(rng, _MORE)
        restored = await self._restored(client, _completion(prompt, 1, "mallory"))
        assert not restored, (
            f"{restored} tokens of another owner's session were restored"
        )
        again = await self._restored(client, _completion(prompt, 1, owner))
        assert again >= _PROMPT, f"{again} tokens restored of {_PROMPT} that were there"

    async def _restored(self, client: Client, request: SoakRequest) -> int:
        """Tokens restored from sessions for one request."""
        key = "vllm:kv_policy_session_restored_tokens_total"
        before = (await _metrics(client))[key]
        await client.ask(request)
        await self.check_kept(client)
        return int((await _metrics(client))[key] - before)

    async def check_cleared(self, client: Client) -> None:
        """Check that nothing is left after all sessions were dropped."""
        # a server that builds episodes may hold blocks for a moment
        deadline_s = time.monotonic() + _SETTLED_S
        path = "/reset_prefix_cache?reset_external=true"
        while not (await client.control(path))["success"]:
            assert time.monotonic() < deadline_s, "the sessions cannot be dropped"
            await asyncio.sleep(0.2)
        names = ("sessions", "session_bytes", "session_disk_bytes")
        await client.ask(_completion([11], 1, "nobody"))
        await self.check_kept(client)
        metrics = await _metrics(client)
        values = {name: metrics[f"vllm:kv_policy_{name}"] for name in names}
        values["reserved"] = metrics["vllm:kv_policy_host_reserved_bytes"]
        assert not any(values.values()), (
            f"left when all sessions were dropped: {values}"
        )
        while files := self._files():
            assert time.monotonic() < deadline_s, f"files of no session: {files[:5]}"
            await asyncio.sleep(0.2)

    def _files(self) -> list[Path]:
        if self._folder is None:
            return []
        return [path for path in self._folder.rglob("*") if path.is_file()]


async def _metrics(client: Client) -> dict[str, float]:
    return parse_metrics(await client.text("/metrics"))


def _completion(prompt: list[int], disk_limit: int, owner: str) -> SoakRequest:
    body = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": disk_limit,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": False,
        "cache_salt": owner,
    }
    return SoakRequest(COMPLETIONS, body)
