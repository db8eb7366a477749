"""A dump that holds already what speculators' file is to hold: moved or copied, relabelled, never serialised again. No engine."""

import errno
import fcntl
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from hsnb.checks import Asked, RowLook, row_faults
from hsnb.dumps import open_dump
from hsnb.errors import DumpError, ExtractError
from hsnb.extract.faults import disk_full
from hsnb.extract.output import Output
from hsnb.extract.staging import Task, stage
from hsnb.patch.spool import SafetensorsRequest, bits, dtype_name
from hsnb.trainers import layout, place

META = {
    "hsnb_format": "1", "boundaries": "[2, 15, 27]", "final": "pre", "dtype": "bfloat16", "model": "/models/m", "sglang_version": "0.5.23",
    "patch_version": "0.1.0", "tp_rank": "0", "tp_size": "1",
}  # fmt: skip
SPECULATORS = layout("speculators")


def dumped(spool: Path, rid: str = "hsnb-x-1-1", n: int = 37, dtype=torch.bfloat16, **meta) -> tuple[Path, torch.Tensor]:
    """Write a dump as the plug-in does, in two chunks; return its path and its states."""
    spool.mkdir(exist_ok=True)
    states = torch.randn(n, 4, 48, generator=torch.Generator().manual_seed(5)).to(dtype)
    request = SafetensorsRequest(rid, n, "data", 4, 48, dtype_name(dtype), META | {"dtype": dtype_name(dtype)} | meta)
    request.begin(spool)
    request.put(0, bits(states)[:20], torch.arange(20).numpy())
    request.put(20, bits(states)[20:], torch.arange(20, n).numpy())
    request.publish(spool)
    return request._path, states


def publish(folder: Path, path: Path, row: int = 7) -> tuple[Path, int, str]:
    """Publish as the extraction does."""
    (folder / "hidden_states").mkdir(parents=True, exist_ok=True)
    dump = open_dump(path)
    dump.metadata = {**dump.metadata, "request_id": f"row-{row}"}
    file, size, checksum = SPECULATORS.publish(folder, row, dump)
    return folder / file, size, checksum


def test_a_dump_on_the_same_file_system_is_moved_and_says_what_a_published_file_says(tmp_path):
    path, states = dumped(tmp_path / "spool")
    inode = path.stat().st_ino
    file, size, checksum = publish(tmp_path / "out", path)
    assert file.stat().st_ino == inode and not path.exists() and list((tmp_path / "spool").iterdir()) == []
    assert (size, checksum) == (file.stat().st_size, xxhash.xxh3_128_hexdigest(file.read_bytes()))
    assert file.stat().st_mode & 0o777 == 0o644
    with safe_open(file, "pt") as opened:
        assert torch.equal(opened.get_tensor("hidden_states"), states) and opened.get_tensor("token_ids").tolist() == list(range(37))
        wanted = {k: META[k] for k in ("hsnb_format", "boundaries", "final", "model", "sglang_version", "patch_version")}
        assert opened.metadata() == {**wanted, "request_id": "row-7"}
    assert int.from_bytes(file.read_bytes()[:8], "little") % 4096 == 4096 - 8


def test_a_copy_from_another_file_system_has_the_same_bytes_whatever_the_requests_were_called(tmp_path, monkeypatch):
    moved = publish(tmp_path / "a", dumped(tmp_path / "spool")[0])
    path, _ = dumped(tmp_path / "spool", rid="hsnb-a-much-longer-name-" + "9" * 60)

    other_file_system(monkeypatch)
    copied = publish(tmp_path / "b", path)
    assert moved[0].read_bytes() == copied[0].read_bytes() and moved[1:] == copied[1:]
    assert path.exists(), "the caller frees it"


def test_one_that_is_to_be_rounded_or_normed_is_written_anew(tmp_path):
    path, states = dumped(tmp_path / "spool", dtype=torch.float32)
    file, *_ = publish(tmp_path / "out", path)
    assert torch.equal(open_dump(file).states(), states.to(torch.bfloat16)) and path.exists()


@pytest.mark.parametrize("step", ["relabel", "sync", "rename"])
def test_what_fails_on_the_way_puts_the_dump_back_and_the_next_try_is_whole(tmp_path, monkeypatch, step):
    """The extraction tries again while its disk is full or troubled."""
    path, states = dumped(tmp_path / "spool")
    failed = []

    def failing(real):
        def once(*args):
            if not failed:
                failed.append(step)
                raise OSError(errno.EIO, "Input/output error")
            return real(*args)

        return once

    module, name = {
        "relabel": ("hsnb.trainers.speculators", "relabelled"),
        "sync": ("hsnb.trainers.speculators", "synced_checksum"),
        "rename": ("os", "replace"),
    }[step]
    monkeypatch.setattr(sys.modules[module], name, failing(getattr(sys.modules[module], name)))
    with pytest.raises(ExtractError, match="Input/output error"):
        publish(tmp_path / "out", path)
    assert failed == [step] and path.exists() and list((tmp_path / "out" / "hidden_states").iterdir()) == []
    assert torch.equal(open_dump(path).states(), states)
    file, _, checksum = publish(tmp_path / "out", path)
    assert torch.equal(open_dump(file).states(), states) and checksum == xxhash.xxh3_128_hexdigest(file.read_bytes())


def test_a_file_with_more_in_it_is_not_relabelled(tmp_path):
    from safetensors.torch import save_file

    states = torch.randn(5, 4, 8).to(torch.bfloat16)
    path = tmp_path / "foreign.safetensors"
    save_file({"hidden_states": states, "token_ids": torch.arange(5), "more": torch.ones(3)}, path, metadata=META | {"request_id": "r"})
    before = path.read_bytes()
    with pytest.raises(DumpError, match=r"entries .*more.*, expected hidden_states and token_ids"):
        publish(tmp_path / "out", path)
    assert path.read_bytes() == before and list((tmp_path / "out" / "hidden_states").iterdir()) == []


def test_on_two_real_file_systems(tmp_path):
    memory = Path("/dev/shm", f"hsnb-test-{os.getpid()}")
    if memory.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one file system")
    try:
        path, states = dumped(memory)
        file, size, checksum = publish(tmp_path / "out", path)
        assert path.exists() and torch.equal(open_dump(file).states(), states)
        assert (size, checksum) == (file.stat().st_size, xxhash.xxh3_128_hexdigest(file.read_bytes()))
    finally:
        shutil.rmtree(memory)


@pytest.mark.parametrize(("bad", "word"), [(float("nan"), "finite rows"), (0.0, "rows not zero"), (3.0, "rows not constant")])
@pytest.mark.parametrize("row", [0, 17, 18, 36])
def test_a_row_that_cannot_be_a_state_is_found_while_the_file_is_read_back_and_the_dump_is_put_back(tmp_path, monkeypatch, bad, word, row):
    """The block is made small, so that rows lie in many of them."""
    monkeypatch.setattr(place, "_BLOCK", 5 * 4 * 48 * 2)
    path, _ = dumped(tmp_path / "spool")
    dump = open_dump(path)
    assert dump.num_tokens == 37
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size - dump.nbytes + (row * 4 + 2) * 48 * 2)
        file.write(torch.full((48,), bad, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes())
    before, out = path.read_bytes(), Output(tmp_path / "out", "shard-0000-of-0001", "speculators")
    out.begin([7])
    task = Task(7, path, Asked(torch.arange(37), (2, 15, 27), "pre", 48, "bfloat16"), None)
    with pytest.raises(DumpError, match=f"row 7: {word} is 1 bad, first: row {row} of B_27"):
        stage(out, task)
    assert path.read_bytes()[4096:] == before[4096:] and [p for p in out.staging.rglob("*") if p.is_file()] == []


def test_bytes_in_pieces_of_any_size_are_looked_at_as_rows_at_once():
    states = torch.randn(41, 3, 16).to(torch.bfloat16)
    states[5, 1], states[20, 0, 3], states[30, 1, 7], states[40, 2] = 0, float("inf"), -float("nan"), 1.5
    whole = row_faults(states)
    assert [sorted(map(tuple, bad.nonzero().tolist())) for bad in whole] == [[(20, 0), (30, 1)], [(5, 1)], [(40, 2)]]
    data = memoryview(states.view(torch.int16).numpy().tobytes())
    row = len(data) // 41
    for size in (1, 7, row - 1, row, row + 1, 4 * row, 10 * row + 5, len(data)):
        look = RowLook(41, 3, 16, torch.bfloat16)
        for at in range(0, len(data), size):
            look.add(data[at : at + size])
        assert all(torch.equal(a, b) for a, b in zip(look.faults(), whole, strict=True)), size
    for end in (40 * row, 41 * row - 1):
        short = RowLook(41, 3, 16, torch.bfloat16)
        short.add(data[:end])
        with pytest.raises(ValueError, match="40 of 41 rows"):
            short.faults()


@pytest.mark.parametrize("way", ["moved", "copied"])
def test_blocks_end_where_rows_do(tmp_path, monkeypatch, way):
    """Rows of 384 bytes and blocks of 1,000: whole ones but for the row that the end of a piece cuts."""
    if way == "copied":
        other_file_system(monkeypatch)
    monkeypatch.setattr(place, "_BLOCK", 1000)
    monkeypatch.setattr(place, "_PIECE", 4096)
    looked, add = [], RowLook.add
    monkeypatch.setattr(RowLook, "add", lambda self, data: (looked.append(len(data)), add(self, data)))
    path, states = dumped(tmp_path / "spool")
    publish(tmp_path / "out", path)
    assert sum(looked) == states.numel() * 2 and max(looked) <= 1000
    cut = [n for n in looked if n % (states[0].numel() * 2)]
    assert len(cut) <= (0 if way == "moved" else 2 * -(-sum(looked) // 4096))


@pytest.mark.parametrize("width", [1, 2, 3, 48])
def test_a_row_whose_ends_and_middle_agree_is_not_constant_for_that(width):
    states = torch.ones(2, 1, width, dtype=torch.bfloat16)
    states[0, 0, width // 3] = 2.0
    assert row_faults(states)[2].flatten().tolist() == [width == 1, True]


# -- copied past the page cache


def other_file_system(monkeypatch):
    def rename(source, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(place.os, "rename", rename)


@pytest.mark.parametrize("n", [1, 20, 21, 42, 43, 300])
def test_a_copy_of_any_length_is_the_file_with_another_header(tmp_path, monkeypatch, n):
    """In pieces of two pages, so that rows, pages and the file end anywhere in them."""
    monkeypatch.setattr(place, "_PIECE", 8192)
    monkeypatch.setattr(place, "_BLOCK", 4096)
    source, target = tmp_path / "a", tmp_path / "b"
    states = torch.randn(n, 4, 48, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16)
    states[n // 2, 1], states[-1, 3, 5] = 0, float("inf")
    rest = states.view(torch.int16).numpy().tobytes()
    source.write_bytes(b"x" * 5000 + b"ids" + rest)
    look = RowLook(n, 4, 48, torch.bfloat16)
    size, digest = place.copy(source, target, b"H" * 5000, look, 5003)
    wanted = b"H" * 5000 + b"ids" + rest
    assert target.read_bytes() == wanted and (size, digest) == (len(wanted), xxhash.xxh3_128_hexdigest(wanted))
    assert all(torch.equal(a, b) for a, b in zip(look.faults(), row_faults(states), strict=True))
    assert source.read_bytes()[:1] == b"x"


@pytest.mark.parametrize("way", ["moved", "copied"])
@pytest.mark.parametrize("rows", [-1, 1])
def test_a_file_of_other_rows_than_its_dump_had_is_a_bad_dump_and_stays(tmp_path, monkeypatch, way, rows):
    """As when it changes between its opening and the reading; a file that appears by rename does not."""
    if way == "copied":
        other_file_system(monkeypatch)
    path, states = dumped(tmp_path / "spool")
    real = sys.modules["hsnb.trainers.speculators"].relabelled

    def shifted(*args):
        head, states_at = real(*args)
        return head, states_at - rows * 4 * 48 * 2

    monkeypatch.setattr(sys.modules["hsnb.trainers.speculators"], "relabelled", shifted)
    with pytest.raises(DumpError, match="more than 37 rows" if rows > 0 else "36 of 37 rows"):
        SPECULATORS.publish(make_folder(tmp_path), 7, open_dump(path), judge=lambda faults: None)
    assert torch.equal(open_dump(path).states(), states) and list((tmp_path / "out" / "hidden_states").iterdir()) == []


def make_folder(tmp_path: Path) -> Path:
    (tmp_path / "out" / "hidden_states").mkdir(parents=True)
    return tmp_path / "out"


@pytest.mark.parametrize("where", ["nowhere", "open", "write"])
def test_a_file_system_that_knows_no_way_past_its_cache_is_written_through_it(tmp_path, monkeypatch, where):
    other_file_system(monkeypatch)
    opened, written = os.open, os.pwrite
    asked, refused = [], []

    def open_(path, flags, *mode):
        if flags & os.O_WRONLY:
            asked.append(bool(flags & os.O_DIRECT))
        if where == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *mode)

    def pwrite(fd, data, at):
        if where == "write" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(at)
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(fd, data, at)

    path, states = dumped(tmp_path / "spool")
    monkeypatch.setattr(place.os, "open", open_)
    monkeypatch.setattr(place.os, "pwrite", pwrite)
    file, size, checksum = publish(tmp_path / "out", path)
    assert asked == ([True, False] if where == "open" else [True]) and refused == ([0] if where == "write" else [])
    assert torch.equal(open_dump(file).states(), states) and file.stat().st_mode & 0o777 == 0o644
    assert (size, checksum) == (file.stat().st_size, xxhash.xxh3_128_hexdigest(file.read_bytes()))


@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate"])
def test_a_disk_that_fills_up_while_it_is_copied_to_leaves_the_dump_and_nothing_else(tmp_path, monkeypatch, call):
    other_file_system(monkeypatch)
    monkeypatch.setattr(place, "_PIECE", 4096)
    path, states = dumped(tmp_path / "spool", n=200)
    real, calls = getattr(os, call), []

    def fails(*args):
        calls.append(call)
        if len(calls) == (5 if call == "pwrite" else 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(place.os, call, fails)
    before = path.read_bytes()
    with pytest.raises(ExtractError, match="No space left on device") as caught:
        publish(tmp_path / "out", path)
    assert disk_full(caught.value)
    assert path.read_bytes() == before and list((tmp_path / "out" / "hidden_states").iterdir()) == []
    file, _, checksum = publish(tmp_path / "out", path)
    assert torch.equal(open_dump(file).states(), states) and checksum == xxhash.xxh3_128_hexdigest(file.read_bytes())
