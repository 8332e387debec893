"""Speed of policies against stock vLLM, for ``evidence.py``.

Stock vLLM and the policy run in processes of their own and take turns, so that what
else the machine does slows both. A round is one request on each, and gives one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from _engine import EngineProcess
from _evidence_samples import Prompt
from _quality_engine import engine_options
from _quality_rows import Row
from _quality_samples import Setting

from vllm_kvplugins.config import parse_policy

SPEED = "speed"
SPEED_TOKENS = 32
_WARM_UP_TOKENS = 200


class SpeedRounds:
    """Requests that policies and stock vLLM serve in turns.

    Stock vLLM starts once, with the first policy. Used as a context, it ends with it.

    Args:
        prompt: every round computes all of it.
    """

    def __init__(self, setting: Setting, prompt: Prompt, max_model_len: int) -> None:
        self._prompt = prompt
        self._options = engine_options(setting, max_model_len, batch=1) | {
            "model": setting.model,
            "enable_prefix_caching": False,
        }
        self._stock: EngineProcess | None = None

    def __enter__(self) -> SpeedRounds:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._stock is not None:
            self._stock.close()

    def of(self, policy: Mapping[str, Any], rounds: Iterable[int]) -> Iterator[Row]:
        """One row per round: first token and tokens per second, of both engines."""
        self._stock = self._stock or self._open(None)
        engine = self._open(policy)
        try:
            for number in rounds:
                order = [engine, self._stock] if number % 2 else [self._stock, engine]
                timed = {each: self._time(each, policy) for each in order}
                first_ms, rate = timed[engine]
                stock_ms, stock_rate = timed[self._stock]
                yield {
                    "task": SPEED,
                    "sample": f"round {number}",
                    "group": f"round {number}",
                    "score": rate,
                    "first_token_ms": first_ms,
                    "stock_tokens_per_s": stock_rate,
                    "stock_first_token_ms": stock_ms,
                    "prompt_tokens": len(self._prompt.token_ids),
                }
        finally:
            engine.close()

    def _open(self, policy: Mapping[str, Any] | None) -> EngineProcess:
        # A session would hold the prompt of the round before.
        given = None if policy is None else dict(policy) | {"sessions": False}
        engine = EngineProcess(given, **self._options)
        warm_up = list(self._prompt.token_ids[:_WARM_UP_TOKENS])
        engine.ask("turn", prompt=warm_up, turn_ends=[], max_tokens=4)
        return engine

    def _time(
        self, engine: EngineProcess, policy: Mapping[str, Any]
    ) -> tuple[float, float]:
        """First token in ms, and tokens per second after it."""
        turns = parse_policy(dict(policy)).turns is not None
        ends = [self._prompt.turn_end] if turns and engine is not self._stock else []
        answer = engine.ask(
            "turn",
            prompt=list(self._prompt.token_ids),
            turn_ends=ends,
            max_tokens=1 + SPEED_TOKENS,
        )
        if answer["computed"] != len(self._prompt.token_ids):
            raise RuntimeError(
                f"{answer['computed']} of {len(self._prompt.token_ids)} prompt tokens "
                "were computed; every round must compute all of them"
            )
        times = answer["token_ms"]
        rate = 1e3 * SPEED_TOKENS / (times[-1] - times[0])
        return round(answer["first_ms"], 1), round(rate, 3)
