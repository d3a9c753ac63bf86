"""Documentation: links resolve, snippets run, commands parse."""

from __future__ import annotations

import gc
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

import fxckpt
from fxckpt.cli.arguments import parse

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "fxckpt", "passes", "bench", "notebooks")
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    + [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")]
)
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SNIPPET = re.compile(r"(<!-- fragment -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", GUIDES, ids=label)
def test_snippets_run(page: Path) -> None:
    """Snippets of a page share one namespace; a fragment is compiled only."""
    # What an earlier page left, freed within a first step, would count as memory that a step frees.
    gc.collect()
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(12)))
    names = {"torch": torch, "fxckpt": fxckpt, "layers": layers, "block": layers[0]}
    names |= {"model": layers, "x": torch.randn(256, 8)}
    for fragment, code in SNIPPET.findall(page.read_text()):
        compiled = compile(code, label(page), "exec")
        if not fragment:
            exec(compiled, names)


@pytest.mark.parametrize("page", GUIDES, ids=label)
def test_commands_parse(page: Path) -> None:
    blocks = [code for language, code in FENCE.findall(page.read_text()) if language == "sh"]
    for line in re.findall(r"^fxckpt (.+)$", "\n".join(blocks), re.MULTILINE):
        parse(shlex.split(line, comments=True))


@pytest.mark.parametrize("page", GUIDES, ids=label)
def test_attributes_exist(page: Path) -> None:
    """Inline code names attributes that exist."""
    owners = {"plan": fxckpt.Plan, "backend": fxckpt.Backend, "fxckpt": fxckpt}
    prose = FENCE.sub("", page.read_text())
    found = re.findall(r"`(plan|backend|fxckpt)\.(\w+)(?=[`(])", prose)
    fields = set(fxckpt.Plan.__dataclass_fields__)
    missing = [
        f"{owner}.{name}"
        for owner, name in found
        if not (hasattr(owners[owner], name) or (owner == "plan" and name in fields))
    ]
    assert not missing


def test_architecture_names_paths_that_exist() -> None:
    """Files and folders in tables are there, in the root or in the package."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    paths = {path for row in rows for path in re.findall(r"`([\w/]+(?:/|\.py|\.md))`", row)}
    assert len(paths) > 40
    assert not {p for p in paths if not (ROOT / p).exists() and not (ROOT / "fxckpt" / p).exists()}


def test_readme_is_short() -> None:
    """The first page of the project fits on a few screens."""
    assert 90 <= len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_lines_fit(page: Path) -> None:
    """Prose has 100 columns; rows of tables, pictures and what is between fences may have more."""
    lines = FENCE.sub("", page.read_text()).splitlines()
    assert not [x for x in lines if len(x) > 100 and not x.startswith(("|", "!["))]


@pytest.mark.parametrize(
    "table", [ROOT / "fxckpt/torch_private/README.md", ROOT / "passes/inductor/README.md"]
)
def test_workarounds_name_their_tests(table: Path) -> None:
    """Every row of a table of workarounds names tests that exist, and when it is to be deleted."""
    lines = table.read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    head, _, *rows = rows
    sources = "".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    files = {p.stem for p in (ROOT / "tests").rglob("test_*.py")}
    for row in rows:
        given = dict(zip(head, row, strict=True))
        assert all(given.values())
        for name in re.findall(r"`(test_\w+)`", given["test"]) or [""]:
            assert name in files or f"def {name}(" in sources, row
