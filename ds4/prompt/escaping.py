"""Reversible escaping of a wrapper's own closing delimiter, and of nothing else.

A tool result stands between `<tool_response>` and `</tool_response>`; a result that contains the closing delimiter
must not end its wrapper, and source code must not be damaged by escaping every `<`. So only two things change: the
delimiter itself loses its `<` to `&lt;`, and text that already looks like an escaped delimiter gains one `&amp;`,
which makes `unescape(escape(s)) == s` for every `s`.
"""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=16)
def _patterns(end: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    rest = re.escape(end[1:])
    escaped = f"&(?:amp;)*lt;{rest}"
    return re.compile(f"<(?={rest})|&(?=(?:amp;)*lt;{rest})"), re.compile(f"(?={escaped})(?:&amp;|&lt;)")


def escape(text: str, end: str) -> str:
    """`text` with every occurrence of the closing delimiter `end` (it begins with `<`) made harmless."""
    if end[1:] not in text:
        return text
    return _patterns(end)[0].sub(lambda m: "&lt;" if m[0] == "<" else "&amp;", text)


def unescape(text: str, end: str) -> str:
    """The text that `escape` was given."""
    if end[1:] not in text:
        return text
    return _patterns(end)[1].sub(lambda m: "&" if m[0] == "&amp;" else "<", text)
