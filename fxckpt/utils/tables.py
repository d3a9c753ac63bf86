"""Tables: rows of data with exports to text, Markdown, CSV, JSON, HTML and pandas."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate


@dataclass(frozen=True)
class Column:
    """A column of a table: its name, its heading and the format of its cells."""

    name: str
    """Name in the data, with the unit."""

    heading: str
    """Heading for people."""

    show: Callable[[Any], str] = str
    """Format of a cell for people."""

    is_number: bool = False
    """Whether cells are aligned to the right."""

    is_brief: bool = True
    """Whether text, Markdown and HTML show the column; CSV, JSON and pandas always do."""


@dataclass(frozen=True)
class Table:
    """Rows of plain values under named columns.

    Text, Markdown and HTML show formatted cells; :meth:`records`, CSV, JSON and pandas hold the
    plain values.

    >>> size = Column("bytes", "size", lambda n: f"{n} B", is_number=True)
    >>> table = Table((Column("op", "op"), size), (("mm", 512),))
    >>> print(table)
    op      size
    ----  ------
    mm     512 B
    >>> print(table.to_csv())
    op,bytes
    mm,512
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records())

    def top(self, count: int) -> Table:
        """Return a table of the first ``count`` rows."""
        return replace(self, rows=self.rows[: max(0, count)])

    def where(self, keep: Callable[[dict[str, Any]], bool]) -> Table:
        """Return a table of the rows whose record, as in :meth:`records`, ``keep`` accepts."""
        return replace(
            self,
            rows=tuple(
                row for row, record in zip(self.rows, self.records(), strict=True) if keep(record)
            ),
        )

    def records(self) -> list[dict[str, Any]]:
        """Return one dict of plain values per row, by column name."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def __str__(self) -> str:
        return self._drawn("simple")

    def to_markdown(self) -> str:
        """Return a Markdown table of formatted cells."""
        return self._drawn("github")

    def to_csv(self) -> str:
        """Return comma-separated values; the first line holds the column names."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.name for column in self.columns])
        writer.writerows([[_flat(value) for value in row] for row in self.rows])
        return text.getvalue().rstrip("\n")

    def to_json(self, indent: int | None = None) -> str:
        """Return a JSON array of one object per row."""
        return json.dumps(self.records(), indent=indent, ensure_ascii=False)

    def to_pandas(self) -> Any:
        """Return a pandas frame; it needs pandas, which fxckpt does not install.

        Raises
        ------
        ImportError
            pandas is not installed.
        """
        import pandas as pd  # type: ignore[import-untyped, import-not-found, unused-ignore]

        return pd.DataFrame(self.records(), columns=[column.name for column in self.columns])

    def to_html(self) -> str:
        """Return an HTML table without scripts or style sheets, for code hosts and notebooks."""
        shown = self._shown()
        head = "".join(f"<th>{html.escape(column.heading)}</th>" for column in self._brief())
        align = ["right" if column.is_number else "left" for column in self._brief()]
        body = "\n".join(
            "<tr>"
            + "".join(
                f'<td style="text-align:{a}">{html.escape(cell)}</td>'
                for a, cell in zip(align, row, strict=True)
            )
            + "</tr>"
            for row in shown
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return self.to_html()

    def _brief(self) -> list[Column]:
        return [column for column in self.columns if column.is_brief]

    def _shown(self) -> list[list[str]]:
        return [
            [c.show(value) for c, value in zip(self.columns, row, strict=True) if c.is_brief]
            for row in self.rows
        ]

    def _drawn(self, style: str) -> str:
        brief = self._brief()
        # A bar would end a Markdown cell.
        cells = (
            [[cell.replace("|", "\\|") for cell in row] for row in self._shown()]
            if style == "github"
            else self._shown()
        )
        align = ["right" if column.is_number else "left" for column in brief]
        return str(
            tabulate(
                cells,
                [c.heading for c in brief],
                tablefmt=style,
                disable_numparse=True,
                colalign=align if cells else None,
            )
        )


def _flat(value: Any) -> Any:
    return "x".join(map(str, value)) if isinstance(value, tuple) else value
