"""Tables: rows as data, and the same as text, Markdown, CSV, JSON, HTML or a pandas frame."""

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
    """A column's name as data (units in it), its heading for people, and how a cell is shown to them."""

    name: str
    heading: str
    show: Callable[[Any], str] = str
    is_number: bool = False
    is_brief: bool = True
    """Shown in text and Markdown; what is not is in the data alone."""


@dataclass(frozen=True)
class Table:
    """Rows of plain values under named columns. Printing shows them to people; the ``to_`` methods give the values as they are.

    >>> table = Table((Column("op", "op"), Column("bytes", "size", lambda n: f"{n} B", is_number=True)), (("mm", 512),))
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
        """Return the table with its first ``count`` rows."""
        return replace(self, rows=self.rows[: max(0, count)])

    def where(self, keep: Callable[[dict[str, Any]], bool]) -> Table:
        """Return the table with the rows that ``keep`` says yes to, which it is given as :meth:`records` does."""
        return replace(
            self,
            rows=tuple(
                row for row, record in zip(self.rows, self.records(), strict=True) if keep(record)
            ),
        )

    def records(self) -> list[dict[str, Any]]:
        """Return one dict a row, by column name; values as they are (bytes, seconds, FLOPs)."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def __str__(self) -> str:
        return self._drawn("simple")

    def to_markdown(self) -> str:
        """Return a Markdown table, as shown to people."""
        return self._drawn("github")

    def to_csv(self) -> str:
        """Return comma-separated values, the first line naming the columns."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.name for column in self.columns])
        writer.writerows([[_flat(value) for value in row] for row in self.rows])
        return text.getvalue().rstrip("\n")

    def to_json(self, indent: int | None = None) -> str:
        """Return a JSON array with one object a row."""
        return json.dumps(self.records(), indent=indent, ensure_ascii=False)

    def to_pandas(self) -> Any:
        """Return a pandas frame. Needs pandas, which fxckpt does not install."""
        import pandas as pd  # type: ignore[import-untyped, import-not-found, unused-ignore]  # there if the user has it

        return pd.DataFrame(self.records(), columns=[column.name for column in self.columns])

    def to_html(self) -> str:
        """Return an HTML table without scripts or styles of its own, as code hosts and notebooks show it."""
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
        # A cell may hold a bar, which would end it in Markdown.
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
