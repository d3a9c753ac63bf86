"""mkdocs hook: cross references of the docstrings (Sphinx roles) become links."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):<code>~?([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Return the page with a link, where there is a target, in place of each role."""
    return ROLE.sub(_link, html)


def _link(match: re.Match[str]) -> str:
    path = match[1]
    name = path.rpartition(".")[2]
    target = path if path.startswith("fxckpt.") else f"fxckpt.{path}"
    # Public names have one page, whichever module defines them.
    public = f"fxckpt.{name}" if target.startswith("fxckpt.errors.") else target
    return f'<autoref identifier="{public}" optional><code>{name}</code></autoref>'
