"""``kvplugins list``: policies, their settings, and the page allocators."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from vllm_kvplugins.cli.console import out, user_errors


def list_policies(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables.")
    ] = False,
) -> None:
    """List every policy with its settings, and the page allocators."""
    with user_errors():
        found = catalogue()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    console = out()
    console.print("[bold]Policies[/]  (--kv-policy NAME --kv-policy-config JSON)\n")
    for entry in found["policies"]:
        _print_entry(console, entry)
    for entry in found["broken"]:
        console.print(
            f"[bold red]{escape(entry['name'])}[/]  {escape(entry['problem'])}\n"
        )
    console.print("[bold]Sessions[/]  (beside the settings of any policy)\n")
    _print_entry(console, found["sessions"])
    console.print("[bold]Kernel[/]  (beside the settings of any policy)\n")
    _print_entry(console, found["kernel"])
    console.print('[bold]Allocators[/]  ("allocator" in --kv-policy-config)\n')
    for entry in found["allocators"]:
        _print_entry(console, entry)


def catalogue() -> dict[str, Any]:
    """All policies and allocators as plain data; what ``--json`` prints.

    Returns:
        ``policies`` and ``allocators``, each a list of, and ``sessions`` and
        ``kernel``, one of ``name``, ``summary`` and ``settings`` (``name``, ``type``,
        ``default``, ``required``, ``description``). ``broken``: policies of other
        packages that cannot be loaded, ``name`` and ``problem``.
    """
    from vllm_kvplugins.budgets import ALLOCATORS
    from vllm_kvplugins.cli.settings import first_line, settings_of
    from vllm_kvplugins.config import KernelSettings
    from vllm_kvplugins.policies.registry import (
        available_policies,
        get_policy_class,
        problem_of,
    )
    from vllm_kvplugins.sessions.settings import SessionSettings

    problems = {name: problem_of(name) for name in available_policies()}
    policies = {
        name: get_policy_class(name) for name, said in problems.items() if not said
    }
    # those of other packages; the rest can be used
    broken = [
        {"name": name, "problem": said} for name, said in problems.items() if said
    ]
    return {
        "policies": [
            {
                "name": name,
                "summary": cls.summary,
                "settings": [setting.as_dict() for setting in settings_of(cls)],
            }
            for name, cls in policies.items()
        ],
        "broken": broken,
        "sessions": {
            "name": "sessions",
            "summary": "what a request computed, kept for the one that continues it",
            "settings": [setting.as_dict() for setting in settings_of(SessionSettings)],
        },
        "kernel": {
            "name": "kernel",
            "summary": "what attends to the pages",
            "settings": [setting.as_dict() for setting in settings_of(KernelSettings)],
        },
        "allocators": [
            {
                "name": name,
                "summary": first_line(cls),
                "settings": [setting.as_dict() for setting in settings_of(cls)],
            }
            for name, cls in ALLOCATORS.items()
        ],
    }


def _print_entry(console: Console, entry: dict[str, Any]) -> None:
    title = f"[bold cyan]{entry['name']}[/]  {escape(entry['summary'])}"
    console.print(Group(title, _settings_table(entry["settings"]), ""))


def _settings_table(settings: list[dict[str, Any]]) -> Table | str:
    if not settings:
        return "  [dim]no settings[/]"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("  setting", no_wrap=True)
    table.add_column("type")
    table.add_column("default", no_wrap=True)
    table.add_column("description", ratio=1)
    for setting in settings:
        default = "required" if setting["required"] else json.dumps(setting["default"])
        cells = (setting["type"], default, setting["description"])
        table.add_row(f"  {setting['name']}", *map(escape, cells))
    return table
