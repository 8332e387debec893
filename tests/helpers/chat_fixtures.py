"""Chat templates of several families, a tokenizer for them, and a conversation.

The templates in ``chat_templates/`` are written for these tests. They reproduce how the
templates of real models treat reasoning, tool calls, results of tools, system prompts
and dates; their words are our own. One tokenizer has the special tokens of all of them.
It is trained on the conversation when a test needs it.
"""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_FOLDER = Path(__file__).parent / "chat_templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name} of a place.",
            "parameters": {"type": "object", "properties": {"place": {}}},
        },
    }
    for name in ("weather", "ferry")
]
_SPECIAL_TOKENS = """
<|im_start|> <|im_end|> <tool_response> </tool_response> <think> </think>
<tool_call> </tool_call>
<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>
<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>
<｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜>
<｜tool▁output▁end｜>
<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>
<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS]
[TOOL_RESULTS] [/TOOL_RESULTS]
<bos> <start_of_turn> <end_of_turn>
<|start|> <|message|> <|end|> <|channel|> <|call|> <|return|>
"""
SYSTEM = "You help travellers.\nAnswer in one sentence."


@dataclass(frozen=True)
class Template:
    """A chat template and where it ends the turns of ``conversation``.

    Attributes:
        gap: what it writes between an answer and the next question; turns end before.
        preamble: last words of the preamble; None if the template writes the system
            prompt or the tools into the first question.
        alternates: it refuses two questions or two answers in a row.
        ends: number of tokens before each end, for ``conversation``.
        misses: requests of ``requests_of`` that reuse nothing of those before, because
            the template moves its beginning.
    """

    name: str
    gap: str
    preamble: str | None
    ends: tuple[int, ...]
    alternates: bool = False
    misses: tuple[int, ...] = (0,)
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The template, in Jinja."""
        return (_FOLDER / f"{self.name}.jinja").read_text()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of all templates."""
        return chat_tokenizer()

    @property
    def tokenizer_with_template(self) -> Any:
        """A copy of the tokenizer that has the template, as those of models have."""
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.chat_template = self.text
        return tokenizer


TEMPLATES = {
    template.name: template
    for template in (
        Template(
            "qwen3",
            gap="<|im_end|>\n<|im_start|>user\n",
            preamble="\n</tools>",
            ends=(222, 245, 308, 409, 437, 551, 585, 610, 632, 683),
        ),
        Template(
            "deepseek_r1",
            gap="<｜end▁of▁sentence｜><｜User｜>",
            preamble="one sentence.",
            ends=(31, 46, 97, 183, 204, 301, 321, 339, 356, 400),
        ),
        Template(
            "llama3",
            gap="<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n",
            preamble=None,
            ends=(312, 380, 486, 513, 635, 673, 700, 735, 790),
        ),
        Template(
            "mistral",
            gap="</s>[INST] ",
            preamble="<s>",
            ends=(1, 18, 86, 202, 223, 356, 368, 387, 415, 484),
            alternates=True,
            misses=(0, 1, 3),
        ),
        Template(
            "gemma3",
            gap="<end_of_turn>\n<start_of_turn>user\n",
            preamble=None,
            ends=(229, 288, 371, 399, 502, 522, 550, 586, 646),
            alternates=True,
        ),
        Template(
            "harmony",
            gap="<|end|><|start|>user<|message|>",
            preamble="}}}]",
            ends=(305, 330, 404, 542, 572, 706, 744, 771, 806, 865),
        ),
        Template(
            "smollm2",
            gap="<|im_end|>\n<|im_start|>user\n",
            preamble="one sentence.",
            ends=(38, 61, 97, 146, 174, 234, 268, 293, 326, 350),
        ),
    )
}


# -- the conversation --------------------------------------------------------------


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def calls(*places: str, content: str = "", name: str = "weather") -> dict[str, Any]:
    """An answer that calls a tool once for each place."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"call{place[:5].lower():0<5}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps({"place": place}),
                },
            }
            for place in places
        ],
    }


def result(place: str, content: str) -> dict[str, Any]:
    """What a tool returns for a place."""
    id = f"call{place[:5].lower():0<5}"
    return {"role": "tool", "tool_call_id": id, "content": content}


def conversation(alternates: bool = False) -> list[list[dict[str, Any]]]:
    """Ten turns, the last one in the middle of a tool loop, without a system prompt.

    Args:
        alternates: leave out messages of one role in a row, and the turn that ends with
            the result of a tool.
    """
    quoted = "What means 'user\nassistant: yes'?  "
    parts = [
        {"type": "text", "text": "And now in two parts:"},
        {"type": "text", "text": "is Bergen wet?"},
    ]
    thinking = {"reasoning": "The user is going north, so coats matter."}
    turns = [
        [user("Where should I go in spring?"), answer("Go to Bergen in spring.")],
        [
            user("What is the weather there?"),
            calls("Bergen"),
            result("Bergen", "rain, 9 degrees"),
            answer("It rains at 9 degrees.", **thinking),
        ],
        [
            user("Compare Oslo and Turku."),
            calls("Oslo", "Turku", content="I look at both."),
            result("Oslo", "sun, 12 degrees"),
            result("Turku", "fog, 6 degrees"),
            answer("Oslo is warmer than Turku."),
        ],
        [user(quoted), answer("It quotes an older chat.\n\n")],
        [
            user("Is there a ferry from the warmer one?"),
            calls("Oslo", name="ferry"),
            result("Oslo", "to Kiel at 14:00"),
            calls("Kiel", name="ferry"),
            result("Kiel", "to Oslo at 13:45"),
            answer("Yes, to Kiel at 14:00."),
        ],
        [
            user("Thank you."),
            user("Is it expensive?"),
            answer("It is not."),
            answer("Book early."),
        ],
        [user(parts), answer("Bergen is wet.")],
        [
            user("Should I bring a coat?"),
            answer("<think>\nWet and cold.\n</think>\n\nYes, bring a coat."),
        ],
        [
            user("Look at Turku again."),
            calls("Turku"),
            result("Turku", "snow, 0 degrees"),
        ],
        [
            user("Sorry, and Oslo?"),
            calls("Oslo") | thinking,
            result("Oslo", "sun, 13 degrees"),
        ],
    ]
    if alternates:
        del turns[5][1], turns[5][-1]
        turns[8].append(answer("It snows in Turku."))
    return turns


def last_words(template: Template) -> list[str]:
    """The text with which each turn before the live one ends."""
    trims = template.name in ("llama3", "mistral", "gemma3")
    results = {
        "qwen3": "snow, 0 degrees\n</tool_response>",
        "deepseek_r1": "<｜tool▁outputs▁end｜>",
        "llama3": '"snow, 0 degrees"',
        "mistral": "It snows in Turku.",
        "gemma3": "It snows in Turku.",
        "harmony": '"snow, 0 degrees"',
        "smollm2": "snow, 0 degrees",
    }
    return [
        "Go to Bergen in spring.",
        "It rains at 9 degrees.",
        "Oslo is warmer than Turku.",
        "It quotes an older chat." + ("" if trims else "\n\n"),
        "Yes, to Kiel at 14:00.",
        "It is not." if template.alternates else "Book early.",
        "Bergen is wet.",
        "Yes, bring a coat.",
        results[template.name],
    ]


def first_words(template: Template) -> list[str]:
    """The text with which the questions of all turns but the first begin."""
    return [
        "What is the weather",
        "Compare Oslo",
        "What means 'user\nassistant",
        "Is there a ferry",
        "Thank you.",
        "And now in two parts:",
        "Should I bring",
        "Look at Turku",
        "Sorry, and Oslo?",
    ]


def messages_of(turns: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A new copy of a system prompt and of the messages of turns."""
    system = {"role": "system", "content": SYSTEM}
    return json.loads(json.dumps([system, *(m for turn in turns for m in turn)]))


def requests_of(turns: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The messages of every request of the conversation: one per answer or call."""
    messages = messages_of(turns)
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [json.loads(json.dumps(messages[:end])) for end in [*ends, len(messages)]]


# -- vLLM --------------------------------------------------------------------------


@functools.cache
def chat_tokenizer() -> Any:
    """A small byte-level BPE that has the special tokens of all templates."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from vllm.tokenizers.hf import get_cached_tokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=750,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=_SPECIAL_TOKENS.split(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(conversation(), indent=1)], trainer)
    return get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def renderer_of(
    template: Template, policy: dict[str, Any] | None, prefix_caching: bool = False
) -> Any:
    """vLLM's renderer of Hugging Face tokenizers, for a template and a policy.

    Args:
        prefix_caching: chats are also searched for a shared prefix.
    """
    from vllm.renderers.hf import HfRenderer

    from vllm_kvplugins.vllm_adapter.frontend import chat_turns

    chat_turns.install()
    model = SimpleNamespace(
        enable_prompt_embeds=False,
        encoder_config=None,
        hf_config=SimpleNamespace(),
        is_encoder_decoder=False,
        max_model_len=100_000,
        multimodal_config=None,
        renderer_num_workers=1,
        revision=None,
        code_revision=None,
        supports_multimodal_inputs=False,
        trust_remote_code=False,
    )
    config = SimpleNamespace(
        additional_config={"kv_policy": policy} if policy else {},
        kv_transfer_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        model_config=model,
        parallel_config=SimpleNamespace(_api_process_rank=0),
    )
    return HfRenderer(config, template.tokenizer)


def render(
    renderer: Any,
    template: Template,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """The rendered prompt of a request for an answer."""
    from vllm.renderers import ChatParams

    settings = {"add_generation_prompt": True, "tools": tools, "tokenize": False}
    params = ChatParams(template.text, "auto", settings | template.kwargs | kwargs)
    tok_params = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
    _, (prompt,) = renderer.render_chat([messages], params, tok_params)
    return prompt
