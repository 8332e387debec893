"""Where a prompt is compacted to a budget, from counts alone."""

from __future__ import annotations

from vllm_kvplugins.residency.plan import BlockSpan, Compaction


def prompt_compactions(
    prompt_tokens: int,
    block_size: int,
    budget_tokens: int,
    restored: Compaction | None = None,
) -> tuple[Compaction, ...]:
    """The compactions of a request until its prompt is in.

    The last one, at the end of the prompt, leaves ``budget_tokens``: the tail in
    its partial block counts, the rest is rounded up to whole blocks.

    Args:
        restored: the compaction behind the cache that the request starts from; it
            comes first, and only what follows it is planned.
    """
    full, tail = divmod(prompt_tokens, block_size)
    done = () if restored is None else (restored,)
    start = restored.zone.start if restored else 0
    zone = max(-(-(budget_tokens - tail) // block_size), 1)
    if zone >= full - start or (restored and prompt_tokens <= restored.at_tokens):
        return done
    kept = BlockSpan(full - zone, full)
    return (*done, Compaction(prompt_tokens, BlockSpan(start, full), kept))
