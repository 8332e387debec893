"""Buffers of the host tier."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.ops.large_buffer import large_buffer

MIB = 1 << 20


def mapping_of(address: int) -> str:
    """What the kernel says about the mapping at an address."""
    text = Path("/proc/self/smaps").read_text()
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        first, last = (int(x, 16) for x in part.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            return part
    raise LookupError(hex(address))


def test_a_buffer_holds_what_is_written():
    buffer = large_buffer(3 * MIB + 5)
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (3 * MIB + 5,))
    buffer[-1] = 7
    assert int(buffer.sum()) == 7
    assert large_buffer(0).shape == (0,)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages"
)
def test_the_host_tier_asks_for_huge_pages_and_commits_memory_as_it_is_written():
    tier = HostTier(256 * MIB, 16, 64, torch.float32)
    mapping = mapping_of(tier.pages.data_ptr())
    assert " hg" in re.search(r"VmFlags:(.*)", mapping).group(1)
    assert int(re.search(r"Rss: +(\d+) kB", mapping).group(1)) < 4 * 1024
    tier.write(tier.take(1)[None], 0, torch.ones(1, 16, 64), torch.ones(1, 16, 64))
    mapping = mapping_of(tier.pages.data_ptr())
    assert 0 < int(re.search(r"Rss: +(\d+) kB", mapping).group(1)) <= 4 * 1024


def test_other_systems_get_a_plain_buffer(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert large_buffer(10).shape == (10,)
