"""``kvplugins list``: policies, their settings, and the page allocators."""

from __future__ import annotations

import difflib
import inspect
import json
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.errors import KVPolicyError, coded


def list_policies(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show only this policy, allocator, 'auto', 'sessions' or 'kernel', "
            "with its documentation.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables.")
    ] = False,
) -> None:
    """List every policy with its settings, and the page allocators."""
    with user_errors():
        listed = catalogue()
        entry = None if name is None else _entry_of(listed, name)
    if entry is not None:
        _show(entry, as_json)
        return
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    console = out()
    console.print("[bold]Policies[/]  (--kv-policy NAME --kv-policy-config JSON)\n")
    for entry in listed["policies"]:
        _print_entry(console, entry)
    for entry in listed["broken"]:
        console.print(
            f"[bold red]{escape(entry['name'])}[/]  {escape(entry['problem'])}\n"
        )
    console.print("[bold]Automatic choice[/]  (--kv-policy auto)\n")
    _print_entry(console, listed["auto"])
    console.print("[bold]Sessions[/]  (with any policy)\n")
    _print_entry(console, listed["sessions"])
    console.print("[bold]Kernel[/]  (with any policy)\n")
    _print_entry(console, listed["kernel"])
    console.print("[bold]Shared prefixes[/]  (with policies that drop tokens)\n")
    _print_entry(console, listed["prefix"])
    console.print('[bold]Allocators[/]  ("allocator" in --kv-policy-config)\n')
    for entry in listed["allocators"]:
        _print_entry(console, entry)


def catalogue() -> dict[str, Any]:
    """All policies and allocators as plain data, as printed by ``--json``.

    Returns:
        ``policies`` and ``allocators``: lists of entries; ``auto``, ``sessions``,
        ``kernel`` and ``prefix``: one entry each. An entry has ``name``, ``summary``,
        ``description`` (the docstring of the class) and ``settings`` (each with
        ``name``, ``type``, ``default``, ``required``, ``description``). ``broken``:
        ``name`` and ``problem`` of each policy of another package that cannot be
        loaded.
    """
    from vllm_kvplugins.budgets import ALLOCATORS
    from vllm_kvplugins.choice import AUTO
    from vllm_kvplugins.choice.settings import AutoSettings
    from vllm_kvplugins.cli.settings import first_line
    from vllm_kvplugins.config import KernelSettings, PrefixSettings
    from vllm_kvplugins.policies.registry import (
        available_policies,
        get_policy_class,
        problem_of,
    )
    from vllm_kvplugins.sessions.settings import SessionSettings

    problems = {name: problem_of(name) for name in available_policies()}
    policies = {
        name: get_policy_class(name)
        for name, problem in problems.items()
        if not problem
    }
    return {
        "policies": [_entry(name, cls.summary, cls) for name, cls in policies.items()],
        "broken": [
            {"name": name, "problem": problem}
            for name, problem in problems.items()
            if problem
        ],
        "auto": _entry(
            AUTO,
            "no policy: an engine chooses one for it when it starts, and logs why",
            AutoSettings,
        ),
        "sessions": _entry(
            "sessions",
            "keep the compressed cache of a request for its continuation",
            SessionSettings,
        ),
        "kernel": _entry("kernel", "the attention kernel", KernelSettings),
        "prefix": _entry(
            "prefix", "first tokens that requests share, exactly", PrefixSettings
        ),
        "allocators": [
            _entry(name, first_line(cls), cls) for name, cls in ALLOCATORS.items()
        ],
    }


def _entry(name: str, summary: str, cls: type[BaseModel]) -> dict[str, Any]:
    from vllm_kvplugins.cli.settings import settings_of

    return {
        "name": name,
        "summary": summary,
        "description": inspect.cleandoc(cls.__doc__ or ""),
        "settings": [setting.as_dict() for setting in settings_of(cls)],
    }


def _entry_of(listed: dict[str, Any], name: str) -> dict[str, Any]:
    """The entry of one policy, allocator, ``sessions`` or ``kernel``.

    Raises:
        KVPolicyError: KVP100, nothing in the catalogue has this name (the message lists
            all names and suggests one); or the policy cannot be loaded, see
            ``get_policy_class``.
    """
    from vllm_kvplugins.policies.registry import available_policies, get_policy_class

    entries = [
        *listed["policies"],
        *listed["allocators"],
        listed["auto"],
        listed["sessions"],
        listed["kernel"],
        listed["prefix"],
    ]
    for entry in entries:
        if entry["name"] == name:
            return dict(entry)
    if name in available_policies():
        get_policy_class(name)
        raise AssertionError(f"policy {name!r} loads, but the catalogue lacks it")
    raise KVPolicyError(coded("KVP100", _unknown(name, listed)))


def _unknown(name: str, listed: dict[str, Any]) -> str:
    policies = [entry["name"] for entry in (*listed["policies"], *listed["broken"])]
    allocators = [entry["name"] for entry in listed["allocators"]]
    others = ["auto", "sessions", "kernel", "prefix"]
    near = difflib.get_close_matches(name, [*policies, *allocators, *others], n=1)
    return (
        f"nothing is called {name!r}.{f' Did you mean {near[0]!r}?' if near else ''} "
        f"Policies: {', '.join(sorted(policies))}. Allocators: "
        f"{', '.join(sorted(allocators))}. Also: {', '.join(others)}."
    )


def _show(entry: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(entry, indent=2))
        return
    console = out()
    _print_entry(console, entry)
    console.print(escape(entry["description"]))


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
