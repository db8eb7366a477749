"""Prepared data: the masks are the answers, nothing is dropped in silence, and every refusal says what, where and what next."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from datasets import Dataset, DatasetDict, load_from_disk

from hsnb import samples
from hsnb.chat import tokenise
from hsnb.data import load_prepared, prepare, send_batches, send_order, shard_rows, survey
from hsnb.demo import model_folder
from hsnb.demo.stdlib_docs import conversations
from hsnb.errors import DataError, ModelError, ParamsError
from hsnb.params import DataParams, Deployment, ServerParams, read_config
from hsnb.scan import placeholders

ROWS = [
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
    {"input_ids": [9, 10, 7], "loss_mask": [0, 1, 1]},
    {"input_ids": [511, 0, 1, 2, 3, 4], "loss_mask": [0, 0, 0, 0, 1, 1]},
]
TALKS = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}, {"role": "assistant", "content": "1, one."}],
    [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2\n\n  two "}, {"role": "user", "content": "Then?"}],
]


def deployment(source: str | Path = "demo", model: str = "demo:tiny-deepseek", samples: int = 2048) -> Deployment:
    tree = {"name": "t", "model": str(model), "capture": {"boundaries": [2]}, "data": {"source": str(source), "samples": samples}}
    return Deployment.parse(tree, origin="test")


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out" / "data"


@pytest.fixture
def rows(tmp_path) -> Path:
    return jsonl(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def smol_demo(tmp_path_factory):
    """All 2,048 demo samples, prepared for SmolLM2; with what progress was told."""
    told: list[tuple[int, int]] = []
    prepared = prepare(
        deployment(model="demo:smollm2-fp32"), tmp_path_factory.mktemp("smol") / "data", progress=lambda *done: told.append(done)
    )
    return prepared, told


@pytest.fixture(scope="module")
def tiny_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder("tiny-deepseek"))


# --- the demo, whole


def test_masked_tokens_are_the_answers_to_the_letter(smol_demo):
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(model_folder("smollm2-fp32"))
    table = smol_demo[0].dataset()
    for row, talk in zip(table, conversations(2048), strict=True):
        assert tok.decode(row["input_ids"]) == tok.apply_chat_template(talk, tokenize=False)
        answers = "".join(message["content"] + "<|im_end|>" for message in talk if message["role"] == "assistant")
        assert tok.decode(row["input_ids"][row["loss_mask"] == 1]) == answers


def test_demo_counts(smol_demo):
    prepared, told = smol_demo
    table = prepared.dataset()
    ids, masks = table["input_ids"], table["loss_mask"]
    assert prepared.rows == len(table) == 2048
    assert prepared.tokens == sum(map(len, ids)) == prepared.lengths.sum()
    assert prepared.masked_tokens == sum(int(mask.sum()) for mask in masks)
    assert (prepared.skipped, prepared.truncated, prepared.unmasked, prepared.reused) == (0, 0, 0, False)
    assert prepared.lengths.max() <= 512 and prepared.ok.all()
    assert prepared.settings["source"].startswith("demo: 2048 samples of the documentation of Python 3.")
    assert told == [(512, 2048), (1024, 2048), (1536, 2048), (2048, 2048), (2048, 2048)]


def test_token_frequencies_are_those_under_the_mask(smol_demo):
    prepared, _ = smol_demo
    counted: Counter[int] = Counter()
    for row in prepared.dataset():
        counted.update(row["input_ids"][row["loss_mask"] == 1].tolist())
    saved = torch.load(prepared.path / "token_freq.pt", weights_only=True)
    assert saved == dict(counted) and sum(saved.values()) == prepared.masked_tokens
    assert all(type(token) is int and type(count) is int for token, count in saved.items())


def test_the_data_set_is_as_speculators_reads_it(smol_demo):
    table = load_from_disk(str(smol_demo[0].path))
    assert table.column_names == ["input_ids", "loss_mask", "seq_len", "status"]
    row = table[17]
    assert row["input_ids"].dtype is row["loss_mask"].dtype is torch.int64
    assert int(row["seq_len"]) == len(row["input_ids"]) == len(row["loss_mask"]) and row["status"] == "ok"


def test_summary(smol_demo):
    prepared, _ = smol_demo
    frame = prepared.frame()["value"]
    assert frame["rows"] == 2048 and frame["tokens"] == prepared.tokens
    assert frame["tokens a row, mean"] == round(prepared.tokens / 2048, 1)
    assert frame["tokens a row, most"] == prepared.lengths.max() and frame["max length"] == 512
    assert f"<td>{prepared.tokens}</td>" in prepared._repr_html_()
    assert json.loads(json.dumps(prepared.as_dict()))["fingerprint"] == prepared.fingerprint
    assert len(prepared.fingerprint) == 32


def test_the_demo_again_is_the_same(smol_demo, out):
    again = prepare(deployment(model="demo:smollm2-bf16"), out)  # another folder, the same tokenizer
    assert again.fingerprint == smol_demo[0].fingerprint and again.settings == smol_demo[0].settings


# --- sources


def test_every_file_format_gives_the_same_rows(tmp_path, rows):
    table = Dataset.from_list([{**row, "other": "column"} for row in ROWS])
    table.to_parquet(tmp_path / "rows.parquet")
    table.with_format("torch").save_to_disk(tmp_path / "arrow")
    (tmp_path / "parts").mkdir()
    jsonl(tmp_path / "parts" / "0.jsonl", ROWS[:2])
    jsonl(tmp_path / "parts" / "1.jsonl", ROWS[2:])
    (tmp_path / "parts" / "README.md").write_text("not data")
    made = [prepare(deployment(tmp_path / name), tmp_path / f"out-{name}") for name in ("rows.jsonl", "rows.parquet", "arrow", "parts")]
    assert len({prepared.fingerprint for prepared in made}) == 1
    for prepared in made:
        got = prepared.dataset()
        assert [ids.tolist() for ids in got["input_ids"]] == [row["input_ids"] for row in ROWS]
        assert [mask.tolist() for mask in got["loss_mask"]] == [row["loss_mask"] for row in ROWS]
        assert (prepared.rows, prepared.tokens, prepared.masked_tokens) == (3, 13, 6)
        assert prepared.lengths.tolist() == [4, 3, 6]


def test_a_selection_of_an_arrow_data_set_is_heeded(tmp_path, out):
    Dataset.from_list(ROWS).select([2, 0]).save_to_disk(tmp_path / "arrow")
    assert [ids.tolist() for ids in prepare(deployment(tmp_path / "arrow"), out).dataset()["input_ids"]] == [
        ROWS[2]["input_ids"],
        ROWS[0]["input_ids"],
    ]


def test_small_ints_and_bools_become_int64(tmp_path, out):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"input_ids": pa.array([[1, 2], [3]], pa.list_(pa.int32())), "loss_mask": pa.array([[False, True], [True]])}
    pq.write_table(pa.table(columns), tmp_path / "small.parquet")
    got = prepare(deployment(tmp_path / "small.parquet"), out).dataset()
    assert got["input_ids"][0].tolist() == [1, 2] and got["loss_mask"][0].tolist() == [0, 1]
    assert got[0]["loss_mask"].dtype is torch.int64


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("spelling", ["role", "from"])
def test_conversations_are_rendered_by_the_models_template(tmp_path, out, tiny_tokenizer, column, spelling):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    talks = TALKS if spelling == "role" else [[{"from": names[m["role"]], "value": m["content"]} for m in talk] for talk in TALKS]
    got = prepare(deployment(jsonl(tmp_path / "talks.jsonl", [{column: talk} for talk in talks])), out).dataset()
    texts = ["<s>Be brief.<|User|>One?<|Assistant|>1, one.</s>", "<s><|User|>Two?<|Assistant|>2\n\n  two </s><|User|>Then?"]
    assert [tiny_tokenizer.decode(row["input_ids"]) for row in got] == texts
    assert [tiny_tokenizer.decode(row["input_ids"][row["loss_mask"] == 1]) for row in got] == ["1, one.</s>", "2\n\n  two </s>"]


def test_conversations_from_parquet(tmp_path, out, tiny_tokenizer):
    Dataset.from_list([{"messages": talk} for talk in TALKS]).to_parquet(tmp_path / "talks.parquet")
    got = prepare(deployment(tmp_path / "talks.parquet"), out).dataset()
    assert tiny_tokenizer.decode(got[0]["input_ids"]) == "<s>Be brief.<|User|>One?<|Assistant|>1, one.</s>"


def test_limit_takes_the_first_rows_and_looks_no_further(tmp_path, out):
    source = jsonl(tmp_path / "rows.jsonl", [*ROWS[:2], {"input_ids": [], "loss_mask": []}])
    prepared = prepare(deployment(source), out, limit=2)
    assert (prepared.rows, prepared.tokens, prepared.settings["limit"]) == (2, 7, 2)


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


# --- too long


def test_too_long_is_an_error_that_counts_them(rows, out):
    with pytest.raises(DataError) as error:
        prepare(deployment(rows), out, max_length=3)
    assert str(error.value) == (
        "DataError: 2 of 3 samples are too long, the first is sample 0 with 4 tokens, expected at most 3 tokens (max_length). "
        "Likely: conversations of another context length. Next: too_long skip (they keep their rows, without states) or "
        "too_long truncate (the first tokens are kept), or a larger max_length"
    )
    assert not out.exists() and [f.name for f in out.parent.iterdir()] == [".data.lock"]


def test_too_long_skipped_keeps_its_row(rows, out):
    prepared = prepare(deployment(rows), out, max_length=4, too_long="skip")
    assert (prepared.rows, prepared.skipped, prepared.truncated, prepared.tokens, prepared.masked_tokens) == (3, 1, 0, 7, 4)
    table = prepared.dataset()
    assert table["status"][:] == ["ok", "ok", "skipped: 6 tokens, max_length 4"]
    assert table[2]["input_ids"].tolist() == ROWS[2]["input_ids"]
    assert prepared.ok.tolist() == [True, True, False] and prepared.lengths[prepared.ok].sum() == prepared.tokens
    assert torch.load(out / "token_freq.pt", weights_only=True) == {7: 2, 8: 1, 10: 1}  # the skipped row is never trained on
    assert prepared.frame()["value"]["tokens a row, most"] == 4


def test_too_long_truncated_counts_what_lost_its_mask(rows, out):
    prepared = prepare(deployment(rows), out, max_length=4, too_long="truncate")
    assert (prepared.rows, prepared.skipped, prepared.truncated, prepared.unmasked, prepared.tokens) == (3, 0, 1, 1, 11)
    assert prepared.dataset()[2]["input_ids"].tolist() == [511, 0, 1, 2] and prepared.dataset()[2]["loss_mask"].tolist() == [0, 0, 0, 0]
    assert prepared.ok.all()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"too_long": "cut"}, "too_long 'cut'"), ({"max_length": 0}, "max_length 0"), ({"limit": -1}, "limit -1")],
)
def test_options_out_of_range(rows, out, options, words):
    with pytest.raises(ParamsError) as error:
        prepare(deployment(rows), out, **options)
    expected = "limit >= 0 (0: all)" if "limit" in options else "too_long error | skip | truncate, max_length >= 1"
    assert (error.value.got, error.value.expected) == (words, expected)


# --- samples that cannot be extracted

GOOD = {"input_ids": [5, 6], "loss_mask": [0, 1]}


@pytest.mark.parametrize(
    ("bad", "got", "expected"),
    [
        ({"input_ids": [], "loss_mask": []}, "sample 1: no tokens", "at least one token"),
        ({"input_ids": [1, 512], "loss_mask": [0, 1]}, "sample 1: id 512 at position 1", "0..511 (vocab_size 512)"),
        ({"input_ids": [-1, 5], "loss_mask": [0, 1]}, "sample 1: id -1 at position 0", "0..511 (vocab_size 512)"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "sample 1: loss_mask of 2 for 3 tokens", "one mark a token"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "sample 1: loss_mask with 2", "0 or 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1.0]}, "sample 1: loss_mask with 0.0", "0 or 1"),
        ({"input_ids": [1, 2], "loss_mask": None}, "sample 1: loss_mask of None for 2 tokens", "one mark a token"),
        ({"input_ids": [1.0, 2.0], "loss_mask": [0, 1]}, "sample 1: input_ids is [1.0, 2.0]", "a list of whole numbers"),
        ({"input_ids": [[1], [2, 3]], "loss_mask": [0, 1]}, "sample 1: input_ids is [[1], [2, 3]]", "a list of whole numbers"),
        ({"input_ids": [1, None], "loss_mask": [0, 1]}, "sample 1: input_ids is [1, None]", "a list of whole numbers"),
        ({"loss_mask": [0, 1]}, "sample 1: input_ids is None", "a list of whole numbers"),
    ],
)
def test_bad_samples_are_named(tmp_path, out, bad, got, expected):
    with pytest.raises(DataError) as error:
        prepare(deployment(jsonl(tmp_path / "rows.jsonl", [GOOD, bad])), out)
    assert (error.value.got, error.value.expected) == (got, expected)
    assert "mend the sample" in error.value.next and not out.exists()


def test_nulls_in_arrow_lists_are_found(tmp_path, out):
    Dataset.from_list([GOOD, {"input_ids": [1, None], "loss_mask": [0, 1]}]).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"sample 1: input_ids is \[1, None\]"):
        prepare(deployment(tmp_path / "rows.parquet"), out)


@pytest.mark.parametrize(
    ("talk", "got"),
    [
        ([], "sample 1 without messages"),
        (None, "sample 1 without messages"),
        ([{"role": "user", "content": None}], "sample 1, message 0 is {'role': 'user', 'content': None}"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "sample 1, message 1 is {'content': 'b'}"),
        ([{"from": "robot", "value": "b"}], "sample 1, message 0 has the role 'robot'"),
        ([{"role": "tool", "content": "b"}], "sample 1, message 0 has the role 'tool'"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}], "sample 1, message 0 has tool_calls"),
        ([{"role": "assistant", "content": "b", "weight": 0}], "sample 1, message 0 has weight"),
        (["hello"], "sample 1, message 0 is hello"),
    ],
)
def test_bad_conversations_are_named(tmp_path, out, talk, got):
    with pytest.raises(DataError) as error:
        prepare(deployment(jsonl(tmp_path / "talks.jsonl", [{"messages": TALKS[0]}, {"messages": talk}])), out)
    assert error.value.got == got


def test_an_answer_that_melts_into_its_prompt_is_refused(tmp_path, out):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\n\n  Hello"}]  # SmolLM2: "assistant\n" + "\n\n"
    with pytest.raises(DataError) as error:
        prepare(deployment(jsonl(tmp_path / "talks.jsonl", [{"messages": talk}]), model="demo:smollm2-fp32"), out)
    assert error.value.got == "sample 0, message 1: the ids up to this answer are not the beginning of the conversation's ids"
    assert "an answer that begins with blanks" in error.value.likely and "bring input_ids and loss_mask" in error.value.next


def test_a_template_that_forgets_earlier_turns_is_refused():
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(model_folder("tiny-deepseek"))
    tok.chat_template = "{{ messages[-1]['content'] }}{% if add_generation_prompt %}:{% endif %}"
    with pytest.raises(DataError, match="sample 40, message 1: the ids up to this answer"):
        list(tokenise(tok, [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]], 40))


def test_a_template_that_refuses_is_quoted():
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(model_folder("tiny-deepseek"))
    tok.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError) as error:
        list(tokenise(tok, TALKS[:1], 3))
    assert error.value.got == "sample 3: the chat template says roles must alternate"


def test_the_mask_ends_at_the_end_of_turn_token_or_covers_all(tiny_tokenizer):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    for answer, masked in (("{{ c }}</s>\n\n", "b c</s>"), ("{{ c }}\n", "b c\n"), ("<pad>{{ c }}!\n", "<pad>b c!\n")):
        tiny_tokenizer.chat_template = (
            "{% for m in messages %}{% set c = m['content'] %}{% if m['role'] == 'user' %}<|User|>{{ c }}{% else %}<|Assistant|>"
            + answer.replace("\n", "{{ '\\n' }}")
            + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
        )
        ((ids, mask),) = tokenise(tiny_tokenizer, [talk], 0)
        assert tiny_tokenizer.decode(np.array(ids)[mask == 1]) == masked


def test_a_model_without_a_chat_template(tmp_path, out):
    import shutil

    model = tmp_path / "model"
    shutil.copytree(model_folder("tiny-deepseek"), model, ignore=shutil.ignore_patterns("*.safetensors", "*.jinja"))
    source = jsonl(tmp_path / "talks.jsonl", [{"messages": TALKS[0]}])
    with pytest.raises(ModelError) as error:
        prepare(deployment(source, model=model), out)
    assert error.value.got == f"{model}: no chat template"
    assert prepare(deployment(jsonl(tmp_path / "rows.jsonl", ROWS), model=model), out).rows == 3  # ids need none


# --- sources that are not data


def test_sources_that_are_not_there_or_not_one(tmp_path, out, rows):
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "splits")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.csv").write_text("1,2")
    for name, got in (
        ("nothing.jsonl", f"data.source {tmp_path}/nothing.jsonl: no such data"),
        ("empty", f"data.source {tmp_path}/empty: no such data"),
        ("rows.csv", f"data.source {tmp_path}/rows.csv: no parquet or jsonl file"),
        (".", f"data.source {tmp_path}: both parquet and jsonl files"),
        ("splits", f"{tmp_path}/splits with the splits train"),
    ):
        with pytest.raises(DataError) as error:
            prepare(deployment(tmp_path / name), out)
        assert error.value.got == got
    assert error.value.next == f"set data.source to {tmp_path}/splits/train"


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ('{"input_ids": [1, 2', "rows.jsonl line 3: "),
        ("[1, 2]", "rows.jsonl line 3: [1, 2]"),
    ],
)
def test_bad_lines_are_named(tmp_path, out, line, got):
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(DataError) as error:
        prepare(deployment(tmp_path / "rows.jsonl"), out)
    assert error.value.got.startswith(got) and error.value.expected == "one JSON object a line"


@pytest.mark.parametrize(
    ("row", "has"),
    [
        ({"text": "a"}, "none of the columns"),
        ({"input_ids": [1, 2]}, "['input_ids']"),
        ({"input_ids": [1], "messages": TALKS[0]}, "['input_ids', 'messages']"),
    ],
)
def test_missing_columns_are_named(tmp_path, out, row, has):
    Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError) as error:
        prepare(deployment(tmp_path / "rows.parquet"), out)
    assert error.value.got == f"sample 0 with {has}"
    assert error.value.expected == "input_ids and loss_mask, or conversations or messages"


def test_no_samples(tmp_path, out):
    with pytest.raises(DataError, match="no samples, expected at least one"):
        prepare(deployment(jsonl(tmp_path / "rows.jsonl", [])), out)


# --- once, and only the same again


def test_the_second_call_does_no_work(rows, out, monkeypatch):
    first = prepare(deployment(rows), out)
    monkeypatch.setattr(samples.Sources, "read", lambda *args: pytest.fail("read again"))
    second = prepare(deployment(rows), out)
    assert second.reused and not first.reused
    assert {**second.as_dict(), "reused": False} == first.as_dict()
    rows.touch()  # another time of change, the same content
    assert prepare(deployment(rows), out).reused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": 256}, "max_length is now 256, expected 512, with which "),
        ({"too_long": "skip"}, "too_long is now 'skip', expected 'error', with which "),
        ({"limit": 2}, "limit is now 2, expected 0, with which "),
    ],
)
def test_other_settings_are_refused(rows, out, options, words):
    before = prepare(deployment(rows), out)
    with pytest.raises(DataError) as error:
        prepare(deployment(rows), out, **options)
    assert words + f"{out} was prepared" in str(error.value)
    assert load_prepared(out).fingerprint == before.fingerprint


def test_other_data_or_another_model_is_refused(rows, out):
    prepare(deployment(rows), out)
    jsonl(rows, ROWS[:2])
    with pytest.raises(
        DataError, match=r"source is now 'rows.jsonl: 1 jsonl file\(s\), 105 bytes, .*expected 'rows.jsonl: 1 jsonl file\(s\), "
    ):
        prepare(deployment(rows), out)
    jsonl(rows, ROWS)
    with pytest.raises(DataError, match=r"vocab_size is now 49152, expected 512, with which"):
        prepare(deployment(rows, model="demo:smollm2-fp32"), out)
    assert prepare(deployment(rows), out).reused


def test_another_number_of_demo_samples_is_refused(out):
    prepare(deployment(samples=3), out, max_length=2000)
    with pytest.raises(DataError, match=r"source is now 'demo: 4 samples of .*expected 'demo: 3 samples of "):
        prepare(deployment(samples=4), out, max_length=2000)


def test_other_peoples_folders_are_left_alone(rows, out):
    out.mkdir(parents=True)
    (out / "mine").write_text("")
    with pytest.raises(DataError) as error:
        prepare(deployment(rows), out)
    assert error.value.got == f"{out} without hsnb-data.json" and (out / "mine").exists()
    (out / "mine").unlink()
    assert prepare(deployment(rows), out).rows == 3  # an empty folder is no obstacle


def test_a_killed_call_leaves_nothing_in_the_way(rows, out):
    partial = out.with_name(".data.partial")
    partial.mkdir(parents=True)
    (partial / "half").write_text("")
    prepare(deployment(rows), out)
    assert sorted(f.name for f in out.parent.iterdir()) == [".data.lock", "data"] and not (out / "half").exists()


def test_shards_started_at_once_prepare_once(rows, out):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: prepare(deployment(rows), out), range(4)))
    assert sorted(prepared.reused for prepared in made) == [False, True, True, True]
    assert len({prepared.fingerprint for prepared in made}) == 1


def test_what_is_no_prepared_data_set(rows, out):
    with pytest.raises(DataError) as error:
        load_prepared(out)
    assert error.value.got == f"{out} without hsnb-data.json" and error.value.next == "hsnb prepare"
    prepare(deployment(rows), out)
    about = json.loads((out / "hsnb-data.json").read_text())
    (out / "hsnb-data.json").write_text(json.dumps({**about, "format": 1}))
    with pytest.raises(DataError, match=r"hsnb-data.json of format 1, expected format 2"):
        load_prepared(out)
    (out / "hsnb-data.json").write_text('{"format"')
    with pytest.raises(DataError, match="expected what hsnb wrote"):
        load_prepared(out)


def test_the_fingerprint_changes_with_ids_masks_and_edges(tmp_path):
    same_tokens = [
        [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}],
        [{"input_ids": [5, 6, 8], "loss_mask": [0, 1, 1]}],
        [{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}],
        [{"input_ids": [5, 6], "loss_mask": [0, 1]}, {"input_ids": [7], "loss_mask": [1]}],
    ]
    prints = {
        prepare(deployment(jsonl(tmp_path / f"{n}.jsonl", own)), tmp_path / f"out{n}").fingerprint for n, own in enumerate(same_tokens)
    }
    assert len(prints) == 4


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


# --- the order of sending


def test_batches_hold_like_lengths_and_keep_to_the_budget():
    lengths = torch.randint(1, 500, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = send_batches(lengths, 2048)
    assert sorted(at for batch in batches for at in batch) == list(range(1000))  # each once
    assert all(sum(lengths[at] for at in batch) <= 2048 for batch in batches)
    assert sum(sum(lengths[at] for at in batch) for batch in batches[:-1]) > 0.8 * 2048 * (len(batches) - 1)  # and well filled
    spans = [(lengths[batch[0]], lengths[batch[-1]]) for batch in batches]
    assert all(first >= last for first, last in spans) and all(a[1] >= b[0] for a, b in pairwise(spans))
    assert send_order(lengths, 2048) == [at for batch in batches for at in batch]


def test_a_sample_over_the_budget_goes_alone_and_equal_lengths_keep_their_order():
    assert send_batches([3, 9, 3, 3, 2], 6) == [[1], [0, 2], [3, 4]]
    assert send_order([4, 4, 4], 100) == [0, 1, 2] and send_order([], 5) == []
    with pytest.raises(ParamsError, match="a budget of 0 tokens"):
        send_order([1], 0)


# --- shards


def test_shards_are_strided_and_whole():
    shards = [shard_rows(2048, shard, 16) for shard in range(16)]
    assert [len(shard) for shard in shards] == [128] * 16
    assert list(shards[4][:3]) == [4, 20, 36]
    assert sorted(row for shard in shards for row in shard) == list(range(2048))
    assert [len(shard_rows(5, shard, 3)) for shard in range(3)] == [2, 2, 1]
    assert list(shard_rows(2, 3, 4)) == []


@pytest.mark.parametrize("shard", [99, 16, -1])
def test_a_shard_that_is_not_there(shard):
    with pytest.raises(ParamsError) as error:
        shard_rows(2048, shard, 16)
    assert str(error.value).startswith(f"ParamsError: shard {shard}, expected 0..15 (16 shards). Likely: shards are counted from 0.")
    with pytest.raises(ParamsError, match="num_shards 0, expected at least 1"):
        shard_rows(2048, 0, 0)


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_table_that_was_damaged_since_is_not_reused(how, tmp_path):
    rows, out = jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "data"
    prepare(deployment(rows), out)
    (table,) = out.glob("*.arrow")
    if how == "cut":
        table.write_bytes(table.read_bytes()[:100])
    else:
        table.unlink()
    with pytest.raises(DataError, match=r"expected 3 rows, as it was prepared"):
        prepare(deployment(rows), out)
