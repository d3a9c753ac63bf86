"""Tables and their exports."""

from __future__ import annotations

import csv
import io
import json

import pytest

from fxckpt.utils.tables import Column, Table

SIZE = Column("bytes", "size", lambda n: f"{n} B", is_number=True)
TABLE = Table(
    (Column("op", "op"), SIZE, Column("shape", "shape", is_brief=False)),
    (("mm|t", 512, (4, 8)), ("sin", 16, ())),
)


def test_text_shows_brief_columns_formatted() -> None:
    """Text has formatted cells, numbers to the right, and no column that is not brief."""
    head, _, first, second = str(TABLE).splitlines()
    assert "size" in head and "shape" not in head
    assert first.endswith("512 B") and second.endswith(" 16 B")


def test_data_formats_hold_plain_values() -> None:
    """JSON and CSV hold every column, unformatted; a tuple is joined in CSV."""
    assert json.loads(TABLE.to_json())[0] == {"op": "mm|t", "bytes": 512, "shape": [4, 8]}
    rows = list(csv.reader(io.StringIO(TABLE.to_csv())))
    assert rows == [["op", "bytes", "shape"], ["mm|t", "512", "4x8"], ["sin", "16", ""]]


def test_markup_is_escaped() -> None:
    """A bar ends no Markdown cell, and HTML shows markup as text."""
    assert r"mm\|t" in TABLE.to_markdown()
    risky = Table((Column("op", "<op>"),), (("<b>&",),))
    assert "<th>&lt;op&gt;</th>" in risky.to_html() and "&lt;b&gt;&amp;" in risky.to_html()


def test_rows_are_selected() -> None:
    """``top`` and ``where`` return tables of fewer rows and the same columns."""
    assert TABLE.top(1).records()[0]["op"] == "mm|t" and len(TABLE.top(-1)) == 0
    assert [row["op"] for row in TABLE.where(lambda row: row["bytes"] < 100)] == ["sin"]


def test_an_empty_table_prints_its_head() -> None:
    """A table without rows has a head in every format."""
    empty = TABLE.top(0)
    assert "size" in str(empty) and "size" in empty.to_markdown() and "size" in empty.to_html()
    assert empty.to_csv() == "op,bytes,shape" and empty.to_json() == "[]"


def test_pandas_frame() -> None:
    """A frame has the data's columns, also without rows."""
    pandas = pytest.importorskip("pandas")
    assert list(TABLE.to_pandas()["bytes"]) == [512, 16]
    assert isinstance(TABLE.top(0).to_pandas(), pandas.DataFrame)
    assert list(TABLE.top(0).to_pandas().columns) == ["op", "bytes", "shape"]
