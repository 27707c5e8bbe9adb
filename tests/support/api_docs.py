"""The field tables of docs/api.md. `python -m tests.support.api_docs` writes them."""

from __future__ import annotations

import re
from pathlib import Path

from ds4.server.api.fields import FieldTable
from ds4.server.api.openapi import markdown
from ds4.server.routes import ROUTES

DOCS = Path(__file__).parents[2] / "docs" / "api.md"

TABLES: dict[str, FieldTable] = {route.fields.where: route.fields for route in ROUTES if route.fields is not None}


def with_tables(text: str) -> str:
    """The page with every table between its marks as it should be."""
    return re.sub(
        r"<!-- fields: (\w+) -->\n.*?<!-- end -->",
        lambda match: f"<!-- fields: {match[1]} -->\n{markdown(TABLES[match[1]])}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    DOCS.write_text(with_tables(DOCS.read_text()))
