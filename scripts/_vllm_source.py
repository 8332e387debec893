"""Names, parameters and members of a vLLM source tree, read without importing it.

So a tree can be examined without torch, compiled files or a GPU, on any Python that can
parse it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What a name is, if that is defined outside of the tree or while it runs."""


@dataclass(frozen=True, slots=True)
class Defined:
    """A function or class of the tree, a value, or a module.

    Attributes:
        module: that defines it.
        node: function, class, or module; any other node is a value.
    """

    module: str
    node: ast.AST

    @property
    def parameters(self) -> list[str] | None:
        """Parameters of a function, without ``self`` and ``cls``."""
        if not isinstance(self.node, _Function):
            return None
        spec = self.node.args
        every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
        return [argument.arg for argument in every if argument.arg not in _OWN]


_OWN = ("self", "cls")
_DEPTH = 12  # of imports that pass a name on, and of base classes


class Source:
    """A folder that contains the package ``vllm``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, ast.Module | None] = {}
        self._bound: dict[str, dict[str, ast.AST]] = {}

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = self._folder.joinpath(*name.split("."))
            files = (path / "__init__.py", path.with_suffix(".py"))
            file = next((file for file in files if file.is_file()), None)
            text = file.read_text(encoding="utf-8") if file else ""
            self._modules[name] = ast.parse(text, str(file)) if file else None
        return self._modules[name]

    def _names(self, module: str) -> dict[str, ast.AST]:
        """What the statements of a module define, also those in ``if`` and ``try``, but
        not those in functions and classes. The first definition of a name wins.
        """
        if module not in self._bound:
            tree = self._module(module)
            names = self._bound.setdefault(module, {})
            for node in _statements(tree.body if tree else []):
                for name in _bound(node):
                    names.setdefault(name, node)
        return self._bound[module]

    def find(self, where: str, depth: int = _DEPTH) -> Defined | Elsewhere | None:
        """What ``module`` or ``module:name`` is. None: there is no such thing."""
        module, _, name = where.partition(":")
        if not module.startswith("vllm") or depth == 0:
            return Elsewhere()
        tree = self._module(module)
        if tree is None:
            return None
        if not name:
            return Defined(module, tree)
        node = self._names(module).get(name)
        if isinstance(node, ast.ImportFrom):
            source = _origin(module, node, self._is_package(module))
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            if self._module(f"{source}.{original}") is not None:
                return self.find(f"{source}.{original}", depth - 1)
            return self.find(f"{source}:{original}", depth - 1)
        if isinstance(node, ast.Import):
            return Elsewhere()
        if node is not None:
            return Defined(module, node)
        return self._lazy(module, name, depth)

    def _lazy(self, module: str, name: str, depth: int) -> Defined | Elsewhere | None:
        """A name that the module's ``__getattr__`` finds in its ``MODULE_ATTRS``."""
        table = self._names(module).get("MODULE_ATTRS")
        if not isinstance(table, ast.Assign) or not isinstance(table.value, ast.Dict):
            return None
        entries = ast.literal_eval(table.value)
        if name not in entries:
            return None
        path, _, attribute = entries[name].partition(":")
        return self.find(f"{module}{path}:{attribute}", depth - 1)

    def _is_package(self, module: str) -> bool:
        return self._folder.joinpath(*module.split("."), "__init__.py").is_file()

    def member(
        self, owner: Defined, name: str, depth: int = _DEPTH
    ) -> Defined | Elsewhere | None:
        """A member of a class or module; None: there is none.

        Classes outside of the tree, such as ``torch.nn.Module``, have no members here:
        what this package uses is vLLM's own.
        """
        if isinstance(owner.node, ast.Module):
            return self.find(f"{owner.module}:{name}", depth)
        if not isinstance(owner.node, ast.ClassDef) or depth == 0:
            return Elsewhere()
        for node in _statements(owner.node.body):
            if name in _bound(node):
                return Defined(owner.module, node)
        if name in _assigned_to_self(owner.node):
            return Defined(owner.module, ast.Pass())
        for base in map(_without_parameters, owner.node.bases):
            parent = self._base(owner.module, base)
            if isinstance(parent, Defined):
                found = self.member(parent, name, depth - 1)
                if found is not None:
                    return found
        return None

    def _base(self, module: str, base: ast.expr) -> Defined | Elsewhere | None:
        if isinstance(base, ast.Name):
            return self.find(f"{module}:{base.id}")
        return Elsewhere()


def _without_parameters(base: ast.expr) -> ast.expr:
    """``Base`` of ``Base[T]``."""
    return base.value if isinstance(base, ast.Subscript) else base


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those of ``if``, ``try`` and ``with`` among them."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(node, field, [])
            if isinstance(node, ast.If | ast.Try | ast.With) and inner:
                yield from _statements(inner)
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _bound(node: ast.stmt) -> list[str]:
    """Names that a statement binds."""
    if isinstance(node, _Function | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.AnnAssign):
        targets: list[ast.expr] = [node.target]
    elif isinstance(node, ast.Assign):
        targets = node.targets
    else:
        return []
    every = (name for target in targets for name in ast.walk(target))
    return [name.id for name in every if isinstance(name, ast.Name)]


def _assigned_to_self(node: ast.ClassDef) -> set[str]:
    """Attributes that methods of a class assign to ``self``."""
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }


def _origin(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    """Absolute name of the module that a statement imports from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = len(parts) - node.level + is_package
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])
