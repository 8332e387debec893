"""The documentation agrees with the code: its examples run, its tables match."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_kvplugins.policies import available_policies
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.snapkv import SnapKV

DOCS = Path(__file__).resolve().parents[2] / "docs"


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def test_snapkv_in_the_guide_is_snapkv_in_the_code():
    code = code_blocks(DOCS / "adding-a-policy.md")[0]
    source = Path(inspect.getfile(SnapKV)).read_text()
    body = [line for line in code.splitlines() if line.strip()]
    real = [line for line in source.splitlines() if line.strip()]
    assert set(body) <= set(real), "the guide shows lines that the code lacks"
    assert len(real) <= 60, "SnapKV must fit 60 lines"


def test_the_guide_s_own_policy_chooses_what_it_says():
    """test_outside_policies tests that an installed policy is found."""
    module: dict[str, Any] = {"__name__": "my_policy"}
    exec(code_blocks(DOCS / "adding-a-policy.md")[1], module)
    policy = module["LoudValues"](recent=3, budget=8)
    values = torch.rand(2, 40, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).expand(2, -1)
    view = LayerView(
        layer=0,
        positions=positions,
        valid=None,
        queries=values,
        query_positions=positions[0],
        scale=1.0,
        rotary=None,
        observed=None,
        budget_tokens=0,
        load_keys=lambda: values,
        load_values=lambda: values,
    )
    scores = policy.score(view)
    assert torch.isinf(scores[:, -3:]).all()
    assert torch.equal(scores[:, :37], values.norm(dim=-1)[:, :37])


PARTS = ["**Idea.**", "**Use it**", "**Not**", "## Measured", "## Settings"]


@pytest.mark.parametrize("name", available_policies())
def test_every_policy_has_a_page_that_says_what_a_reader_needs(name):
    page = (DOCS / "policies" / f"{name}.md").read_text()
    assert f"--kv-policy {name}`" in page
    assert [part for part in PARTS if part not in page] == []
    assert "**Cost:**" in page, "what does it cost?"
    assert f"<!-- generated: settings {name} -->" in page
    idea = page.partition("**Idea.**")[2].partition("\n\n")[0]
    assert len(idea.splitlines()) <= 5, "the idea in five lines"
    measured = page.partition("## Measured")[2]
    pages = ("research/", "speed", "conversations", "quality", "benchmark")
    assert any(f"](../{page}" in measured for page in pages)


def test_generated_parts_are_what_code_and_tests_give_now():
    """``python scripts/generate_docs.py`` writes these tables."""
    command = [sys.executable, str(DOCS.parent / "scripts" / "generate_docs.py")]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_relative_link_leads_somewhere():
    root = DOCS.parent
    for page in [*DOCS.rglob("*.md"), root / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
