"""The rule tables of `docs/conformance/` are true: every rule names tests, and every named test exists.

Also nothing is left out of them: every worked case, every reported case, every endpoint.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from ds4.server.routes import ROUTES

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "conformance").glob("*.md"))
HEAD = ("rule", "what holds", "shown by")
NODE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(\[[^`]+\])?`")


@dataclass(frozen=True)
class Rule:
    page: str
    line: int
    name: str
    text: str
    nodes: tuple[tuple[str, str, str], ...]
    """(file, function, parameters in brackets or nothing)"""
    rest: str
    """The last cell without the tests that it names."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line} {self.name}"


def rules_of(text: str, page: str) -> list[Rule]:
    """The rows of the tables that have our head. Raises AssertionError for one that is no row of three cells."""
    rules = []
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            inside = False
            continue
        cells = tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        if cells == HEAD:
            inside = True
        elif inside and not set(line) <= set("|- "):
            assert len(cells) == len(HEAD), f"{page}:{number}: {len(cells)} cells"
            name, what, shown = cells
            rest = NODE.sub("", shown).replace(",", "").strip()
            rules.append(Rule(page, number, name, what, tuple(NODE.findall(shown)), rest))
    return rules


@cache
def functions_of(file: str) -> frozenset[str]:
    """Names of the test functions of a module."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def missing(rules: list[Rule]) -> list[str]:
    """Rules that no test shows, and tests that do not exist."""
    found = []
    for rule in rules:
        if not (rule.name and rule.text and rule.nodes) or rule.rest:
            found.append(f"{rule.place}: {rule.rest or 'names no test'}")
        for file, function, _ in rule.nodes:
            if not (ROOT / file).is_file() or function not in functions_of(file):
                found.append(f"{rule.place}: there is no {file}::{function}")
    return found


def parameters_of(file: str, function: str) -> set[str]:
    """The ids of a parametrised test, in brackets: those of parameters that are strings, or that its `ids` names."""
    module = import_module(file.removesuffix(".py").replace("/", "."))
    found: set[str] = set()
    for mark in getattr(getattr(module, function), "pytestmark", ()):
        if mark.name == "parametrize":
            name = mark.kwargs.get("ids") or str
            found |= {f"[{name(value)}]" for value in mark.args[1]}
    return found


RULES = [rule for page in PAGES for rule in rules_of(page.read_text(), page.name)]


def test_every_rule_is_shown_by_tests_that_exist() -> None:
    assert missing(RULES) == []
    assert len(RULES) > 400
    names = [(rule.page, rule.name) for rule in RULES]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_named_cases_exist() -> None:
    wanted = {(file, function, case) for rule in RULES for file, function, case in rule.nodes if case}
    known = {(file, function): parameters_of(file, function) for file, function, _ in wanted}
    assert [case for case in wanted if case[2] not in known[case[:2]]] == []
    assert len(wanted) > 150


def cases(name: str, *areas: str) -> list[str]:
    lines = (ROOT / "tests" / "data" / name).read_text(encoding="utf-8").splitlines()
    return [case["id"] for case in map(json.loads, lines) if not areas or case["area"] in areas]


@pytest.mark.parametrize(
    ("page", "ids"),
    [
        ("parsing.md", cases("parser_cases.jsonl")),
        ("prompts.md", cases("prompts.jsonl")),
        ("reported.md", cases("cases.jsonl", "parser", "api", "prompt", "http", "security", "batching", "kv")),
    ],
)
def test_every_case_has_a_rule(page: str, ids: list[str]) -> None:
    """A row whose name begins with the case's id, shown by that very case where it is a parameter."""
    rows = [rule for rule in RULES if rule.page == page]
    for case in ids:
        found = [rule for rule in rows if re.match(rf"{re.escape(case)}(?![\w-])", rule.name)]
        assert len(found) == 1, case
        named = [parameters for _, _, parameters in found[0].nodes if parameters]
        assert all(parameters == f"[{case}]" for parameters in named), case


def test_every_endpoint_has_a_rule() -> None:
    text = "\n".join(rule.name for rule in RULES if rule.page == "api.md")
    for route in ROUTES:
        path = route.full_path + ("{id}" if route.path.endswith("/") and route.path != "/" else "")
        assert f"{route.method} `{path}`" in text, path


def test_the_check_can_fail() -> None:
    table = "| rule | what holds | shown by |\n| --- | --- | --- |\n"
    for row, said in (
        ("| a | b | |", "names no test"),
        ("| a | b | by hand |", "by hand"),
        ("| a | b | `tests/test_dsml.py::test_nothing` |", "there is no tests/test_dsml.py::test_nothing"),
        ("| a | b | `tests/test_none.py::test_a` |", "there is no tests/test_none.py::test_a"),
        ("| a | b | `tests/test_dsml.py::test_causes`, surely |", "surely"),
    ):
        assert any(said in line for line in missing(rules_of(table + row, "x.md"))), row
    right = "| a | b | `tests/test_dsml.py::test_causes`, `tests/test_dsml.py::test_worked_turn[C01]` |"
    (rule,) = rules_of(table + right, "x.md")
    assert missing([rule]) == [] and rule.nodes[1][2] == "[C01]"
