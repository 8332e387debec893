"""Time to render and tokenize a chat: without a policy, and with one that finds turns
or the system prompt.

Renders one conversation as a server does, in one thread, without an engine.

    python benchmarks/serving/chat_rendering.py MODEL --turns 40
    python benchmarks/serving/chat_rendering.py MODEL --template mistral.jinja
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from rich.console import Console
from rich.table import Table

POLICIES = {
    "no policy": None,
    "snapkv": {"name": "snapkv"},
    "flowkv": {"name": "flowkv"},
    "epicache": {"name": "epicache", "base": "keydiff"},
    "flowkv, no prefix": {"name": "flowkv", "shared_prefix": "none"},
}


def conversation(turns: int, words: int, system_words: int) -> list[dict[str, str]]:
    """Questions and answers of ``words`` words each; the last question is live."""
    system = "You answer questions of a traveller. " * max(system_words // 6, 1)
    messages = [{"role": "system", "content": system}]
    for number in range(turns):
        question = f"Question {number}: " + "what of the towns in the north? " * (
            words // 7
        )
        answer = f"Answer {number}: " + "they are rainy, green and calm. " * (
            words // 6
        )
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return messages[:-1]


def renderer_of(model: str, policy: dict[str, Any] | None) -> Any:
    """vLLM's renderer for a model and a policy."""
    from vllm.config import ModelConfig
    from vllm.renderers.hf import HfRenderer
    from vllm.tokenizers import get_tokenizer

    from vllm_kvplugins.vllm_adapter.frontend import chat_episodes, chat_turns

    chat_turns.install()
    # Found in the engine's configuration otherwise; short histories are static.
    shape = SimpleNamespace(block_size=32, kv_bytes_per_token=1024)
    chat_episodes.geometry_of = lambda config: shape
    config = SimpleNamespace(
        additional_config={"kv_policy": policy} if policy else {},
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        kv_transfer_config=None,
        model_config=ModelConfig(model=model, max_model_len=None),
        parallel_config=SimpleNamespace(_api_process_rank=0),
    )
    return HfRenderer(config, get_tokenizer(model))


def main(
    model: str,
    turns: int = 40,
    words: Annotated[int, typer.Option(help="per message")] = 60,
    system_words: Annotated[int, typer.Option(help="of the system prompt")] = 6,
    template: Annotated[Path | None, typer.Option(help="instead of MODEL's")] = None,
    rounds: int = 15,
) -> None:
    """Render the conversation in turns with every policy."""
    from vllm.renderers import ChatParams

    messages = conversation(turns, words, system_words)
    text = template.read_text() if template else None
    params = ChatParams(
        text, "auto", {"add_generation_prompt": True, "tokenize": False}
    )
    renderers = {name: renderer_of(model, policy) for name, policy in POLICIES.items()}
    times: dict[str, list[float]] = {name: [] for name in renderers}
    found: dict[str, int | str] = dict.fromkeys(renderers, "")
    shared = dict(found)
    tokens = 0
    for _ in range(rounds + 1):
        for name, renderer in renderers.items():
            copies = [dict(message) for message in messages]
            settings = renderer.default_chat_tok_params.with_kwargs(
                add_special_tokens=False
            )
            start = time.perf_counter()
            _, (prompt,) = renderer.render_chat([copies], params, settings)
            times[name].append(1e3 * (time.perf_counter() - start))
            tokens = len(prompt["prompt_token_ids"])
            parameters = prompt.get("kv_policy_parameters")
            if parameters is not None:
                found[name] = len(parameters.get("turn_ends", ()))
            shared[name] = prompt.get("kv_policy_shared_prefix", "")
    table = Table(title=f"{turns} turns, {tokens} tokens, {rounds} rounds")
    columns = ("", "median ms", "fastest", "slowest", "turn ends", "prefix tokens")
    for column in columns:
        table.add_column(column, justify="right")
    for name, each in times.items():
        del each[0]  # compiles the template
        figures = [f"{figure:.1f}" for figure in (median(each), min(each), max(each))]
        table.add_row(name, *figures, str(found[name]), str(shared[name]))
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
