"""Reads a package's sources without importing them: what its modules hold, what its classes inherit and set."""

import argparse
import ast
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """The modules of one package; `root` is the folder that holds it."""

    def __init__(self, root: Path, package: str):
        self.root, self.package = root, package
        self.tree, self.names = cache(self.tree), cache(self.names)

    def file(self, module: str) -> Path | None:
        """A module's file, or None."""
        path = self.root.joinpath(*module.split("."))
        return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)

    def tree(self, module: str) -> ast.Module:
        """A module's syntax tree."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about somebody else's source
            return ast.parse(self.file(module).read_text(encoding="utf-8"))

    def modules(self, folder: str) -> Iterator[str]:
        """Names of all modules below a folder of the package."""
        for path in sorted((self.root / folder).rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def imported(self, module: str, within: ast.AST | None = None) -> Iterator[tuple[str, str, str | None]]:
        """What a module (or a part of it) imports, at any depth: local name, module, and name in it if any."""
        for node in ast.walk(within or self.tree(module)):
            if isinstance(node, ast.Import):
                yield from ((alias.asname or alias.name, alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(module, node)
                yield from ((alias.asname or alias.name, origin, alias.name) for alias in node.names)

    def names(self, module: str) -> dict[str, tuple[str, str | None]]:
        """Module and name by local name, of everything that a module imports."""
        return {local: (origin, name) for local, origin, name in self.imported(module)}

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module
        parents = module.split(".")
        if self.file(module).name != "__init__.py":
            parents = parents[:-1]
        parents = parents[: len(parents) - node.level + 1]
        return ".".join([*parents, *filter(None, [node.module])])

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Where a module's name is defined, followed through imports within the package: module and node. A name that
        comes from elsewhere, or is a submodule, is found as the module that it stands for."""
        if self.file(module) is None:
            return None
        for node in self.tree(module).body:
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return module, node
        origin, original = self.names(module).get(name, (None, None))
        if origin is not None and original and origin.split(".")[0] == self.package:
            return self.find(origin, original)
        submodule = origin or f"{module}.{name}"
        return (submodule, self.tree(module)) if origin or self.file(submodule) else None

    def bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and what it inherits from within the package, nearest first."""
        yield module, node
        for base in node.bases:
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef):
                yield from self.bases(*found)

    def methods(self, module: str, name: str) -> dict[str, Function]:
        """Methods of a class, inherited ones included."""
        found: dict[str, Function] = {}
        for _, node in self.bases(*self.find(module, name)):
            for item in node.body:
                if isinstance(item, Function):
                    found.setdefault(item.name, item)
        return found

    def attributes(self, module: str, name: str) -> set[str]:
        """Everything that an object of a class has by its sources: methods, class attributes, what is set on self."""
        found = set()
        for _, node in self.bases(*self.find(module, name)):
            for item in ast.walk(node):
                if isinstance(item, Function):
                    found.add(item.name)
                elif (
                    isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and is_name(item.value, "self")
                ):
                    found.add(item.attr)
            for item in node.body:
                if isinstance(item, ast.AnnAssign | ast.Assign):
                    targets = [item.target] if isinstance(item, ast.AnnAssign) else item.targets
                    found |= {target.id for target in targets if isinstance(target, ast.Name)}
        return found


def is_name(node: ast.AST, name: str) -> bool:
    """Whether a node is this plain name."""
    return isinstance(node, ast.Name) and node.id == name


def parameters(function: Function) -> list[str]:
    """Names of a function's parameters in the order of its signature, without self."""
    given = function.args
    starred = [[given.vararg] if given.vararg else [], given.kwonlyargs, [given.kwarg] if given.kwarg else []]
    names = [item.arg for item in (*given.posonlyargs, *given.args, *(one for group in starred for one in group))]
    return [name for name in names if name != "self"]


def names_in(node: ast.AST) -> set[str]:
    """Plain names that occur in a node."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def chain(node: ast.AST) -> tuple[str, ...]:
    """("self", "args", "ds", "zpg") of the expression self.args.ds.zpg; () of any other kind of expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if isinstance(node, ast.Name) else ()


def stock_parser(sources: Sources, module: str) -> argparse.ArgumentParser:
    """The parser that a stock command line builds when it is run, made of its own `parser` statements."""
    import datetime

    tree = sources.tree(module)
    main = next(node for node in tree.body if isinstance(node, ast.If) and "__name__" in names_in(node.test))
    end = next(i for i, node in enumerate(main.body) if "parse_args" in ast.dump(node))
    names = {"argparse": argparse, "datetime": datetime.datetime}
    exec(compile(ast.Module(main.body[:end], []), module, "exec"), names)
    return names["parser"]
