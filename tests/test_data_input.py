"""Input of any size: sources merged and shuffled, read in flat memory, checked against the server, the masks and the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from datasets import Dataset

from hsnb.data import load_prepared, prepare, survey
from hsnb.demo import model_folder
from hsnb.errors import DataError
from hsnb.params import DataParams, Deployment, ServerParams, read_config
from hsnb.scan import placeholders
from tests.test_data import GOOD, ROWS, TALKS, deployment, jsonl


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out" / "data"


@pytest.fixture
def rows(tmp_path) -> Path:
    return jsonl(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def tiny_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder("tiny-deepseek"))


def test_several_sources_of_several_kinds_are_merged_in_order(tmp_path, out, tiny_tokenizer):
    Dataset.from_list(ROWS[:2]).to_parquet(tmp_path / "b.parquet")
    names = [jsonl(tmp_path / "talks.jsonl", [{"messages": TALKS[0]}]), tmp_path / "b.parquet", jsonl(tmp_path / "a.jsonl", ROWS[2:])]
    several = deployment().model_copy(update={"data": DataParams(source=[str(name) for name in names])})
    prepared = prepare(several, out)
    ids = [row.tolist() for row in prepared.dataset()["input_ids"]]
    assert ids[1:] == [row["input_ids"] for row in ROWS]
    assert tiny_tokenizer.decode(ids[0]).startswith("<s>Be brief.")
    assert [part.split(":")[0] for part in prepared.settings["source"].split("; ")] == ["talks.jsonl", "b.parquet", "a.jsonl"]
    other = several.model_copy(update={"data": DataParams(source=[str(name) for name in reversed(names)])})
    with pytest.raises(DataError, match=r"source is now 'a\.jsonl"):
        prepare(other, out)


def test_a_file_named_twice_is_refused(tmp_path, out, rows):
    twice = deployment().model_copy(update={"data": DataParams(source=[str(rows), str(tmp_path)])})
    with pytest.raises(DataError, match=r"data.source has .*rows.jsonl twice"):
        prepare(twice, out)


def test_a_shuffle_is_recorded_and_the_same_everywhere(tmp_path, out):
    each = [{"input_ids": [5 + n] * (n + 1), "loss_mask": [0] * n + [1]} for n in range(20)]
    source = jsonl(tmp_path / "rows.jsonl", each)

    def mixed(seed: int, shuffle: bool = True) -> Deployment:
        return deployment().model_copy(update={"data": DataParams(source=str(source), shuffle=shuffle, seed=seed)})

    prepared = prepare(mixed(7), out)
    order = prepared.index["sample"].tolist()
    assert order == [11, 5, 3, 9, 13, 15, 14, 10, 0, 12, 2, 19, 18, 16, 17, 1, 6, 4, 7, 8]  # must not change with a version of anything
    assert [ids.tolist() for ids in prepared.dataset()["input_ids"]] == [each[n]["input_ids"] for n in order]
    assert prepared.lengths.tolist() == [n + 1 for n in order] and prepared.index["masked"].tolist() == [1] * 20
    assert prepared.settings["shuffle"] == "seed 7"
    for other, words in ((mixed(8), "shuffle is now 'seed 8', expected 'seed 7'"), (mixed(7, False), "shuffle is now 'no'")):
        with pytest.raises(DataError, match=words):
            prepare(other, out)
    assert prepare(mixed(7), tmp_path / "again").fingerprint == prepared.fingerprint
    assert prepare(mixed(8), tmp_path / "eight").fingerprint != prepared.fingerprint
    assert prepare(mixed(7, False), tmp_path / "plain").index["sample"].tolist() == list(range(20))


def test_the_index_says_what_the_rows_are_without_reading_them(tmp_path, rows, out):
    prepared = prepare(deployment(rows), out, max_length=4, too_long="skip")
    (table,) = out.glob("*.arrow")
    table.unlink()
    index = load_prepared(out).index
    assert index["length"].tolist() == [4, 3, 6] and index["masked"].tolist() == [2, 2, 2] and index["ok"].tolist() == [True, True, False]
    assert index["ids_xxh3"].tolist() == [xxhash.xxh3_128_digest(np.array(row["input_ids"], "<i8").tobytes()) for row in ROWS]
    assert prepared.rows == 3


MEASURE = """
import sys, threading, time
from pathlib import Path
import hsnb.data, datasets, torch
from hsnb.params import Deployment
def anonymous():
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")).split()[1]) << 10
most = 0
def watch():
    global most
    while True:
        most = max(most, anonymous())
        time.sleep(0.002)
tree = {"name": "t", "model": "demo:tiny-deepseek", "capture": {"boundaries": [2]}}
def go(source, out):
    return hsnb.data.prepare(Deployment.parse({**tree, "data": {"source": source, "shuffle": True}}, origin="t"), Path(out))
go(sys.argv[1], sys.argv[3])  # what is imported and made once
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
rows = go(sys.argv[2], sys.argv[4]).rows
print(rows, most - before)
"""


def test_memory_stays_flat_from_one_time_to_ten_times_the_data(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, count in (("one", 2_000), ("ten", 20_000)):
        schema = pa.schema({column: pa.list_(pa.int64()) for column in ("input_ids", "loss_mask")})
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", schema) as file:
            for at in range(0, count, 2000):
                ids = pa.array((np.arange(2000 * 500) + at) % 500, pa.int64())
                lists = pa.ListArray.from_arrays(pa.array(np.arange(0, 2000 * 500 + 1, 500, dtype=np.int32)), ids)
                mask = pa.ListArray.from_arrays(lists.offsets, pa.array(np.ones(2000 * 500, np.int64)))
                file.write_table(pa.table([lists, mask], ["input_ids", "loss_mask"]))
    used = {}
    for name, count in (("one", 2_000), ("ten", 20_000)):
        command = [sys.executable, "-c", MEASURE, *(str(tmp_path / each) for each in ("one.parquet", f"{name}.parquet"))]
        done = subprocess.run([*command, str(tmp_path / f"first-{name}"), str(tmp_path / f"out-{name}")], capture_output=True, text=True)
        assert not done.returncode, done.stderr
        rows, used[name] = map(int, done.stdout.split()[-2:])
        assert rows == count
    whole = 20_000 * 500 * 2 * 8  # bytes of the ten-fold ids and masks: 160 MB
    assert used["ten"] < used["one"] + whole // 8, used


# --- what the server takes, masks, placeholders


def limited(source: Path, **server) -> Deployment:
    return deployment(source).model_copy(update={"server": ServerParams(device="cpu", **server)})


@pytest.mark.parametrize(
    ("server", "most"), [({"context_length": 20}, 13), ({"max_total_tokens": 18}, 11), ({"context_length": 20, "max_total_tokens": 18}, 11)]
)
def test_what_the_server_would_refuse_is_too_long(tmp_path, out, server, most):
    source = jsonl(tmp_path / "rows.jsonl", [{"input_ids": [5] * n, "loss_mask": [1] * n} for n in (2, most, most + 1)])
    with pytest.raises(DataError) as error:
        prepare(limited(source, **server), out)
    assert error.value.got == f"1 of 3 samples are too long, the first is sample 2 with {most + 1} tokens"
    assert error.value.expected.startswith(f"at most {most} tokens (the server takes {most}: context_length ")
    assert "a larger server.context_length and server.max_total_tokens" in error.value.next
    skipped = prepare(limited(source, **server), out, too_long="skip")
    assert skipped.ok.tolist() == [True, True, False] and skipped.dataset()[2]["status"].startswith(
        f"skipped: {most + 1} tokens, the server"
    )
    cut = prepare(limited(source, **server), tmp_path / "cut", too_long="truncate")
    assert cut.lengths.tolist() == [2, most, most] and cut.settings["longest_taken"] == most
    assert prepare(limited(source, **server), tmp_path / "cut", too_long="truncate").reused


def test_masks_that_say_nothing_are_counted_and_a_whole_set_of_them_is_refused(tmp_path, out):
    rows = [([5, 6], [0, 0]), ([5, 6], [1, 1]), ([5, 6], [0, 1]), ([5, 6, 7], [1, 1, 1])]
    source = jsonl(tmp_path / "rows.jsonl", [{"input_ids": ids, "loss_mask": mask} for ids, mask in rows])
    prepared = prepare(deployment(source), out, max_length=2, too_long="skip")
    assert (prepared.unmasked, prepared.all_masked, prepared.masked_tokens) == (1, 1, 3)  # the skipped row counts for neither
    frame = prepared.frame()["value"]
    assert (frame["rows with nothing under the mask"], frame["rows with everything under the mask"]) == (1, 1)
    jsonl(source, [{"input_ids": [5, 6], "loss_mask": [0, 0]}] * 3)
    with pytest.raises(DataError) as error:
        prepare(deployment(source), tmp_path / "none")
    assert error.value.got == "no trained token in 3 samples: every loss_mask is 0"


def test_only_too_long_samples_are_refused(tmp_path, out, rows):
    with pytest.raises(DataError, match="all 3 samples are too long, expected some of at most 2 tokens"):
        prepare(deployment(rows), out, max_length=2, too_long="skip")


def test_an_image_placeholder_is_refused_by_name(tmp_path, out):
    name, token = next(iter(placeholders(read_config(model_folder("tiny-kimi-k25"))).items()))[::-1]
    assert name == "media_placeholder_token_id"
    source = jsonl(tmp_path / "rows.jsonl", [GOOD, {"input_ids": [5, token, 6], "loss_mask": [0, 0, 1]}])
    with pytest.raises(DataError) as error:
        prepare(deployment(source, model="demo:tiny-kimi-k25"), out)
    assert error.value.got == f"sample 1: id {token} at position 1 ({name} of config.json)" and error.value.expected == "text only"


def test_placeholders_of_the_field():
    config = {
        "image_token_index": 32000, "media_placeholder_token_id": 163605, "eos_token_id": 2, "vision_config": {"hidden_size": 8},
        "text_config": {"video_token_id": 7, "bos_token_id": 1, "image_size": 3},
    }  # fmt: skip
    assert placeholders(config) == {32000: "image_token_index", 163605: "media_placeholder_token_id", 7: "video_token_id"}


def test_a_survey_counts_what_prepare_would_write(rows, out):
    scan = survey(deployment(rows), max_length=4, too_long="skip")
    prepared = prepare(deployment(rows), out, max_length=4, too_long="skip")
    assert scan.counts() == {name: getattr(prepared, name) for name in scan.counts()}
    assert list(scan.lengths) == prepared.lengths.tolist() and scan.too_long == 1
    assert [problem.got for problem in survey(deployment(rows), max_length=3).problems()] == [
        "2 of 3 samples are too long, the first is sample 0 with 4 tokens"
    ]
