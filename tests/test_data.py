"""Prepared data: the masks are the answers, nothing is dropped in silence, and every refusal says what, where and what next."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, load_from_disk

from hsnb import samples
from hsnb.chat import tokenise
from hsnb.data import load_prepared, prepare, shard_rows
from hsnb.demo import model_folder
from hsnb.demo.stdlib_docs import conversations
from hsnb.errors import DataError, ModelError, ParamsError
from hsnb.params import Deployment

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
    assert f"<td>{prepared.tokens:,}</td>" in prepared._repr_html_()
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
