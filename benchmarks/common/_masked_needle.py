"""Answers of many policies to one prompt, from one pass over it."""

from __future__ import annotations

from typing import Any

import torch
from _resolved_model import Resolved, ResolvedBranches, ResolvedModel, surprisals
from _selection import Probing, Selector
from transformers import AutoTokenizer

from vllm_kvplugins.config import parse_policy

BLOCK_SIZE = 32


class Answers:
    """A chat model whose cache each policy compresses before it answers."""

    def __init__(self, folder: str, max_tokens: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = ResolvedModel(folder)
        self.max_tokens = max_tokens
        ends = self.model.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])

    def ask(
        self, question: str, policies: list[dict[str, Any]]
    ) -> tuple[list[str], int]:
        """Each policy's answer, and the prompt's length in tokens.

        An empty policy is full KV.
        """
        tokens = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        full = {"name": "full"}
        parsed = [parse_policy(policy or full) for policy in policies]
        resolvers = [policy.spans for policy in parsed]
        prompt = self.model.read(tokens, logits=len(tokens) if any(resolvers) else 1)
        probing = Probing(self.model, tokens, self._encode)
        selector = Selector(
            prompt,
            self.model.rotary(),
            BLOCK_SIZE,
            probing,
            self.model.output_weights,
        )
        everything = selector.kept(parse_policy(full))
        kept = [
            everything if resolver else selector.kept(policy)
            for policy, resolver in zip(parsed, resolvers, strict=True)
        ]
        resolved: list[Resolved | None] = [None] * len(parsed)
        if any(resolvers):
            surprisal = surprisals(prompt.logits, tokens)
            resolved = [
                p and Resolved.of(p, prompt, surprisal, selector.geometry)
                for p in resolvers
            ]
        branches = ResolvedBranches(prompt, torch.stack(kept), resolved=resolved)
        token_ids = self._generate(branches, prompt.logits[-1].argmax())
        return [self.tokenizer.decode(ids) for ids in token_ids], len(tokens)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _generate(
        self, branches: ResolvedBranches, first: torch.Tensor
    ) -> list[list[int]]:
        """Greedy tokens of every branch, up to the end token."""
        count = len(branches.visible)
        generated = [first.expand(count)]
        for _ in range(self.max_tokens - 1):
            logits = self.model.extend(branches, generated[-1][:, None])
            generated.append(logits[:, -1].argmax(-1))
            if self.ends.issuperset(generated[-1].tolist()):
                break
        rows = torch.stack(generated, 1).tolist()
        return [self._until_end(row) for row in rows]

    def _until_end(self, ids: list[int]) -> list[int]:
        stop = next((i for i, token in enumerate(ids) if token in self.ends), len(ids))
        return ids[:stop]
