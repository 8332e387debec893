"""EpiCache without a server: prefill a conversation once, then ask queries about it.

::

    llm = LLM(MODEL, additional_config={"kv_policy": {"name": "epicache"}})
    conversation = episodic.build(llm, messages)
    print(conversation.ask("Where did we want to go in May?"))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Messages = Sequence[dict[str, Any]]


class Conversation:
    """A conversation whose episodes have cached KV.

    Attributes:
        messages: all messages, including queries and answers.
    """

    def __init__(self, llm: Any, messages: Messages) -> None:
        self._llm = llm
        self.messages = list(messages)

    def build(self) -> int:
        """Build the caches of all episodes that do not have one yet.

        Returns:
            Number of episodes; 0 if the conversation is too short to be compressed.

        Raises:
            KVPolicyError: the engine's policy has no episodes.

        Cost: prefills the conversation once per episode, without the parts that a
        session has kept.
        """
        from vllm_kvplugins.vllm_adapter.frontend.offline_episodes import build

        return build(self._llm, self.messages)

    def ask(self, query: str, sampling_params: Any = None) -> str:
        """Answer a query from the cache of the episode that it is routed to.

        Appends the query and the answer to ``messages``.

        Args:
            sampling_params: vLLM's ``SamplingParams``; None: the engine's defaults.

        Returns:
            The answer.
        """
        messages = [*self.messages, {"role": "user", "content": query}]
        (output,) = self._llm.chat(messages, sampling_params, use_tqdm=False)
        answer: str = output.outputs[0].text
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer


def build(llm: Any, history: Messages) -> Conversation:
    """Build a compressed cache for each episode of a conversation (EpiCache, phase A).

    Args:
        llm: vLLM's ``LLM`` with policy ``epicache``.
        history: chat messages.

    Returns:
        The conversation, ready for queries.

    Raises:
        KVPolicyError: the engine's policy has no episodes.
    """
    conversation = Conversation(llm, history)
    conversation.build()
    return conversation
