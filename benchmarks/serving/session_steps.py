"""How long other requests wait while sessions are saved and restored.

One request generates. Meanwhile others, with a long prompt, end and leave a session, or
continue one from host memory. Their copies are made by a thread ("thread", as the
engine does) or in the step ("step", as it does for small sessions). Reported: the
longest of the steps around each copy, minus the median step of the generating request.

    OMP_NUM_THREADS=1 python benchmarks/serving/session_steps.py compare MODEL
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _engine import synthetic_prompt
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False)
POLICY = {"name": "full", "sessions": True, "session_memory": "6GiB"}


@app.command()
def compare(
    model: str,
    prompt_tokens: int = 4000,
    sessions: Annotated[int, typer.Option(help="per round")] = 6,
    rounds: int = 3,
) -> None:
    """Alternate between both kinds of copies, each round in new processes."""
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for copies in ("thread", "step"):
            command = [sys.executable, __file__, "measure", model, copies]
            command += [str(prompt_tokens), str(sessions)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            for what, extra_ms in json.loads(done.stdout.splitlines()[-1]).items():
                found.setdefault((what, copies), []).append(extra_ms)
    table = Table(title=f"ms that a step takes longer, {prompt_tokens} tokens")
    for heading in ("", "thread", "step"):
        table.add_column(heading, justify="right")
    for what in ("save", "restore"):
        cells = (sorted(found[what, copies]) for copies in ("thread", "step"))
        table.add_row(
            what,
            *(f"{statistics.median(c):.1f} ({c[0]:.1f}..{c[-1]:.1f})" for c in cells),
        )
    Console(width=100).print(table)


@app.command()
def measure(model: str, copies: str, prompt_tokens: int, sessions: int) -> None:
    """One round in this process; prints JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    _choose(copies)
    engine = Engine(model)
    extra: dict[str, list[float]] = {"save": [], "restore": []}
    usual: list[float] = []
    engine.add("generates", synthetic_prompt(40000, 64, 0), 20000)
    for number in range(sessions):
        prompt = synthetic_prompt(40000, prompt_tokens, number + 1)
        engine.add(f"first{number}", prompt, 1)
        engine.until_ended(f"first{number}")
        extra["save"].append(max(engine.step() for _ in range(4)))
        usual += [engine.step() for _ in range(8)]
        engine.add(f"again{number}", [*prompt, 7], 1, session_is_on_host=True)
        extra["restore"].append(max(engine.until_ended(f"again{number}")))
        for _ in range(8):
            engine.step()
    median = statistics.median(usual)
    report = {what: statistics.median(each) - median for what, each in extra.items()}
    out.write(json.dumps(report) + "\n")
    out.flush()
    os._exit(0)


def _choose(copies: str) -> None:
    """Let the engine copy every session by a thread, or none."""
    from vllm_kvplugins.sessions.store import SessionStore
    from vllm_kvplugins.vllm_adapter.scheduler import sessions

    largest = 0 if copies == "thread" else 1 << 40
    init = SessionStore.__init__

    def chosen(store: Any, *args: Any, **kwargs: Any) -> None:
        init(store, *args, **kwargs, copied_at_once_bytes=largest)

    SessionStore.__init__ = chosen  # type: ignore[method-assign]
    sessions.MIN_BYTES = largest


class Engine:
    """An engine whose steps are timed."""

    def __init__(self, model: str) -> None:
        from vllm import LLM

        from vllm_kvplugins.plugin import register

        register()
        self._llm = LLM(
            model,
            dtype="bfloat16",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=8192,
            max_num_batched_tokens=8192,
            kv_cache_memory_bytes=2 << 30,
            additional_config={"kv_policy": POLICY},
            disable_log_stats=True,
        ).llm_engine
        self._scheduler = self._llm.engine_core.engine_core.scheduler
        self._ended: set[str] = set()

    def add(
        self,
        name: str,
        prompt: list[int],
        tokens: int,
        session_is_on_host: bool = False,
    ) -> None:
        """Add a request.

        Args:
            session_is_on_host: no session is left on the device.
        """
        from vllm import SamplingParams

        if session_is_on_host:
            kept = self._scheduler.connector.sessions._manager.device_sessions
            for session_id in kept.session_ids:
                kept.drop(session_id)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self._llm.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> float:
        """Milliseconds of one step."""
        began = time.perf_counter()
        for output in self._llm.step():
            if output.finished:
                self._ended.add(output.request_id)
        return 1e3 * (time.perf_counter() - began)

    def until_ended(self, name: str) -> list[float]:
        """Milliseconds of each step until a request has ended."""
        steps = []
        while name not in self._ended:
            steps.append(self.step())
        return steps


if __name__ == "__main__":
    app()
