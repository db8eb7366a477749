"""Chat conversations out of the standard library's own documentation: real text that every Python installation carries.

Docstrings are read from the source files with `ast`; nothing is imported, so nothing runs and no platform matters. The same
Python version gives the same conversations everywhere. Questions are templates, answers are the documentation's words.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent

from hsnb.errors import DataError

VERSION = "1"  # raise it with any change of the conversations; prepared data names it
SEED = 2048
# Pure Python and part of every build of 3.11 to 3.14. Left out: what distributions split off (tkinter, turtle, idlelib, test),
# what belongs to one platform, and what those versions added or dropped.
MODULES = (
    "_pydecimal", "_pyio", "abc", "argparse", "ast", "asyncio", "base64", "bdb", "bisect", "bz2",
    "calendar", "cmd", "code", "codecs", "codeop", "collections", "colorsys", "compileall", "concurrent", "configparser", "contextlib",
    "contextvars", "copy", "copyreg", "csv", "dataclasses", "difflib", "dis", "doctest", "email", "enum", "filecmp", "fileinput",
    "fnmatch", "fractions", "ftplib", "functools", "genericpath", "getopt", "getpass", "gettext", "glob", "graphlib", "gzip", "hashlib",
    "heapq", "hmac", "html", "http", "imaplib", "importlib", "inspect", "io", "ipaddress", "json", "keyword", "linecache", "locale",
    "logging", "lzma", "mailbox", "mimetypes", "modulefinder", "multiprocessing", "netrc", "ntpath", "numbers", "operator", "optparse",
    "os", "pathlib", "pdb", "pickle", "pickletools", "pkgutil", "platform", "plistlib", "poplib", "posixpath", "pprint", "pstats",
    "py_compile", "pyclbr", "pydoc", "queue", "quopri", "random", "re", "reprlib", "runpy", "sched", "secrets", "selectors", "shelve",
    "shlex", "shutil", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "stat", "statistics", "string", "stringprep", "struct",
    "subprocess", "symtable", "sysconfig", "tabnanny", "tarfile", "tempfile", "textwrap", "threading", "timeit", "token", "tokenize",
    "tomllib", "trace", "traceback", "tracemalloc", "types", "typing", "unittest", "urllib", "uuid", "warnings", "wave", "weakref",
    "webbrowser", "wsgiref", "xml", "xmlrpc", "zipapp", "zipfile", "zipimport", "zoneinfo",
)  # fmt: skip
TOPICS = "pydoc_data/topics.py"  # the language reference, as help("for") prints it

# Limits in estimated tokens (see estimate). A two-turn conversation of SmolLM2 adds about 75 for its system prompt, its
# questions and the turns' marks, so that 512 keep a margin of a tenth. Measured on 3.11 to 3.13; tests hold them to it.
MAX_ANSWER = 340
MIN_ANSWER = 120
MAX_CONVERSATION = 420

_FIRST = {
    "function": ("What does {} do?", "How do I use {}?", "Explain {}.", "What should I know before I call {}?"),
    "class": ("What is {} for?", "Describe the class {}.", "When would I use {}?", "How does {} work?"),
    "module": ("What is the module {} for?", "Give me an introduction to {}.", "How do I use the module {}?"),
    "members": ("What does {} offer?", "List the main parts of {}.", "What can I find in {}?"),
    "topic": ("Explain {} in Python.", "What does the language reference say about {}?", "How is {} defined in Python?"),
}
_LATER = ("What else is there to know about {}?", "Tell me more about {}.", "What does the rest of the documentation of {} say?")
_GO_ON = ("Please go on.", "And then?", "What comes next?", "Tell me more.")
_ALSO = ("And {}?", "What about {}?", "How does {} differ?", "Now explain {}.")


@dataclass(frozen=True)
class Entry:
    """One documented thing: how a question names it, its kind (a key of _FIRST) and its cleaned text."""

    name: str
    kind: str
    text: str


def conversations(samples: int) -> list[list[dict[str, str]]]:
    """Return `samples` conversations, each a list of {"role": "user" | "assistant", "content"} of two or four messages.

    A smaller number gives the beginning of a larger one. No answer occurs twice. Raises DataError when more are asked than
    the library's documentation yields, or when its source files are not there.
    """
    pool = _pool()
    if not 0 <= samples <= len(pool):
        raise DataError(
            got=f"{samples} demo samples",
            expected=f"0..{len(pool)} (what this Python's documentation yields)",
            likely="a number meant for one's own data",
            next=f"set data.samples to at most {len(pool)}, or data.source to a data set",
        )
    return [[dict(message) for message in conversation] for conversation in pool[:samples]]


@lru_cache(maxsize=1)
def _pool() -> list[list[dict[str, str]]]:
    """Return every conversation there is, shuffled with a fixed seed."""
    draw = random.Random(SEED)
    found: list[list[dict[str, str]]] = []
    seen: set[str] = set()
    short: Entry | None = None  # the last entry too short for a conversation of its own: it waits for a neighbour
    for entry in entries():
        parts = [part for part in pieces(entry.text) if part not in seen and not seen.add(part)]
        templates = _FIRST[entry.kind]
        while parts:
            questions, answers = [draw.choice(templates).format(entry.name)], [parts.pop(0)]
            templates = _LATER
            if parts and draw.random() < 0.6 and estimate(answers[0]) + estimate(parts[0]) <= MAX_CONVERSATION:
                questions.append(draw.choice(_GO_ON))
                answers.append(parts.pop(0))
            elif not parts and estimate(answers[0]) < MIN_ANSWER:
                if short is None or short.name.partition(".")[0] != entry.name.partition(".")[0]:
                    short = Entry(entry.name, entry.kind, answers[0])
                    continue
                questions = [draw.choice(_FIRST[short.kind]).format(short.name), draw.choice(_ALSO).format(entry.name)]
                answers.insert(0, short.text)
                short = None
            found.append([message for turn in zip(questions, answers, strict=True) for message in _turn(*turn)])
    draw.shuffle(found)
    return found


def _turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def estimate(text: str) -> int:
    """Return about how many tokens a byte-level BPE of 50,000 makes of `text`, rather too many than too few."""
    words = sum(len(word) // 2 if word.isupper() else 1 + (len(word) > 6) + len(word) // 13 for word in re.findall(r"[A-Za-z]{2,}", text))
    return words + len(re.findall(r"[^A-Za-z\s]|\n+ *|  +|\b[A-Za-z]\b", text))


def pieces(text: str) -> list[str]:
    """Cut `text` into answers of at most MAX_ANSWER estimated tokens, at the edge of a paragraph, else of a sentence or item."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        whole = estimate(block) <= MAX_ANSWER
        for part in [block] if whole else re.split(r"(?<=[.:;!?)])\n|\n(?=\s*(?:[-*|>]|\S+\s{2,}))", block):
            if out and estimate(out[-1]) + estimate(part) < MAX_ANSWER:
                out[-1] += ("\n\n" if whole else "\n") + part
            elif estimate(part) <= MAX_ANSWER:
                out.append(part)
    cleaned = (dedent(part).strip() for part in out)
    # Tables and diagrams are no prose: half of the characters are letters in anything worth answering with.
    return [part for part in cleaned if len(part) >= 60 and sum(map(str.isalpha, part)) * 2 >= len(part)]


def entries() -> Iterator[Entry]:
    """Yield every documented thing of MODULES, then the topics, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        file = library / f"{module}.py"
        for source in [file] if file.is_file() else sorted((library / module).rglob("*.py")):
            inner = source.relative_to(library / module if source != file else library).with_suffix("").parts
            if not {"test", "tests", "__main__", "__pycache__"}.intersection(inner):
                public = [module.removeprefix("_py"), *(part for part in inner if part != module and not part.startswith("_"))]
                yield from _documented(_parse(source), ".".join(public), "module")  # _pyio documents io, pathlib/_local.py pathlib
        if not file.is_file() and not (library / module).is_dir():
            raise _no_source(file)
    assigned = next(node for node in _parse(library / TOPICS).body if isinstance(node, ast.Assign))
    for name, text in sorted(ast.literal_eval(assigned.value).items()):
        title, _, rest = _clean(text).partition("\n")
        subject = title.replace('"', "")
        yield Entry(f"“{subject}”", "topic", rest.strip() or name)


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str, kind: str) -> Iterator[Entry]:
    """Yield `node` and its public members, depth first in the order of the source."""
    if text := ast.get_docstring(node, clean=False):
        call = f"`{name}({ast.unparse(node.args)})`\n\n" if kind == "function" else ""
        yield Entry(f"`{name}`", kind, call + _clean(text))
    if kind == "function":
        return
    lines = []
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield from _documented(child, f"{name}.{child.name}", "class" if isinstance(child, ast.ClassDef) else "function")
            if summary := (ast.get_docstring(child) or "").partition("\n\n")[0]:
                lines.append(f"- `{child.name}`: {' '.join(summary.split())}")
    if len(lines) >= 4:
        yield Entry(f"`{name}`", "members", "\n".join(lines))


def _clean(text: str) -> str:
    """Return a docstring without its margin, its rulers (lines of marks alone) and runs of blank lines."""
    lines = [line.rstrip() for line in cleandoc(text).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line for line in lines if not re.fullmatch(r"[-=*~^#_+.| ]{4,}", line))).strip()


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except OSError as error:
        raise _no_source(file) from error


def _no_source(file: Path) -> DataError:
    return DataError(
        got=f"no source file {file}",
        expected="the standard library's .py files, which the demo's text is made from",
        likely="a Python without its sources, or a version that hsnb has not seen",
        next="use a Python of 3.11 to 3.14 from python.org, conda, or a full distribution package; or set data.source to a data set",
    )
