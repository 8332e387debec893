"""The Grafana dashboard uses existing metrics, and all of ours."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs" / "grafana-dashboard.json"
METRICS = ROOT / "vllm_kvplugins" / "vllm_adapter" / "scheduler" / "metrics.py"
# Prometheus itself adds the label instance
LABELS = {"model_name", "engine", "instance", "le"}

# vLLM's own metrics that the dashboard uses, without the suffix of counters.
VLLM_METRICS = {
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
}
SUFFIXES = {"gauge": ("",), "counter": ("_total",)}
SUFFIXES["histogram"] = ("_bucket", "_sum", "_count")


def our_metrics() -> dict[str, str]:
    """Name -> kind, read from the source, because importing it would require vLLM."""
    tree = ast.parse(METRICS.read_text(encoding="utf-8"))
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    panels_by_title = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        kind = node.func.attr.removeprefix("_")
        if kind in SUFFIXES and node.args:
            name = node.args[0]
            text = constants[name.id] if isinstance(name, ast.Name) else name.value
            panels_by_title[f"vllm:kv_policy_{text}"] = kind
    return panels_by_title


def vllm_metrics() -> dict[str, str]:
    """Name -> kind of the installed vLLM's metrics, read from its source."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("install a vLLM (see scripts/)")
    source = Path(spec.submodule_search_locations[0], "v1/metrics/loggers.py")
    panels_by_title = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        kind = re.fullmatch(r"_(\w+)_cls", node.func.attr)
        named = [k.value for k in node.keywords if k.arg == "name"]
        if kind and named and isinstance(named[0], ast.Constant):
            panels_by_title[named[0].value] = kind[1]
    return panels_by_title


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return content


def panels() -> list[dict[str, Any]]:
    panels_by_title: list[dict[str, Any]] = dashboard()["panels"]
    return panels_by_title


def expressions() -> list[str]:
    variables = dashboard()["templating"]["list"]
    return [
        *(target["expr"] for panel in panels() for target in panel.get("targets", ())),
        *(v["query"]["query"] for v in variables if v["type"] == "query"),
    ]


def names(text: str) -> set[str]:
    return set(re.findall(r"vllm:\w+", text))


def series_of(metrics: dict[str, str]) -> set[str]:
    return {name + s for name, kind in metrics.items() for s in SUFFIXES[kind]}


def test_the_source_was_understood():
    exported = our_metrics()
    assert set(exported.values()) == {"gauge", "counter", "histogram"}
    table = METRICS.read_text(encoding="utf-8").partition('"""\n\nfrom')[0]
    listed = dict(re.findall(r"^\| ``(vllm:\w+)`` \| (\w+) \|", table, re.MULTILINE))
    assert {
        name.removesuffix("_total"): kind for name, kind in listed.items()
    } == exported


def test_every_metric_in_the_dashboard_exists():
    known = series_of(our_metrics()) | series_of(VLLM_METRICS)
    used = set().union(*map(names, expressions()))
    assert used - known == set()


def test_vllm_has_the_metrics_that_are_its_own():
    vllm_names = vllm_metrics()
    assert len(vllm_names) > 20
    assert {name: vllm_names.get(name) for name in VLLM_METRICS} == VLLM_METRICS


def test_every_metric_of_ours_is_shown():
    plotted = {name for e in expressions() for name in names(e)}
    for name, kind in our_metrics().items():
        assert any(name + s in plotted for s in SUFFIXES[kind]), name


def test_every_metric_of_ours_is_explained():
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for name, kind in our_metrics().items():
        suffix = "_total" if kind == "counter" else ""
        assert f"`{name}{suffix}`" in page, name


@pytest.mark.parametrize("expression", expressions())
def test_queries_are_well_formed(expression):
    depth = 0
    for char in expression:
        depth += (char in "([{") - (char in ")]}")
        assert depth >= 0
    assert depth == 0
    assert expression.count('"') % 2 == 0
    labels = set(re.findall(r'(\w+)=~?"', expression))
    grouped = re.findall(r"by \(([^)]*)\)", expression)
    labels |= {label.strip() for group in grouped for label in group.split(",")}
    assert labels <= LABELS
    # counters and buckets only grow: shown raw, they say nothing
    for name in names(expression):
        if name.endswith(("_total", "_bucket", "_sum", "_count")):
            assert re.search(rf"(rate|increase)\({name}\{{", expression), expression


def test_queries_follow_the_choices_above_the_panels():
    variables = {v["name"] for v in dashboard()["templating"]["list"]}
    assert variables == {"datasource", "model_name", "instance", "engine"}
    for panel in panels():
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            for name in ("model_name", "instance", "engine"):
                uses = target["expr"].count(f'{name}=~"${name}"')
                assert uses == len(re.findall(r"vllm:\w+", target["expr"]))


def test_panels_are_told_apart_explained_and_do_not_overlap():
    panels_by_title = panels()
    assert len({p["id"] for p in panels_by_title}) == len(panels_by_title)
    assert all(p["description"] for p in panels_by_title if p["type"] != "row")
    cells = [
        (p["gridPos"]["x"] + dx, p["gridPos"]["y"] + dy)
        for p in panels_by_title
        for dx, dy in itertools.product(
            range(p["gridPos"]["w"]), range(p["gridPos"]["h"])
        )
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


def test_it_imports_as_a_dashboard_of_its_own():
    content = dashboard()
    assert content["id"] is None, "an id would overwrite another dashboard"
    assert content["uid"] == "vllm-kv-policies"
    assert content["schemaVersion"] >= 39
    assert {p["type"] for p in panels()} == {"row", "timeseries", "heatmap", "stat"}
