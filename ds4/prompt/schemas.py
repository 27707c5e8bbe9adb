"""Tool schemas as GLM's and Qwen's templates print them: without what is meant for the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ds4._json import JSONError, parse
from ds4.bounded import once_per_object
from ds4.prompt.draft import TOOLS_COST, declared_size
from ds4.prompt.types import Tool


def offered_schemas(tools: Iterable[Tool]) -> Iterator[str]:
    """One canonical line per tool, without its members `strict` and `defer_loading`.

    A tool that the client wants to show later (`defer_loading`) is left out; a schema that is no JSON object stays as
    it is.
    """
    for tool in tools:
        try:
            node = parse(tool.schema.encode("utf-8", "replace")).as_object()
            deferred = node.get("defer_loading")
        except JSONError:
            yield tool.schema
            continue
        if deferred is None or deferred.kind != "bool" or not deferred.as_bool():
            yield node.canonical(("strict", "defer_loading"))


@once_per_object(TOOLS_COST, declared_size)
def schemas_by_name(tools: tuple[Tool, ...]) -> Mapping[str, str]:
    """The schema of each tool; of equal names the last one."""
    return {tool.name: tool.schema for tool in tools}
