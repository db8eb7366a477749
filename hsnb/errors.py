"""Errors in four parts: what came, what was expected, where it likely comes from, what to do next."""

from __future__ import annotations


class HsnbError(Exception):
    """Base of every error that is the user's to mend.

    >>> print(ParamsError(got="shard is 99", expected="0..15 (16 shards)", likely="a typo", next="-p shard 9"))
    ParamsError: shard is 99, expected 0..15 (16 shards). Likely: a typo. Next: -p shard 9
    """

    def __init__(self, *, got: str, expected: str, likely: str, next: str):
        self.got, self.expected, self.likely, self.next = got, expected, likely, next
        super().__init__(got, expected, likely, next)

    def __reduce__(self):  # survives pickling into and out of worker processes
        return _rebuild, (type(self), self.as_dict())

    def as_dict(self) -> dict[str, str]:
        """Return the four parts, for --json and reports."""
        return {"got": self.got, "expected": self.expected, "likely": self.likely, "next": self.next}

    def _render_traceback_(self) -> list[str]:
        """Show one line in a notebook (IPython asks for this): where hsnb raised it is not the reader's concern."""
        return [str(self)]

    def __str__(self) -> str:
        return f"{type(self).__name__}: {self.got}, expected {self.expected}. Likely: {self.likely}. Next: {self.next}"


def _rebuild(cls: type[HsnbError], parts: dict[str, str]) -> HsnbError:
    return cls(**parts)


class BoundaryError(HsnbError):
    """A layer id or boundary that cannot be what was meant."""


class ParamsError(HsnbError):
    """A parameter of a notebook, a command or a YAML that is unknown or out of range."""


class ModelError(HsnbError):
    """A model folder that is missing something, or is of a kind that is not supported."""


class ServerError(HsnbError):
    """A server that does not start, does not answer, or is not one that hsnb may use."""


class CaptureError(HsnbError):
    """The plug-in is not armed as asked, or could not capture a request."""


class DumpError(HsnbError):
    """A dump that is missing, incomplete, or not what was asked for."""


class DataError(HsnbError):
    """Input samples that cannot be extracted as they are."""


class ExtractError(HsnbError):
    """An extraction that must not start, or not go on."""
