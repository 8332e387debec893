"""Prompts with images on a tiny Qwen2.5-VL."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import numpy as np
from architectures import (
    IMAGE_SIDE,
    IMAGE_TOKEN,
    IMAGE_TOKENS,
    VISION_END,
    VISION_START,
)
from driver import Driver, make_llm
from scenarios_architectures import DEFAULTS, each, left_behind, run_and_watch
from texts import random_tokens

BEFORE, AFTER, ANSWER = 130, 90, 12
FIRST_IMAGE_POSITION = BEFORE + 1
PROMPT_TOKENS = BEFORE + AFTER + IMAGE_TOKENS + 2
_TEXT_VOCABULARY = 900  # the ids from here on are those of images


def images(
    model: str, policies: dict[str, dict[str, Any] | None], **settings: Any
) -> dict[str, Any]:
    """Two images behind the same text, under each policy; None is stock vLLM."""
    _load_processor_without_videos()
    return each(policies, lambda policy: _images(model, policy, settings))


def _images(
    model: str, policy: dict[str, Any] | None, settings: dict[str, Any]
) -> dict[str, Any]:
    arguments = {
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "skip_mm_profiling": True,
    }
    driver = Driver(make_llm(model, policy, **(DEFAULTS | arguments | settings)))
    if policy is not None:
        driver.llm.collective_rpc("kv_policy_record", args=(True,))
    first, second = _prompt(1), _prompt(2)
    driver.add("first", first, ANSWER)
    held = run_and_watch(driver)
    kept = _kept_positions(driver) if policy is not None else []
    driver.generate({"same": first}, ANSWER)
    driver.generate({"other-image": second}, ANSWER)
    driver.llm.reset_prefix_cache()
    driver.generate({"other-image-alone": second}, ANSWER)
    text = {"prompt_token_ids": _expanded(first["prompt_token_ids"])}
    together = {"text": text, "one": first, "two": second}
    driver.generate({f"{n}-together": p for n, p in together.items()}, ANSWER)
    report: dict[str, Any] = {}
    sessions = driver.scheduler.connector.sessions if policy else None
    if sessions is not None:
        counts = sessions.directory.counts
        sessions.directory.clear()
        more = random_tokens(9, 40, _TEXT_VOCABULARY)
        longer = first | {"prompt_token_ids": first["prompt_token_ids"] + more}
        text_longer = {"prompt_token_ids": text["prompt_token_ids"] + more}
        talks = {
            "image": first,
            "image again": longer,
            "text after image": text,
            "image after text": longer,
            "text again": text_longer,
        }
        for name, prompt in talks.items():
            before = counts.hits
            driver.generate({name: prompt}, 1)  # compacted at the prompt's end only
            for _ in range(3):  # until the session is saved and reported
                driver.step()
            hits = counts.hits - before
            report[name] = {"hits": hits, "saved": sessions.directory.num_sessions}
    return report | {
        "tokens": driver.tokens,
        "cached": driver.cached,
        "held": held,
        "kept": kept,
        **left_behind(driver, policy),
    }


def _prompt(seed: int) -> dict[str, Any]:
    """The same text for all seeds, around an image of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(
        0, 256, (IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8
    )
    tokens = [
        *random_tokens(11, BEFORE, _TEXT_VOCABULARY),
        *(VISION_START, IMAGE_TOKEN, VISION_END),
        *random_tokens(12, AFTER, _TEXT_VOCABULARY),
    ]
    image = Image.fromarray(pixels)
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": image}}


def _expanded(tokens: list[int]) -> list[int]:
    """The tokens as vLLM expands them, one per position of the image."""
    place = tokens.index(IMAGE_TOKEN)
    return tokens[:place] + [IMAGE_TOKEN] * IMAGE_TOKENS + tokens[place + 1 :]


def _kept_positions(driver: Driver) -> list[int]:
    """Positions that any layer and KV head kept in the compactions so far."""
    (records,) = driver.llm.collective_rpc("kv_policy_take_records")
    kept: set[int] = set()
    stack: list[Any] = [record.kept_positions for record in records]
    while stack:
        item = stack.pop()
        if isinstance(item, int):
            kept.add(item)
        else:
            stack += list(item)
    return sorted(kept)


def _load_processor_without_videos() -> None:
    """Let vLLM load Qwen2.5-VL and its processor without the part for videos.

    That part needs torchvision, and the CPU set-up has none. Images go through the real
    image processor, in its version for Pillow. vLLM's modules import names from files
    that import torchvision, and use none of it for images.
    """
    from transformers import AutoTokenizer, Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )
    from vllm import ModelRegistry

    names = ["torchvision"]
    for part in ("transforms", "v2", "functional"):
        names.append(f"{names[-1]}.{part}")
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        sys.modules[name] = ModuleType(name)
    for parent, name in itertools.pairwise(missing):
        setattr(sys.modules[parent], name.rpartition(".")[2], sys.modules[name])
    from vllm.model_executor.models import qwen2_5_vl, qwen2_vl

    for name in missing:
        del sys.modules[name]
    # vLLM would import the class of a model in a process of its own.
    model_class = qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
    ModelRegistry.register_model(model_class.__name__, model_class)

    class ImageProcessor(Qwen2_5_VLProcessor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return type(argument)

        def __init__(self, image_processor: Any, tokenizer: Any) -> None:
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            ids = tokenizer.convert_tokens_to_ids
            self.image_token_id = ids(self.image_token)
            self.video_token_id = ids(self.video_token)
            super(Qwen2_5_VLProcessor, self).__init__(image_processor, tokenizer)
            self.video_processor = image_processor  # vLLM asks it for its sizes

    def get_hf_processor(self: Any, **kwargs: Any) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(self.ctx.model_config.model)
        return ImageProcessor(Qwen2VLImageProcessorPil(), tokenizer)

    qwen2_vl.Qwen2VLProcessingInfo.get_hf_processor = get_hf_processor
    qwen2_5_vl.Qwen2_5_VLProcessingInfo.get_hf_processor = get_hf_processor
