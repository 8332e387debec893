"""The tiny Llama with a tokenizer and a chat template, for a chat server."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_model import VOCABULARY, write_tiny_model

SEED = 7
NAME = "soak"  # name under which the server serves it
FIRST_WORD = 10  # lower ids belong to special tokens and the template
# Roles are words as well, so that the template accepts any role.
_ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6}
_SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2}
_NAMED = {token: name for name, token in (_SPECIAL | _ROLES).items()}
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} "
    "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


def word(token: int) -> str:
    """The text of a token."""
    return _NAMED.get(token, f"w{token}")


def text_of(token_ids: list[int]) -> str:
    """A text that consists of exactly these tokens."""
    return " ".join(map(word, token_ids))


def write_soak_model(folder: Path) -> Path:
    """Weights, a tokenizer of one token per word, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    write_tiny_model(folder, SEED)
    words = {word(token): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
