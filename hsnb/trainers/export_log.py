"""What of an export is done: one JSON line a row, appended once the row is on the disk. No row counts because a file exists.

Lines are not fsynced one by one: one that a power cut takes means that its row is written again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from hsnb.errors import ExtractError
from hsnb.trainers.layout import Written

LOG = "hsnb-export.jsonl"


class ExportLog:
    """The log in `folder`, made with `settings` or continued when it was made with the same. `done`: {row: (Written, source's stamp)}.

    Raises ExtractError for a folder that holds something else, or an export with other settings, naming what changed.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder, self.path = folder, folder / LOG
        self.done: dict[int, tuple[Written, str]] = {}
        settings = json.loads(json.dumps(settings))
        if self.path.exists():
            self._continue(settings)
        elif folder.exists() and any(folder.iterdir()):
            raise ExtractError(
                got=f"{folder} with {', '.join(sorted(p.name for p in folder.iterdir())[:3])}, and without {LOG}",
                expected="no such folder, an empty one, or one of the same export",
                likely="files of something else",
                next="name another folder",
            )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = open(self.path, "a")  # noqa: SIM115 (held until close)
            self._append({"settings": settings})

    def _continue(self, settings: dict[str, Any]) -> None:
        lines, whole = [], 0
        with open(self.path, "rb+") as file:
            for line in file:
                try:
                    lines.append(json.loads(line if line.endswith(b"\n") else b""))
                except ValueError:
                    break
                whole += len(line)
            file.truncate(whole)  # what a kill or a power cut tore is taken off
        try:
            before = lines[0]["settings"] if lines else settings
            for line in lines[1:]:
                stamp = line.pop("source")
                self.done[line["row"]] = Written(**line), stamp
        except (KeyError, TypeError, AttributeError) as error:
            raise ExtractError(
                got=f"{self.path}: {error!r}",
                expected="the log of an export",
                likely="a file edited or damaged",
                next="name another folder",
            ) from error
        changed = [
            f"{k} was {before.get(k)!r} and is {settings.get(k)!r}" for k in {**before, **settings} if before.get(k) != settings.get(k)
        ]
        if changed:
            raise ExtractError(
                got=f"{self.folder}: {'; '.join(changed)}",
                expected="the settings it was begun with",
                likely="another export into the same folder",
                next="name another folder, or go back to the settings before",
            )
        self._handle = open(self.path, "a")  # noqa: SIM115 (held until close)
        if not whole:
            self._append({"settings": settings})

    def add(self, written: Written, source: str) -> None:
        """Note a row that is durable."""
        self.done[written.row] = written, source
        self._append({**asdict(written), "source": source})

    def _append(self, line: dict[str, Any]) -> None:
        self._handle.write(json.dumps(line) + "\n")
        self._handle.flush()

    def forget(self, rows: list[int], *, in_order: bool = False) -> None:
        """Take rows out: they are owed again, and the next line for them is the one that counts. `in_order`: all rows after a gap too."""
        for row in rows:
            del self.done[row]
        if in_order:
            first = next((k for k, row in enumerate(sorted(self.done)) if k != row), len(self.done))
            self.done = {row: one for row, one in self.done.items() if row < first}

    def written(self) -> list[Written]:
        """Return what is done, by row."""
        return [self.done[row][0] for row in sorted(self.done)]

    def damaged(self, *, read: bool) -> list[int]:
        """Return rows whose bytes are gone or of another length, and with `read` those whose checksum is another (all is read)."""
        found = []
        for row, (one, _) in self.done.items():
            path = self.folder / one.file
            try:
                size, end = path.stat().st_size, one.offset + one.bytes
                wrong = size < end if path.suffix == ".bin" else size != end  # behind a shard's last row a killed writer's bytes may lie
            except OSError:
                wrong = True
            if wrong or (read and _checksum(path, one) != one.xxh3_128):
                found.append(row)
        return found

    def close(self) -> None:
        os.fsync(self._handle.fileno())
        self._handle.close()


def _checksum(path: Path, one: Written) -> str:
    digest, left = xxhash.xxh3_128(), one.bytes
    with open(path, "rb") as file:
        file.seek(one.offset)
        while left and (block := file.read(min(left, 1 << 24))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
