"""IceCache with means: tokens that no query selects still get attention."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from vllm_kvplugins.policies.icecache import IceCache


class IceCacheMeans(IceCache):
    """IceCache, and a mean of each few tokens for those that are not fetched.

    Retrieval drops the attention to all tokens that it does not select, so it loses
    what is spread over many of them, such as words that must be counted. Here a query
    also attends to the mean key and value of every ``mean_tokens`` tokens, weighted by
    how many of them it does not select (``spans.chunk_means``). RetroInfer
    (arXiv:2505.02922) estimates the attention to clusters that it does not fetch in a
    similar way.

    Not in the IceCache paper. ``mean_tokens: 0`` is :class:`IceCache`.

    Cost: as IceCache, and ``1 / mean_tokens`` of the cache of all layers that offload
    on the device, which a step reads completely.
    """

    name: ClassVar[str] = "icecache-means"
    summary: ClassVar[str] = (
        "as icecache; tokens that are not fetched get attention through their means"
    )

    mean_tokens: int = Field(
        default=64,
        ge=0,
        description=IceCache.model_fields["mean_tokens"].description,
    )
