"""Names: one word for one thing, over all packages and tests."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_EACH_TRAINER = {"FxckptCallback"}
"""Classes that the packages of two trainers call alike."""
PRIVATE_OF_TORCH = re.compile(r"torch\b.*\._[a-zA-Z]")
"""A private name of torch."""
SHARED_PRIVATE = ("torch.utils._pytree", "torch.utils._python_dispatch.TorchDispatchMode")
"""Private names that all packages may import, as ``fxckpt/torch_private/README.md`` says."""
VERBS = {"checked", "load", "parse", "resolve", "save", "verify", "write"}
"""Functions whose module says of what."""


def definitions(*folders: str) -> Iterator[ast.stmt]:
    """Yield the top-level statements of all files in some folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from ast.parse(path.read_text()).body


def repeated(names: Iterator[str]) -> set[str]:
    """Return the public names that occur twice."""
    return {n for n, count in Counter(names).items() if count > 1 and not n.startswith("_")}


def test_no_class_name_twice() -> None:
    """A class name stands for one class."""
    found = definitions("fxckpt", "passes")
    assert repeated(n.name for n in found if isinstance(n, ast.ClassDef)) == OF_EACH_TRAINER


def test_no_function_name_twice() -> None:
    """A function name stands for one function, but for verbs that read with their module."""
    found = definitions("fxckpt", "passes")
    assert repeated(n.name for n in found if isinstance(n, ast.FunctionDef)) == VERBS


def imported_names(path: Path) -> Iterator[str]:
    """Yield the full names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_private_names_of_torch_have_one_place() -> None:
    """Only ``torch_private`` imports private names of torch, but for two that everybody uses."""
    place = ROOT / "fxckpt" / "torch_private"
    found = {
        (str(path.relative_to(ROOT)), name)
        for folder in ("fxckpt", "passes")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if place not in path.parents
        for name in imported_names(path)
        if PRIVATE_OF_TORCH.match(name) and name not in SHARED_PRIVATE
    }
    assert not found
    inside = (name for path in place.rglob("*.py") for name in imported_names(path))
    assert any(map(PRIVATE_OF_TORCH.match, inside))


def test_test_names_are_short() -> None:
    """Names of tests have at most eight words; a sentence is a docstring."""
    found = (node for s in definitions("tests") for node in ast.walk(s))
    names = [n.name for n in found if isinstance(n, ast.FunctionDef)]
    assert not [n for n in names if n.startswith("test_") and n.count("_") > 8]


def test_folders_hold_few_files() -> None:
    """A folder of code has three to thirteen files and a README of what it is for."""
    folders = {path.parent for top in ("fxckpt", "passes") for path in (ROOT / top).rglob("*.py")}
    sizes = {str(f.relative_to(ROOT)): len(list(f.glob("*.py"))) for f in folders}
    assert not {name: size for name, size in sizes.items() if not 3 <= size <= 13}
    assert all((folder / "README.md").exists() for folder in folders)


def test_every_package_is_installed() -> None:
    """What is built holds every folder of code, not just those that the tests import from here."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for top in ("fxckpt", "passes") for path in (ROOT / top).rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert {n if n.startswith("fxckpt") else f"fxckpt.{n}" for n in names} == set(built)


def test_readmes_name_every_file() -> None:
    """The README of a folder of code names each of its files, in a dozen lines beside tables."""
    for top in ("fxckpt", "passes"):
        for readme in sorted((ROOT / top).rglob("README.md")):
            files = {path.stem for path in readme.parent.glob("*.py")} - {"__init__", "__main__"}
            text = readme.read_text()
            assert not {name for name in files if not re.search(rf"`{name}[`.]", text)}, readme
            prose = re.sub(r"```.*?```|^[|#].*?$", "", text, flags=re.DOTALL | re.MULTILINE)
            assert sum(bool(line) for line in prose.splitlines()) <= 12, readme
