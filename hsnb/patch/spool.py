"""The spool's two layouts (docs/dump-format.md): a request's rows are put in place chunk by chunk and published by rename.

safetensors: the length is known at the first chunk, so the file is laid out at its full size and each chunk is written where
it belongs; nothing but the chunk is held in memory. That is why the header is written here and not by the safetensors
package, which saves whole tensors only; the reader is that package.

The process that writes imports this and no torch (two seconds, 300 MB), unless its layout is pt: rows are numpy bytes here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from hsnb.patch.large_pages import VARIABLE, LargePages

if TYPE_CHECKING:
    import torch

_CHUNKS_ROOM = 2048  # bytes of header for the list of chunks, at least
_PAGE = 4096  # the tensors begin at a multiple of it, whatever the request's name: a published file's bytes do not depend on that
_ATTEMPTS = itertools.count()  # a prompt that starts again has another temporary file: the old one may still be on its way out
_AT_ONCE = 64 << 20  # bytes
_NUMBERED = threading.Lock()  # one req_N at a time
_LARGE_PAGES = LargePages(wanted=os.environ.get(VARIABLE) != "0")
_DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}  # safetensors' name, bytes


def file_stem(request_id: str) -> str:
    """Return the file name of a request: a hash, because a request id is never used as a path."""
    return xxhash.xxh3_128_hexdigest(request_id.encode(errors="surrogatepass"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor in host memory as numpy bytes, which this thread copies alone.

    torch's own copy wakes its pool of threads, which then spin for more: it costs ten times the copy (docs/performance.md).
    """
    import torch

    return tensor.view(torch.uint8).numpy()


@dataclass
class Request:
    """What is known of a request when its first rows arrive."""

    request_id: str
    num_tokens: int  # S, of the whole prompt
    kind: str  # data | warmup | health
    columns: int  # K + 1
    hidden_size: int
    dtype: str  # "bfloat16", ...
    meta: dict[str, str]  # what every dump of this server says of itself
    chunks: list[list[int]] = field(default_factory=list)
    sealed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's states."""
        return self.columns * self.hidden_size * _DTYPES[self.dtype][1]

    def put(self, start: int, states: np.ndarray, token_ids: np.ndarray, goes_on: bool = False) -> None:
        """Note that rows start..start+n arrived, uint8 [n, K + 1, bytes of H] and int64 [n]; of the same chunk as those before when it `goes_on`.

        Raises ValueError when they are not the next ones, or of another shape.
        """
        n, width = token_ids.shape[0], self.row_bytes // self.columns
        if states.shape != (n, self.columns, width) or states.dtype != np.uint8 or token_ids.dtype != np.int64:
            raise ValueError(f"states are {states.dtype}{list(states.shape)}, expected uint8[{n},{self.columns},{width}]")
        if start != self.next_row or start + n > self.num_tokens:
            raise ValueError(f"rows {start}..{start + n - 1} arrived, expected row {self.next_row} of {self.num_tokens} next")
        if goes_on and self.chunks:
            self.chunks[-1][1] = start + n
        else:
            self.chunks.append([start, start + n])

    @property
    def next_row(self) -> int:
        return self.chunks[-1][1] if self.chunks else 0

    @property
    def whole(self) -> bool:
        return self.next_row == self.num_tokens

    def _attempt(self) -> str:
        """Return the part of a temporary name that no other attempt has, of this or another process."""
        return f"{file_stem(self.request_id)}.{os.getpid()}.{next(_ATTEMPTS)}"


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        n = os.pwrite(fd, data[: 1 << 30], offset)  # one call writes at most 2 GiB
        data, offset = data[n:], offset + n


class SafetensorsRequest(Request):
    """hidden_states [S, K+1, H] and token_ids int64 [S] in DIR/{hash}.safetensors."""

    def begin(self, spool: Path) -> None:
        """Lay the file out at its full size. Raises OSError (ENOSPC before a byte of states is written)."""
        self._path = spool / f"{file_stem(self.request_id)}.safetensors"
        self._temporary = spool / f".{self._attempt()}.tmp"
        self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._header_size = -(-(8 + len(self._header([])) + _CHUNKS_ROOM) // _PAGE) * _PAGE - 8
        self._ids_at = 8 + self._header_size
        self._states_at = self._ids_at + 8 * self.num_tokens  # int64 first: both stay aligned
        nbytes = self._states_at + self.num_tokens * self.row_bytes
        try:
            _LARGE_PAGES.ask(self._fd, nbytes)
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError:
            self.discard()
            raise

    def _header(self, chunks: list[list[int]]) -> bytes:
        ids, states = 8 * self.num_tokens, self.num_tokens * self.row_bytes
        tree = {
            "__metadata__": {**self.meta, "request_id": self.request_id, "kind": self.kind, "chunks": json.dumps(chunks)},
            "token_ids": {"dtype": "I64", "shape": [self.num_tokens], "data_offsets": [0, ids]},
            "hidden_states": {
                "dtype": _DTYPES[self.dtype][0],
                "shape": [self.num_tokens, self.columns, self.hidden_size],
                "data_offsets": [ids, ids + states],
            },
        }
        return json.dumps(tree).encode()

    def put(self, start: int, states: np.ndarray, token_ids: np.ndarray, goes_on: bool = False) -> None:
        super().put(start, states, token_ids, goes_on)
        ids, rows = memoryview(token_ids).cast("B"), memoryview(states.reshape(-1))
        if start == 0 and self.whole and len(rows) <= _AT_ONCE:  # a short prompt: one call of the system for everything
            parts = [self._head(), ids, rows]
            if os.pwritev(self._fd, parts, 0) == sum(map(len, parts)):
                self.sealed = True
                return
        _write_all(self._fd, ids, self._ids_at + 8 * start)
        _write_all(self._fd, rows, self._states_at + start * self.row_bytes)

    def seal(self) -> None:
        """Write the header, if it is not there: everything is, but the name."""
        if not self.sealed:
            _write_all(self._fd, memoryview(self._head()), 0)
            self.sealed = True

    def _head(self) -> bytes:
        header = self._header(self.chunks)
        if len(header) > self._header_size:  # a very long prompt in very many chunks: say only that it is whole
            header = self._header([[0, self.num_tokens]])
        return self._header_size.to_bytes(8, "little") + header.ljust(self._header_size)

    def publish(self, spool: Path) -> None:
        """Close the file and give it its name; in this order, because some file systems tell of a failed write when it is closed."""
        self.seal()
        self._close()
        os.replace(self._temporary, self._path)

    def discard(self) -> None:
        try:
            self._temporary.unlink(missing_ok=True)
        finally:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:  # once: the number may be another file's by then
            os.close(fd)


class PtRequest(Request):
    """aux_0.pt ... and final.pt [S, H] with metadata.json in DIR/req_{N}: the layout this project started from.

    The rows are held in host memory until the prompt is whole (torch.save writes whole tensors).
    """

    def begin(self, spool: Path) -> None:
        import torch

        self._folder = spool / f".req.{self._attempt()}.tmp"
        self._folder.mkdir(mode=0o700)
        try:
            self._columns = [torch.empty(self.num_tokens, self.hidden_size, dtype=getattr(torch, self.dtype)) for _ in range(self.columns)]
        except RuntimeError:  # no memory
            self.discard()
            raise
        self._ids = np.empty(self.num_tokens, np.int64)

    def put(self, start: int, states: np.ndarray, token_ids: np.ndarray, goes_on: bool = False) -> None:
        super().put(start, states, token_ids, goes_on)
        rows = slice(start, start + token_ids.shape[0])
        for k, column in enumerate(self._columns):
            bits(column)[rows] = states[:, k]
        self._ids[rows] = token_ids

    def seal(self) -> None:
        """Save the tensors."""
        import torch

        names = [f"aux_{k}.pt" for k in range(self.columns - 1)] + ["final.pt"]
        for name, column in zip(names, self._columns, strict=True):
            torch.save(column, self._folder / name)  # a tensor of its own: a view would save its whole storage
        self.sealed = True

    def publish(self, spool: Path) -> None:
        """Give the folder its number, and the metadata with it."""
        if not self.sealed:
            self.seal()
        with _NUMBERED:
            self._number(spool)

    def _number(self, spool: Path) -> None:
        n, boundaries = _next_number(spool), json.loads(self.meta["boundaries"])
        tree = {
            **self.meta,
            "request_id": self.request_id,
            "req": n,
            "num_tokens": self.num_tokens,
            "layer_ids": boundaries,  # SGLang's layers_to_capture has the same numbers
            "boundaries": boundaries,
            "token_ids": self._ids.tolist(),
            "kind": self.kind,
            "chunks": self.chunks,
        }
        (self._folder / "metadata.json").write_text(json.dumps(tree))
        os.rename(self._folder, spool / f"req_{n}")
        with contextlib.suppress(OSError):  # it is published; the folders themselves say which number is the highest
            _replace_text(spool / ".next", str(n + 1))

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _next_number(spool: Path) -> int:
    """Return N of the next req_N: what .next says, and never a folder that is there; it outlives an emptied spool."""
    highest = max((int(p.name[4:]) for p in spool.glob("req_*") if p.name[4:].isdigit()), default=-1)
    try:
        return max(int((spool / ".next").read_text()), highest + 1)
    except (OSError, ValueError):
        return highest + 1


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def remove_leftovers(spool: Path) -> None:
    """Remove what a killed server had begun: no one finishes another process's temporary file."""
    for path in spool.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


LAYOUTS = {"safetensors": SafetensorsRequest, "pt": PtRequest}
