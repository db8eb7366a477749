"""docs/guarantees.md against the tests that it names, and the pages that link to each other against what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guarantees.md"
NAMED = re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE.read_text())


def test_every_guarantee_names_a_test():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| guarantee")]
    assert len(rows) >= 25
    assert all(re.search(r"`test_\w+\.py::test_\w+`", row) for row in rows), [r for r in rows if "::" not in r]


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)), ids=lambda value: value)
def test_the_named_test_is_there_and_asserts_something(file, name):
    tree = ast.parse((ROOT / "tests" / file).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name]
    says = [node for node in ast.walk(found) if isinstance(node, ast.Assert) or "raises" in ast.dump(node)[:400]]
    called = {getattr(n.func, "id", getattr(n.func, "attr", "")) for n in ast.walk(found) if isinstance(n, ast.Call)}
    helpers = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef) and n.name in called and any(isinstance(m, ast.Assert) for m in ast.walk(n))
    ]
    assert says or helpers, f"{file}::{name} asserts nothing"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_links_and_pictures_of_the_pages_are_there(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    links = [target for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if "://" not in target]
    missing = [target for target in links if not (ROOT / page).parent.joinpath(target).exists()]
    assert missing == []


def test_no_picture_of_the_docs_is_large():
    pictures = list((ROOT / "docs").rglob("*.png"))
    assert pictures and {p.name: p.stat().st_size for p in pictures if p.stat().st_size > 150_000} == {}
