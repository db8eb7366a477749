"""A data set whose finished files go to an object store (any fsspec URL): uploaded, read back and compared, then freed here.

What is at the store is at `{store}/{run}/`, laid out as the local folder is. A sample counts when a ledger has entered it and
its file is here or there with its size; so a run may go on at a machine that has none of the files. Ledgers go there as their
parquet exports, after the files they tell of. An upload that was cut off leaves the local file, which the next run sends.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import stamina
import xxhash

from hsnb.errors import ExtractError, ParamsError
from hsnb.ledger import FOLDER, Entry, Ledger, read_export, settle
from hsnb.trainers.place import file_digest

log = logging.getLogger(__name__)
TRIES = 5  # at one file, with growing pauses: a store that is busy, a network that blinks
WAIT_S = 0.5  # the first of them
BLOCK = 1 << 24
EXPORTS_S = 60.0  # between two uploads of the ledger
OTHERS = ".store"  # ledger/{name}.store.parquet: what other machines had entered when this one began


class Store:
    """The place of one data set at a store. `url`: of the store; `folder`: the data set's own, outputs/{run}/data; `run`: if it was renamed."""

    def __init__(self, url: str, folder: Path, run: str = ""):
        import fsspec  # only where there is a store

        try:
            self.fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise ParamsError(
                got=f"extract.store {url}: {error}",
                expected="a URL that fsspec can open, such as s3://bucket/states or file:///mnt/states",
                likely="a typo in the scheme, or its package (s3fs, gcsfs, adlfs) is not installed",
                next="mend it, or pip install the package that is named",
            ) from error
        run = run or folder.resolve().parent.name
        self.folder, self.root, self.url = folder, f"{root.rstrip('/')}/{run}", f"{url.rstrip('/')}/{run}"
        self._lock = threading.Lock()
        self._sizes: dict[str, int] | None = None

    # -- what is there ---------------------------------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        """Return {file: bytes} of everything that is there, listed once."""
        with self._lock:
            if self._sizes is None:
                self.fs.invalidate_cache()
                found = self.fs.find(self.root, detail=True) if self.fs.exists(self.root) else {}
                prefix = self.fs._strip_protocol(self.root).rstrip("/") + "/"
                self._sizes = {name.removeprefix(prefix): int(info["size"]) for name, info in found.items()}
            return self._sizes

    def has(self, entry: Entry) -> bool:
        """Say whether an entered sample's file is there, with its size."""
        return self.sizes().get(entry.file) == entry.bytes

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, file: str, digest: str = "") -> None:
        """Upload one file of the data set and compare what is there afterwards with `digest`, its xxh3-128 ("": the local file's).

        Raises ExtractError when the store does not hold it in the end; the local file stays in any case.
        """
        digest = digest or file_digest(self.folder / file)
        try:
            for attempt in stamina.retry_context(on=Exception, attempts=TRIES, timeout=None, wait_initial=WAIT_S):
                with attempt:
                    self._put(file)
                    found = self.digest(file)
                    if found != digest:
                        raise OSError(f"{file} came back as {found or 'nothing'}, {digest} was sent")
        except Exception as error:  # fsspec's backends raise errors of their own libraries
            raise ExtractError(
                got=f"{self.url}/{file}: {type(error).__name__}: {error}",
                expected=f"an upload that reads back as it was sent, in {TRIES} tries",
                likely="credentials that ran out, a bucket that is full or not writable, or a network that fails",
                next="mend it and run the same shard again: what was extracted is still here, and is only uploaded",
            ) from error
        with self._lock:
            if self._sizes is not None:
                self._sizes[file] = (self.folder / file).stat().st_size

    def _put(self, file: str) -> None:
        """Write one file there. What is not whole is never counted: an object store shows it when it is, and `has` compares its size."""
        target = f"{self.root}/{file}"
        self.fs.makedirs(self.fs._parent(target), exist_ok=True)
        self.fs.put_file(str(self.folder / file), target)

    def digest(self, file: str) -> str:
        """Return the xxh3-128 of a file there, read whole; "" when it is not there."""
        self.fs.invalidate_cache()
        found = xxhash.xxh3_128()
        try:
            with self.fs.open(f"{self.root}/{file}", "rb") as opened:
                while block := opened.read(BLOCK):
                    found.update(block)
        except FileNotFoundError:
            return ""
        return found.hexdigest()

    def send_about(self) -> None:
        """Upload what describes the data set (its table, its index, hsnb.json, the canary), where it is not there already."""
        for path in sorted([*self.folder.glob("*"), *(self.folder / FOLDER).glob("canary*")]):
            file = str(path.relative_to(self.folder))
            if path.is_file() and not path.name.startswith(".") and self.sizes().get(file) != path.stat().st_size:
                self.send(file)

    def send_ledger(self, name: str) -> None:
        """Upload one writer's export."""
        if (self.folder / FOLDER / f"{name}.parquet").is_file():
            self.send(f"{FOLDER}/{name}.parquet")

    def remove(self, file: str) -> None:
        """Remove one file there; nothing when it is gone."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(f"{self.root}/{file}")
        with self._lock:
            if self._sizes is not None:
                self._sizes.pop(file, None)

    # -- fetching --------------------------------------------------------------------------------------------------

    def fetch(self, file: str, target: Path) -> Path:
        """Copy one file from there to `target`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            self.fs.get_file(f"{self.root}/{file}", str(part))
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target

    def fetch_ledgers(self) -> None:
        """Bring what other machines entered: their exports as {name}.store.parquet, and the canary of the one that began."""
        for file in self.sizes():
            path = Path(file)
            if path.parent != Path(FOLDER):
                continue
            if path.suffix == ".parquet":
                self.fetch(file, self.folder / FOLDER / f"{path.stem}{OTHERS}.parquet")
            elif path.name.startswith("canary") and not (self.folder / file).exists():
                self.fetch(file, self.folder / file)

    @contextlib.contextmanager
    def local(self, file: str) -> Iterator[Path]:
        """Yield the path of a file's copy here, for as long as the block lasts."""
        with tempfile.TemporaryDirectory(prefix="hsnb-store-") as folder:
            yield self.fetch(file, Path(folder) / Path(file).name)


def adopt(ledger: Ledger, folder: Path) -> int:
    """Take over what this writer's name said elsewhere, from its exports in `folder`; return how many entries.

    A shard goes on at another machine than the one it was begun on, whose sqlite file is not here: what it says would be gone
    with the next export, which has the same name. Of an entry and a failure of the same sample the later one counts. Nothing is
    verified here: a run counts an entry only when its file is there with its size, and `hsnb verify` reads it.
    """
    have, failed = ledger.done(), ledger.failed()
    done, owed = dict(have), dict(failed)
    for path in (folder / FOLDER / f"{ledger.path.stem}{end}.parquet" for end in ("", OTHERS)):
        if path.is_file():
            settle(done, owed, *read_export(path)[1:])
    for row, why in owed.items():
        if failed.get(row) != why:
            ledger.fail(row, *why)
    news = [entry for row, entry in done.items() if have.get(row) != entry]
    if news:
        ledger.enter(news)
    return len(news)


class Uploader(threading.Thread):
    """Send what is entered while the run goes on, free it here, and let the ledger follow.

    `error`: what ended it; `add` raises it, so that a run does not fill its disk for a store that takes nothing.
    """

    def __init__(self, store: Store, ledger: Ledger):
        super().__init__(name="hsnb-uploader", daemon=True)
        self.store, self.ledger, self.error = store, ledger, None
        self.leaving = False  # of a run that was interrupted: what is not sent stays here, for the next one
        self.sent = self.bytes = 0
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._exported = time.monotonic()

    def add(self, entry: Entry) -> None:
        """Hand in an entered sample. Raises what ended the uploads."""
        if self.error is not None:
            raise self.error
        self._queue.put(entry)

    def run(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                if self.leaving:
                    return
                self.store.send(entry.file, entry.xxh3_128)
                (self.store.folder / entry.file).unlink(missing_ok=True)
                self.sent, self.bytes = self.sent + 1, self.bytes + entry.bytes
                if time.monotonic() - self._exported > EXPORTS_S:
                    self.flush()
        except BaseException as error:
            self.error = error

    def flush(self) -> None:
        """Export the ledger and upload it."""
        self._exported = time.monotonic()
        self.ledger.export(self.store.folder / FOLDER)
        self.store.send_ledger(self.ledger.path.stem)

    def close(self) -> None:
        """Send the rest and the ledger. Raises ExtractError when something is not at the store."""
        self._queue.put(None)
        self.join()
        if self.error is not None:
            raise self.error
        self.store.send_about()
        self.flush()

    def leave(self) -> None:
        """End after the file in hand; the others stay here and are sent by the next run."""
        self.leaving = True
        self._queue.put(None)
        self.join()


@contextlib.contextmanager
def sending(store: Store | None, ledger: Ledger) -> Iterator[Uploader | None]:
    """Yield the uploader of a run, None without a store; everything is there when the block ends well."""
    if store is None:
        yield None
        return
    uploader = Uploader(store, ledger)
    uploader.start()
    try:
        yield uploader
    except BaseException:
        uploader.leave()
        raise
    uploader.close()


def of_data(folder: Path, about: dict) -> Store | None:
    """Return the store that a data set's hsnb.json names, None when its files are all here."""
    url, _, run = about.get("store", "").rpartition("/")
    return Store(url, folder, run) if url else None
