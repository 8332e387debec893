"""The documentation says what the code does: its code runs, its tables agree."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.policies import available_policies, get_policy_class
from vllm_kvplugins.policies import registry as registry_module
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.snapkv import SnapKV

DOCS = Path(__file__).resolve().parents[2] / "docs"


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def test_snapkv_in_the_guide_is_snapkv_in_the_code():
    shown = code_blocks(DOCS / "adding-a-policy.md")[0]
    source = inspect.getsource(SnapKV)
    body = [line for line in shown.splitlines() if line.strip()]
    real = [line for line in source.splitlines() if line.strip()]
    assert set(body) <= set(real), "the guide shows lines that the code lacks"
    assert len(real) <= 60, "SnapKV must fit 60 lines"


def test_the_guide_s_own_policy_works(monkeypatch):
    module = types.ModuleType("my_package")
    sys.modules["my_package"] = module
    try:
        exec(code_blocks(DOCS / "adding-a-policy.md")[1], vars(module))
        monkeypatch.setattr(
            registry_module, "_POLICIES", dict(registry_module._POLICIES)
        )
        module.register()
        policy = parse_policy({"name": "loud-values", "recent": 3, "budget": 8})
        values = torch.rand(2, 40, 16, generator=torch.Generator().manual_seed(0))
        positions = torch.arange(40).expand(2, -1)
        view = LayerView(
            layer=0,
            keys=values,
            positions=positions,
            valid=None,
            queries=values,
            query_positions=positions[0],
            scale=1.0,
            rotary=None,
            observed=None,
            budget_tokens=0,
            load_values=lambda: values,
        )
        scores = policy.score(view)
        assert torch.isinf(scores[:, -3:]).all()
        assert torch.equal(scores[:, :37], values.norm(dim=-1)[:, :37])
    finally:
        del sys.modules["my_package"]


@pytest.mark.parametrize("name", available_policies())
def test_every_policy_has_a_page_with_all_its_settings(name):
    page = (DOCS / "policies" / f"{name}.md").read_text()
    for field, info in get_policy_class(name).model_fields.items():
        row = re.search(rf"^\| `{field}` \| `?([^`|]*?)`? \|", page, re.MULTILINE)
        assert row is not None, f"docs/policies/{name}.md lacks {field}"
        default = info.get_default(call_default_factory=True)
        shown = getattr(default, "name", getattr(default, "tokens", default))
        shown = getattr(default, "fraction", None) or shown
        assert row[1] == str(shown), f"default of {field} in docs/policies/{name}.md"


def test_every_relative_link_leads_somewhere():
    root = DOCS.parent
    for page in [*DOCS.rglob("*.md"), root / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
