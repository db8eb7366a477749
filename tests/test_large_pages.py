"""Dumps in large pages, asked of this machine's own kernel: they are had, change no byte, and are never insisted on. No engine."""

import errno
import os
import platform
import random
import shutil
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hsnb.dumps import open_dump
from hsnb.patch import large_pages, spool
from hsnb.patch.large_pages import PAGE, LargePages, has_small_pages_only, mapped
from hsnb.patch.spool import SafetensorsRequest, bits
from tests.test_writer import assert_right, closed, made, req, run, said  # noqa: F401

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
KERNEL = tuple(int(n) for n in platform.release().split(".")[:2])
HAVE = pytest.mark.skipif(
    KERNEL < (6, 1) or not SYSTEM.exists() or "[deny]" in SYSTEM.read_text() or platform.machine() != "x86_64",
    reason=f"no large pages for the asking on Linux {platform.release()}, {platform.machine()}",
)
TOKENS, COLUMNS, HIDDEN = 300, 4, 7168


@pytest.fixture
def shm(monkeypatch):
    """Return a new folder in memory; nobody has asked for large pages in it, or set them off."""
    monkeypatch.delenv(large_pages.VARIABLE, raising=False)
    monkeypatch.setattr(spool, "_LARGE_PAGES", LargePages())
    folder = Path(tempfile.mkdtemp(prefix="hsnb-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def dumped(folder: Path, n: int = TOKENS) -> tuple[Path, torch.Tensor]:
    """Write a dump of Kimi's width in two chunks; return it and its states [n, K + 1, H]."""
    states = torch.randn(n, COLUMNS, HIDDEN).to(torch.bfloat16)
    request = SafetensorsRequest("hsnb-a", n, "data", COLUMNS, HIDDEN, "bfloat16", {"boundaries": "[1, 2, 3]", "final": "pre"})
    request.begin(folder)
    rows, ids, half = bits(states), torch.arange(n).numpy(), n // 2
    for part in (slice(0, half), slice(half, n)):
        request.put(part.start, rows[part], ids[part])
    request.publish(folder)
    (path,) = folder.iterdir()
    return path, states


def assert_same(path: Path, states: torch.Tensor) -> None:
    dump = open_dump(path)
    assert dump.token_ids.tolist() == list(range(len(states)))
    assert all(torch.equal(dump.state(b), states[:, k]) for k, b in enumerate((1, 2, 3, "final")))


def large(path: Path) -> int:
    """Return in how many large pages a file is, as the kernel maps it."""
    if not (count := path.stat().st_size // PAGE):
        return 0
    with path.open("rb+") as file, mapped(file.fileno(), count) as address:
        read = (large_pages.ctypes.c_char * (count * PAGE)).from_address(address)
        assert [read[k * PAGE] for k in range(count)] == [os.pread(file.fileno(), 1, k * PAGE) for k in range(count)]
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        next(line for line in lines if line.startswith(f"{address:x}-"))
        kb = next(line.split()[1] for line in lines if line.startswith("ShmemPmdMapped:"))
    return int(kb) * 1024 // PAGE


@HAVE
def test_a_dump_is_in_large_pages_and_every_byte_is_what_it_would_be_in_small_ones(shm, monkeypatch):
    path, states = dumped(shm)
    assert path.stat().st_size // PAGE == large(path) == 8
    assert_same(path, states)
    assert path.stat().st_blocks * 512 - path.stat().st_size < 4096, "no more memory than in small ones"
    got = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(spool, "_LARGE_PAGES", LargePages(wanted=False))
    monkeypatch.setattr(torch, "randn", lambda *_: states)
    path, _ = dumped(shm)
    assert large(path) == 0 and path.read_bytes() == got


@HAVE
@pytest.mark.parametrize("value", ["", "0", "1"])
def test_the_process_that_writes_has_them_too_unless_the_variable_is_0(shm, monkeypatch, value):
    """776 bytes a row: 6,000 rows are two large pages and a bit."""
    monkeypatch.setenv(large_pages.VARIABLE, value)
    capture = made(shm, monkeypatch, mib=16)
    run(capture, (req("hsnb-a", 6000), 0, 6000), (req("hsnb-b", 60), 0, 60))
    capture.writer.settle()
    assert said(capture) == ({"captured": 2}, [])
    assert sorted(large(p) for p in shm.glob("*.safetensors")) == [0, 0 if value == "0" else 2]
    assert_right(shm, "hsnb-a", 6000)


@HAVE
def test_many_threads_ask_for_files_of_all_sizes_and_each_byte_is_right(shm, monkeypatch):
    monkeypatch.setattr(large_pages, "SLOW_S", 1.0)  # a busy machine is not what this is about
    asker, rng = LargePages(), random.Random(0)
    jobs = [(n, rng.randrange(1, 5 * PAGE)) for n in range(48)]

    def write(job):
        n, nbytes = job
        with (shm / str(n)).open("wb+") as file:
            count = asker.ask(file.fileno(), nbytes)
            os.posix_fallocate(file.fileno(), 0, nbytes)
            os.pwrite(file.fileno(), random.Random(n).randbytes(nbytes), 0)
        return count

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(write, jobs))
    whole = [nbytes // PAGE for _, nbytes in jobs]
    assert sum(counts) > sum(whole) / 2 and all(c in (0, w) for c, w in zip(counts, whole, strict=True))
    assert all((shm / str(n)).read_bytes() == random.Random(n).randbytes(nbytes) for n, nbytes in jobs)


def test_a_file_smaller_than_one_is_not_touched(shm):
    with tempfile.TemporaryFile(dir=shm) as file:
        assert LargePages().ask(file.fileno(), PAGE - 1) == 0 and os.fstat(file.fileno()).st_size == 0


def test_a_wrong_variable_is_told_where_the_server_arms(tmp_path, monkeypatch):
    monkeypatch.setenv(large_pages.VARIABLE, "yes")
    with pytest.raises(ValueError, match="SGLANG_HS_DUMP_LARGE_PAGES is 'yes', expected 0 or 1"):
        made(tmp_path, monkeypatch)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM, errno.EAGAIN])
def test_where_the_kernel_refuses_a_dump_is_in_small_pages_and_it_is_asked_again_later(shm, monkeypatch, number):
    """EINVAL: another file system or an older kernel; ENOMEM: no large piece of memory is left; EAGAIN: a page was in use."""
    asked, now = [], [1000.0]

    def refuses(*args):
        asked.append(args)
        large_pages.ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(large_pages, "_libc", Libc(refuses))
    monkeypatch.setattr(large_pages.time, "monotonic", lambda: now[0])
    most = 2 if number == errno.EAGAIN else 1
    for times in range(1, 5):
        path, states = dumped(shm)
        assert_same(path, states)
        assert len(asked) == min(times, most)
        path.unlink()
    now[0] += large_pages.PAUSE_S
    for _ in range(2):
        path, _ = dumped(shm)
        path.unlink()
    assert len(asked) == most + 1


class Libc:
    """The C library, but for madvise."""

    def __init__(self, madvise):
        self.madvise = madvise
        self.mmap, self.munmap, self.fstatfs = (getattr(large_pages._libc, n) for n in ("mmap", "munmap", "fstatfs"))


def test_a_kernel_that_has_to_work_for_each_is_left_alone_for_a_while(shm, monkeypatch):
    spent, asked, now, works = [0.0], [], [1000.0], [3 * large_pages.SLOW_S]

    def advised(*args):
        asked.append(args)
        spent[0] += 8 * works[0]  # of eight pages
        return 0

    def dumps(n: int) -> int:
        for _ in range(n):
            path, _ = dumped(shm)
            path.unlink()
        return len(asked)

    monkeypatch.setattr(large_pages, "_libc", Libc(advised))
    monkeypatch.setattr(large_pages.time, "thread_time", lambda: spent[0])
    monkeypatch.setattr(large_pages.time, "monotonic", lambda: now[0])
    assert dumps(5) == 2  # a single one is an accident
    now[0] += large_pages.PAUSE_S
    assert dumps(3) == 3, "one more decides"
    now[0] += large_pages.PAUSE_S
    works[0] = 0.2 * large_pages.SLOW_S
    assert dumps(5) == 8


@HAVE
def test_a_long_file_is_given_up_in_its_middle_and_is_whole(shm, monkeypatch):
    """103 MB: 49 pages in steps of 8."""
    spent, asked, madvise = [0.0], [], large_pages._libc.madvise

    def advised(address, nbytes, advice):
        asked.append(nbytes // PAGE)
        spent[0] += (5 if len(asked) > 2 else 0.1) * asked[-1] * large_pages.SLOW_S
        return madvise(address, nbytes, advice)

    with monkeypatch.context() as patch:
        patch.setattr(large_pages, "_libc", Libc(advised))
        patch.setattr(large_pages.time, "thread_time", lambda: spent[0])
        path, states = dumped(shm, 1800)
    assert asked == [8, 8, 8] and large(path) == 24
    assert_same(path, states)
    path.unlink()
    monkeypatch.setattr(spool, "_LARGE_PAGES", LargePages())
    monkeypatch.setattr(large_pages, "SLOW_S", 1.0)
    path, states = dumped(shm, 1800)
    assert large(path) == path.stat().st_size // PAGE == 49
    assert_same(path, states)


def test_what_is_not_in_memory_is_not_asked(tmp_path, monkeypatch):
    """On a disk not a byte is written early. Where no file can be made nothing is said of its pages."""
    assert not has_small_pages_only(Path("/nowhere")) and not has_small_pages_only(Path("/proc/self/fd"))
    monkeypatch.setattr(large_pages, "_TMPFS", -1)  # pytest's folder may be in memory
    assert not has_small_pages_only(tmp_path)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        asker = LargePages()
        assert asker.ask(file.fileno(), 9 * PAGE) == 0 and os.fstat(file.fileno()).st_size == 0 and asker.not_before > 0


def test_a_file_that_cannot_be_mapped_leaves_no_hole_that_another_thread_could_lose():
    """A socket's own handler refuses, when the reservation is already gone: what lies there by then is not unmapped."""
    unmapped, libc = [], large_pages._libc

    class Watching(Libc):
        def __init__(self):
            super().__init__(libc.madvise)
            self.munmap = lambda address, nbytes: unmapped.append(nbytes) or libc.munmap(address, nbytes)

    with socket.socket() as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_pages, "_libc", Watching())
        with pytest.raises(OSError), mapped(file.fileno(), 2):
            pass
    assert sum(unmapped) == PAGE, "all but where the file should have been"


@pytest.mark.parametrize("kib", [8, 16, 3 << 10, 9 << 10, 16 << 10])
def test_a_file_system_without_room_is_told_and_nothing_is_left(shm, disk, kib):
    """A dump of 17.2 MB: the first pages of its large ones do not fit, or the large ones, or the last small ones."""
    folder = disk("full", kib / 1024)
    with pytest.raises(OSError, match="No space left"):
        dumped(folder)
    assert list(folder.iterdir()) == [] and shutil.disk_usage(folder).used == 0


@HAVE
def test_a_file_system_that_gives_them_by_itself_is_not_asked(shm, disk, monkeypatch):
    folder, asked = disk("large", 64, "huge=within_size"), []
    with monkeypatch.context() as patch:
        patch.setattr(large_pages, "_libc", Libc(lambda *args: asked.append(args) or 0))
        path, _ = dumped(folder)
    assert not asked and large(path) == 8
    assert not has_small_pages_only(folder)


@HAVE
def test_whether_there_are_small_pages_only_is_tried(shm, monkeypatch):
    assert not has_small_pages_only(shm) and list(shm.iterdir()) == []
    monkeypatch.setattr(large_pages, "_libc", Libc(lambda *_: -1))
    assert has_small_pages_only(shm) and list(shm.iterdir()) == []
