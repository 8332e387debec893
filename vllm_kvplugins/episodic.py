"""EpiCache without a server: read a conversation once, then ask about it.

::

    llm = LLM(MODEL, additional_config={"kv_policy": {"name": "epicache"}})
    talk = episodic.build(llm, messages)
    print(talk.ask("Where did we want to go in May?"))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Messages = Sequence[dict[str, Any]]


class Conversation:
    """A conversation with an engine, whose episodes are cached.

    Attributes:
        messages: so far, questions and answers included.
    """

    def __init__(self, llm: Any, messages: Messages) -> None:
        self._llm = llm
        self.messages = list(messages)

    def build(self) -> int:
        """Build the cache of every episode, as far as that has not been done.

        Returns:
            How many episodes there are; 0 if the conversation is so short that nothing
            is compressed.

        Raises:
            KVPolicyError: the engine's policy has no episodes.

        Cost: the conversation is read once per episode; what was read before is not
            read again.
        """
        from vllm_kvplugins.vllm_adapter.frontend.offline_episodes import build

        return build(self._llm, self.messages)

    def ask(self, query: str, sampling_params: Any = None) -> str:
        """Answer a question from the cache of the episode that it belongs to.

        Args:
            sampling_params: vLLM's, for the answer; None: the engine's defaults.

        Returns:
            The answer; it and the question become part of the conversation.
        """
        asked = [*self.messages, {"role": "user", "content": query}]
        (output,) = self._llm.chat(asked, sampling_params, use_tqdm=False)
        answer: str = output.outputs[0].text
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer


def build(llm: Any, history: Messages) -> Conversation:
    """Read a conversation, one compressed cache per episode (EpiCache, phase A).

    Args:
        llm: vLLM's ``LLM`` under ``epicache``.
        history: chat messages.

    Returns:
        The conversation, to be asked.

    Raises:
        KVPolicyError: the engine's policy has no episodes.
    """
    conversation = Conversation(llm, history)
    conversation.build()
    return conversation
