"""Speeds up Triton's interpreter, with the same results.

The interpreter spends its time on Python calls, not on arithmetic: an operation on a
few numbers takes as long as one on thousands.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

LARGE = 1024  # rows and slots of a tile


def look_up_once(interpreter: Any) -> None:
    """Look up builtins once, and replace them once per launch.

    Each call of a device function goes through all members of ``triton.language`` to
    replace its builtins, and each operation makes a dictionary of all types.
    """
    interpreter._patch_builtin = _builtins_by_name(interpreter)
    interpreter._patch_lang = _once_per_launch(interpreter)
    interpreter._get_np_dtype = _numpy_types(interpreter)


def _builtins_by_name(interpreter: Any) -> Any:
    names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        is_builtin = interpreter.tl.core.is_builtin
        if package not in names:  # none of its builtins is replaced yet
            builtins_ = inspect.getmembers(package, is_builtin)
            names[package] = [name for name, _ in builtins_]
        for name in names[package]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    return patch_builtin


def _once_per_launch(interpreter: Any) -> Any:
    patch, language = interpreter._patch_lang, interpreter.tl
    replaced: set[Any] = set()

    @functools.cache
    def uses(function: Any) -> set[Any]:
        return {
            value
            for value in function.__globals__.values()
            if value is language or value is language.core
        }

    def patch_lang(function: Any) -> Any:
        if replaced and uses(function) <= replaced:
            return interpreter._LangPatchScope()
        scope = patch(function)
        replaced.update(uses(function))
        restore = scope.restore

        def end() -> None:  # only launches call this
            replaced.clear()
            restore()

        scope.restore = end
        return scope

    return patch_lang


def _numpy_types(interpreter: Any) -> Any:
    find = interpreter._get_np_dtype
    of_number = functools.cache(find)

    def numpy_type(kind: Any) -> Any:
        points = isinstance(kind.scalar, interpreter.tl.pointer_type)
        return (find if points else of_number)(kind.scalar)

    return numpy_type


def use_large_tiles(paged_attention: Any) -> None:
    """Compute attention in a few large tiles instead of GPU-sized ones."""
    rows = paged_attention._tile_rows

    def tile_rows(group: int, max_per_row: int) -> int:
        return int(rows(group, 1) if max_per_row == 1 else max(rows(group, 2), LARGE))

    paged_attention._tile_rows = tile_rows
    paged_attention._tile_slots = lambda head_dim, itemsize: LARGE
