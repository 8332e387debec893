"""Builds episodes with an ``LLM`` of this process; ``episodic`` is the public API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.renderers import ChatParams

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.vllm_adapter.config.engine_config import policy_of
from vllm_kvplugins.vllm_adapter.config.request_params import TURN_ENDS
from vllm_kvplugins.vllm_adapter.frontend.chat_episodes import save_clustering
from vllm_kvplugins.vllm_adapter.frontend.chat_turns import parameters_of_episodes

# A history ends where a query begins. No cache depends on this query.
_PLACEHOLDER_QUERY = {"role": "user", "content": "…"}


def build(llm: Any, messages: Sequence[dict[str, Any]]) -> int:
    """Prefill a conversation once for each of its episodes.

    Returns:
        Number of episodes.

    Raises:
        KVPolicyError: the engine's policy has no episodes.
    """
    policy = policy_of(llm.llm_engine.vllm_config)
    if policy is None or policy.episode_routing is None:
        current = "no KV policy" if policy is None else f"KV policy {policy.name!r}"
        raise KVPolicyError(
            coded(
                "KVP038",
                f"the engine runs {current}, which has no episodes; start it with "
                'additional_config={"kv_policy": {"name": "epicache"}}',
            )
        )
    renderer = llm.renderer
    _, (prompt,) = renderer.render_chat(
        [[*messages, _PLACEHOLDER_QUERY]],
        ChatParams(
            chat_template=llm.chat_template,
            chat_template_kwargs={"add_generation_prompt": True},
        ),
        renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False),
    )
    save_clustering(prompt, sampling_params=None)  # builds leave sessions
    tokens, episodes = prompt["prompt_token_ids"], parameters_of_episodes(prompt)
    for parameters in episodes:
        history = tokens[: parameters[TURN_ENDS][-1]]
        llm.generate(
            [{"prompt_token_ids": history}],
            SamplingParams(max_tokens=1, detokenize=False, extra_args=parameters),
            use_tqdm=False,
        )
    return len(episodes)
