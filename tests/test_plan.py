"""A plan says how large a run is, to the digit, and refuses it before anything starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from hsnb import cli, figures
from hsnb.data import prepare
from hsnb.errors import BoundaryError, DataError, ModelError, ParamsError
from hsnb.limits import Limits
from hsnb.measure import Measured, pick
from hsnb.params import Deployment
from hsnb.paths import project_root
from hsnb.planning import plan
from hsnb.sizes import bytes_per_token
from tests.test_data import ROWS, jsonl

KIMI = project_root() / "params" / "kimi-k2.5-tp8.yaml"
Usage = namedtuple("Usage", "total used free")


def tiny(source: str | Path = "demo", shape: dict | None = None, model: str = "demo:tiny-deepseek", **server) -> Deployment:
    tree = {"name": "t", "model": model, "server": {"device": "cpu", **server}, "capture": {"boundaries": [2, 4, 6]}, "shape": shape}
    return Deployment.parse({**tree, "data": {"source": str(source)}, "extract": {"output_floor": 0, "spool_floor": 0}}, origin="test")


@pytest.fixture
def disk(monkeypatch):
    """Let every file system have `free` bytes free: disk(free)."""

    def of(free: int, shm: int | None = None) -> None:
        room = lambda path: Usage(10 * free, 0, shm if shm is not None and Path(path).is_relative_to("/dev/shm") else free)  # noqa: E731
        monkeypatch.setattr("hsnb.planning.shutil.disk_usage", room)

    return of


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    for name in ("notebooks", "outputs"):
        (tmp_path / "clone" / name).mkdir(parents=True)
    shutil.copytree(project_root() / "params", tmp_path / "clone" / "params")
    monkeypatch.setenv("HSNB_ROOT", str(tmp_path / "clone"))
    return tmp_path / "clone"


# --- without the model


def test_kimi_is_planned_without_its_checkpoint(tmp_path, disk):
    disk(2_000_000_000_000)
    made = plan(Deployment.load(KIMI), tmp_path / "data", tokens=17_300_000, hours=72)
    assert made.ok and made.require() is made
    assert (made.bytes, made.bytes_per_token, made.columns) == (992_051_200_000, 57_344, 4)
    text = made.text()
    for words in (
        "992 GB (923.9 GiB)",
        "4 vectors x 7168 x 2 bytes",
        "62.0 GB (57.7 GiB)",
        "0.57 GB/s",
        "B_3, B_31, B_59",
        "262,137 tokens",
    ):
        assert words in text
    assert sum(shard["tokens"] for shard in made.as_dict()["shards"]) == 17_300_000
    assert made.output.need == 17_300_000 * (57_344 + 8)
    larger = plan(Deployment.load(KIMI), tmp_path / "data", tokens=87_800_000, hours=72)
    assert round(larger.as_dict()["tokens_per_s_needed"]) == 339 and "5.03 TB (4.58 TiB)" in larger.text()


def test_the_command_prints_it_and_refuses_a_folder_too_small(project, capsys, disk):
    disk(100_000_000_000)
    assert cli.main(["plan", "params/kimi-k2.5-tp8.yaml", "--tokens", "17300000", "--run", "big"]) == 1
    out = capsys.readouterr().out
    assert "992 GB (923.9 GiB)" in out
    last = out.splitlines()[-1]
    assert last.startswith(
        f"ExtractError: 100 GB (93.1 GiB) free at {project}/outputs/big/data, of which 50.0 GB (46.6 GiB) are to stay free"
    )
    assert (
        "expected room for 992 GB (924.0 GiB)" in last
        and "Likely: a disk for some of the 16 shards" in last
        and "Next: link outputs/" in last
    )
    assert not list((project / "outputs").iterdir())  # nothing was started, and nothing made
    disk(1_100_000_000_000)
    assert cli.main(["plan", "params/kimi-k2.5-tp8.yaml", "--tokens", "17.3e6", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["ok"], tree["bytes"], tree["size"], tree["refusals"]) == (True, 992_051_200_000, "992 GB (923.9 GiB)", [])


def test_the_command_as_typed_on_this_machine():
    command = [str(Path(sys.executable).with_name("hsnb")), "plan", "params/kimi-k2.5-tp8.yaml", "--tokens", "17300000000"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=project_root())
    assert done.returncode == 1 and "992 TB (902.27 TiB)" in done.stdout  # no disk here has so much
    assert done.stdout.count("ExtractError: ") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("given", ["0", "-3", "1.5", "many", "nan", "1e30"])
def test_a_number_of_tokens_is_a_number(given, capsys):
    assert cli.main(["plan", f"--tokens={given}"]) == 2
    assert f"{given!r} is no whole number of 1 or more" in capsys.readouterr().err


def test_without_the_model_and_without_a_shape_it_says_what_is_missing(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json.*expected a model folder with a config\.json"):
        plan(tiny(model=str(tmp_path)), tmp_path / "data", tokens=5)


def test_a_shape_that_is_not_the_models_is_refused(tmp_path):
    with pytest.raises(ParamsError, match=r"shape.hidden_size is 7168, expected 64, as in demo:tiny-deepseek/config.json"):
        plan(tiny(shape={"num_layers": 8, "hidden_size": 7168}), tmp_path / "data", tokens=5)
    with pytest.raises(BoundaryError, match=r"boundaries \[2, 4, 6\], expected at least one, each in 0..5"):
        plan(tiny(model=str(tmp_path), shape={"num_layers": 5, "hidden_size": 64}), tmp_path / "data", tokens=5)


def test_ids_are_read_through_without_the_model(tmp_path, disk):
    disk(10**9)
    source = jsonl(tmp_path / "rows.jsonl", ROWS)
    made = plan(tiny(source, model=str(tmp_path), shape={"num_layers": 61, "hidden_size": 7168}), tmp_path / "data", num_shards=2)
    assert (made.tokens, made.samples, made.longest, made.masked_tokens) == (13, 3, 6, 6)
    assert made.shard_tokens == (10, 3) and made.bytes == 13 * 57_344
    small = {"num_layers": 61, "hidden_size": 7168, "vocab_size": 500}
    with pytest.raises(DataError, match="sample 2: id 511 at position 0"):
        plan(tiny(source, model=str(tmp_path), shape=small), tmp_path / "data")


# --- with data


def test_a_plan_of_the_source_is_that_of_the_prepared_data(tmp_path, disk):
    disk(10**9)
    deployment, out = tiny(jsonl(tmp_path / "rows.jsonl", ROWS)), tmp_path / "data"
    read = plan(deployment, out, max_length=4, too_long="skip", num_shards=2)
    assert not out.exists()
    prepare(deployment, out, max_length=4, too_long="skip")
    prepared = plan(deployment, out, num_shards=2)
    assert read.source == f"read through: {tmp_path}/rows.jsonl" and prepared.source == f"prepared: {out} (max_length 4, too_long skip)"
    for name in ("tokens", "samples", "shard_tokens", "too_long", "skipped", "longest", "masked_tokens", "bytes", "max_length"):
        assert getattr(read, name) == getattr(prepared, name), name
    assert (read.samples, read.tokens, read.skipped, read.shard_tokens) == (2, 7, 1, (4, 3))
    assert {what: note for what, _, note in read.rows()}["too long"] == "1 skipped"


def test_too_long_samples_are_counted_and_refused(tmp_path, disk):
    disk(10**9)
    made = plan(tiny(jsonl(tmp_path / "rows.jsonl", ROWS)), tmp_path / "data", max_length=3)
    assert [refusal.got for refusal in made.refusals] == ["2 of 3 samples are too long, the first is sample 0 with 4 tokens"]
    assert (made.ok, made.too_long, made.samples) == (False, 2, 1)
    with pytest.raises(DataError, match="2 of 3 samples are too long"):
        made.require()


def test_a_server_with_less_room_than_the_data_were_prepared_for_is_refused(tmp_path, disk):
    disk(10**9)
    deployment, out = tiny(jsonl(tmp_path / "rows.jsonl", ROWS)), tmp_path / "data"
    prepare(deployment, out)
    made = plan(deployment, out, limits=Limits(4096, 12))
    assert [refusal.got for refusal in made.refusals] == [
        f"1 rows of {out} are longer than the server takes, the first is row 2 with 6 tokens"
    ]
    assert made.refusals[0].expected == "at most 5 (context_length 4096, max_total_num_tokens 12)"
    assert plan(deployment, out, limits=Limits(4096, 13)).ok


def test_masks_are_flagged(tmp_path, disk):
    disk(10**9)
    rows = [{"input_ids": [5, 6], "loss_mask": mask} for mask in ([0, 0], [1, 1], [0, 1])]
    made = plan(tiny(jsonl(tmp_path / "rows.jsonl", rows)), tmp_path / "data")
    seen = {what: (value, note) for what, value, note in made.rows()}
    assert seen["mask of nothing but 0"] == ("1 samples", "CHECK: they train nothing")
    assert seen["mask of nothing but 1"] == ("1 samples", "CHECK: the prompt is trained too")
    assert made.ok and seen["tokens trained"] == ("3", "50% of the tokens")
    none = plan(tiny(jsonl(tmp_path / "none.jsonl", rows[:1])), tmp_path / "data")
    assert [refusal.got for refusal in none.refusals] == ["no trained token in 1 samples: every loss_mask is 0"]


def test_a_spool_that_does_not_take_the_longest_sample_is_refused(tmp_path, disk):
    need = 6 * (bytes_per_token(4, 64, 4) + 8)  # float32 in the engine, and ids
    deployment = tiny(jsonl(tmp_path / "rows.jsonl", ROWS), dtype="float32")
    disk(10**9, shm=need - 1)
    made = plan(deployment, tmp_path / "data")
    assert [type(refusal).__name__ for refusal in made.refusals] == ["ServerError"]
    assert made.refusals[0].expected == "room for one sample of 6 tokens: 6.19 kB (6.0 KiB)"
    disk(10**9, shm=need)
    assert plan(deployment, tmp_path / "data").ok


def test_what_is_written_already_is_not_needed_again(tmp_path, disk):
    deployment, out = tiny(jsonl(tmp_path / "rows.jsonl", ROWS)), tmp_path / "data"
    prepare(deployment, out)
    whole = plan(deployment, out).output.need
    assert whole == 13 * (4 * 64 * 2 + 8) + 3 * 4096
    (out / "hidden_states").mkdir()
    (out / "hidden_states" / "hs_0.safetensors").write_bytes(b"x" * 5000)
    disk(whole - 5000)
    assert plan(deployment, out).ok and plan(deployment, out).output.need == whole - 5000
    disk(whole - 5001)
    assert not plan(deployment, out).ok
    assert plan(deployment, out, tokens=13).written == 0


def test_a_plan_shows_itself(tmp_path, disk):
    disk(100)
    made = plan(tiny(jsonl(tmp_path / "rows.jsonl", ROWS)), tmp_path / "data")
    html = made._repr_html_()
    assert "<td>4 vectors x 64 x 2 bytes</td>" in html and "<b>ExtractError: 100 B (100 B) free" in html
    assert made.frame().set_index("quantity").loc["tokens", "value"] == "13"
    ax = made.plot()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("tokens a sample", "samples")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["all (n = 3, 13 tokens)", "max_length 512"]
    with pytest.raises(DataError, match="a plan of a number of tokens, expected samples"):
        plan(tiny(), tmp_path / "data", tokens=5).plot()


def test_the_histogram_shows_where_the_server_stops():
    labels = [t.get_text() for t in figures.lengths([3, 40], max_length=8192, server_takes=4089).get_legend().get_texts()]
    assert labels == ["all (n = 2, 43 tokens)", "max_length 8,192", "the server takes 4,089"]


# --- prepare and report


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("boundaries: [2, 99, 27]", "boundaries [2, 99, 27], expected at least one, each in 0..30"),
        ("final: post", "final is 'post', expected pre for the speculators layout"),
        ("flags: {enable-hierarchical-cache: true}", "server.flags has enable-hierarchical-cache: True"),
        ("flags: {tp-size: 2}", "server.tp_size, which hsnb turns into --tp-size"),
        ("flags: {no-such-flag: 1}", "server.flags has no-such-flag"),
    ],
)
def test_prepare_refuses_what_no_start_would_accept(project, capsys, change, words):
    name = change.split(":")[0]
    text = (project / "params" / "demo.yaml").read_text()
    lines = [line[: len(line) - len(line.lstrip())] + change if line.strip().startswith(f"{name}:") else line for line in text.splitlines()]
    (project / "params" / "bad.yaml").write_text("\n".join(lines))
    for command in ("prepare", "plan"):
        assert cli.main([command, "params/bad.yaml", "--run", "refused"]) == 2
        assert words in capsys.readouterr().err
    assert not (project / "outputs" / "refused").exists()


def test_prepare_needs_the_model_itself(project, capsys):
    assert cli.main(["prepare", "params/kimi-k2.5-tp8.yaml", "--run", "refused"]) == 2
    assert "/models/Kimi-K2.5/config.json: [Errno 2] No such file" in capsys.readouterr().err
    assert not (project / "outputs" / "refused").exists()


def test_a_refused_prepare_is_no_run(project, capsys):
    jsonl(project / "rows.jsonl", [{"input_ids": [1], "loss_mask": [0]}])
    text = (project / "params" / "demo.yaml").read_text()
    (project / "params" / "own.yaml").write_text(text.replace("source: demo ", f"source: {project}/rows.jsonl "))
    assert cli.main(["prepare", "params/own.yaml", "--run", "mine"]) == 2
    assert "no trained token in 1 samples" in capsys.readouterr().err
    assert [f.name for f in (project / "outputs" / "mine").iterdir()] == [".data.lock"]
    assert cli.main(["report", "mine"]) == 2
    assert "no run 'mine'" in capsys.readouterr().err


def test_prepare_says_what_the_masks_are(project, capsys):
    jsonl(project / "rows.jsonl", [{"input_ids": [1, 2], "loss_mask": mask} for mask in ([0, 0], [1, 1], [1, 1])])
    text = (project / "params" / "demo.yaml").read_text()
    (project / "params" / "own.yaml").write_text(text.replace("source: demo ", f"source: {project}/rows.jsonl "))
    assert cli.main(["prepare", "params/own.yaml", "--run", "mine"]) == 0
    assert "1 without a trained token; 2 with nothing but trained tokens" in capsys.readouterr().out
    assert cli.main(["prepare", "params/own.yaml", "--run", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["all_masked"] == 2


# --- the measured rate


def test_a_measured_rate_is_projected():
    measured = Measured(samples=32, tokens=3200, seconds=4.0, bytes=3200 * 520, url="http://x")
    assert (measured.tokens_per_s, measured.eta_s(80_000), measured.projected(80_000)) == (800.0, 100.0, 41_600_000)
    rows = {what: (value, note) for what, value, note in measured.rows(80_000, 80_000 * 512)}
    assert rows["at this rate"][0] == "1 min 40 s" and rows["files, projected"] == ("41.6 MB (39.7 MiB)", "+1.56% against the states alone")


def test_samples_of_every_length_are_measured(tmp_path):
    rows = [{"input_ids": [5] * n, "loss_mask": [1] * n} for n in [*range(1, 101), 400]]
    data = prepare(tiny(jsonl(tmp_path / "rows.jsonl", rows)), tmp_path / "data", max_length=200, too_long="skip")
    picked = pick(data, 32)
    assert len(picked) == len(set(picked.tolist())) == 32 and data.ok[picked].all()
    assert (data.lengths[picked].min(), data.lengths[picked].max()) == (1, 100)
    assert pick(data, 500).tolist() == list(range(100))
