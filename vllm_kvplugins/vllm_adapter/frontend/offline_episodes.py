"""Building episodes with an ``LLM`` of this process; see ``episodic``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.renderers import ChatParams

from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.vllm_adapter.config.engine_config import policy_of
from vllm_kvplugins.vllm_adapter.config.turns import TURN_ENDS
from vllm_kvplugins.vllm_adapter.frontend.chat_turns import requests_of_episodes

# A user's message, without which there is no history; no cache depends on it.
_ANY_QUERY = {"role": "user", "content": "…"}


def build(llm: Any, messages: Sequence[dict[str, Any]]) -> int:
    """Read a conversation once for each of its episodes.

    Returns:
        How many there are.

    Raises:
        KVPolicyError: the engine's policy has no episodes.
    """
    policy = policy_of(llm.llm_engine.vllm_config)
    if policy is None or policy.episode_routing is None:
        name = "no policy" if policy is None else policy.name
        raise KVPolicyError(
            f"the engine runs {name}, which has no episodes; start it with "
            'additional_config={"kv_policy": {"name": "epicache"}}'
        )
    renderer = llm.renderer
    _, (prompt,) = renderer.render_chat(
        [[*messages, _ANY_QUERY]],
        ChatParams(
            chat_template=llm.chat_template,
            chat_template_kwargs={"add_generation_prompt": True},
        ),
        renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False),
    )
    tokens, told = prompt["prompt_token_ids"], requests_of_episodes(prompt)
    for parameters in told:
        history = tokens[: parameters[TURN_ENDS][-1]]
        llm.generate(
            [{"prompt_token_ids": history}],
            SamplingParams(max_tokens=1, detokenize=False, extra_args=parameters),
            use_tqdm=False,
        )
    return len(told)
