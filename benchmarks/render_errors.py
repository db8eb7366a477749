"""Write docs/errors.md from the code: every error class, and every place that raises it with its four parts. `python -m benchmarks.render_errors`"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
PARTS = ("got", "expected", "likely", "next")
INTRO = """# Errors

Written by `python -m benchmarks.render_errors` from the code; a test compares the two.

Every error that is the user's to mend is an `HsnbError` and has four parts: what came, what was expected, where it likely comes
from, what to do next. It is one line on a terminal (exit status 2), one line in a notebook, `{"error": {"type", "got", "expected",
"likely", "next"}}` with `--json`, and stands on top of a report. In Python the parts are attributes: `error.next`.
What stands in `{braces}` below is filled in. Any other exception is a bug of hsnb or of a library: please report it.
"""


@dataclass(frozen=True)
class Site:
    """One place in the code that makes an error."""

    name: str
    module: str
    parts: tuple[str, ...]


def classes() -> dict[str, tuple[str, str]]:
    """Return {class: (its base, its docstring)} of every error class in hsnb/, in the order of the files, base classes first."""
    found, known = {}, {"HsnbError"}
    nodes = [n for tree in _trees().values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    while new := [n for n in nodes if n.name not in found and n.bases and ast.unparse(n.bases[0]).split(".")[-1] in known]:
        for node in new:
            found[node.name] = (ast.unparse(node.bases[0]), ast.get_docstring(node) or "")
            known.add(node.name)
    return found


def sites(names: set[str]) -> list[Site]:
    """Return every call of one of the classes with all four parts named."""
    found = []
    for module, tree in _trees().items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names):
                continue
            given = {k.arg: k.value for k in node.keywords}
            if set(PARTS) <= given.keys():
                found.append(Site(node.func.id, module, tuple(template(given[part]) for part in PARTS)))
    return found


def template(node: ast.expr) -> str:
    """Return an expression as the text it makes, with what is filled in within braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.IfExp):
        return f"{template(node.body)} *or* {template(node.orelse)}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "{" + ast.unparse(node) + "}"


def render() -> str:
    """Return the page."""
    known = classes()
    found = sites(set(known))
    lines = [INTRO, "| error | means | places |", "|---|---|---|"]
    lines += [
        f"| [{name}](#{name.lower()}) | {doc.splitlines()[0]} | {sum(s.name == name for s in found)} |" for name, (_, doc) in known.items()
    ]
    for name, (base, doc) in known.items():
        lines += ["", f"## {name}", "", doc + ("" if base == "HsnbError" else f" A kind of {base}."), ""]
        mine = [site for site in found if site.name == name]
        if mine:
            lines += ["| where | what came | expected | likely | next |", "|---|---|---|---|---|"]
        lines += [f"| `{site.module}` | " + " | ".join(map(_cell, site.parts)) + " |" for site in mine]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _trees() -> dict[str, ast.Module]:
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in sorted((ROOT / "hsnb").rglob("*.py"))}


if __name__ == "__main__":
    PAGE.write_text(render())
