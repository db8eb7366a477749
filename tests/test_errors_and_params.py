"""Errors have four parts; a params file says what it must and nothing unknown."""

import pickle

import pytest
import yaml

from hsnb.errors import DumpError, ParamsError
from hsnb.params import Deployment
from hsnb.paths import make_private, project_root, run_dir

GOOD = {"name": "x", "model": "models/x", "capture": {"boundaries": [2, 4]}}


def test_an_error_says_four_things_and_survives_pickling():
    error = DumpError(got="hidden is bf16[2047,7168]", expected="bf16[2048,7168]", likely="a chunk is missing", next="hsnb verify")
    words = "DumpError: hidden is bf16[2047,7168], expected bf16[2048,7168]. Likely: a chunk is missing. Next: hsnb verify"
    assert str(error) == words
    assert str(pickle.loads(pickle.dumps(error))) == words
    assert error.as_dict() == {
        "got": "hidden is bf16[2047,7168]",
        "expected": "bf16[2048,7168]",
        "likely": "a chunk is missing",
        "next": "hsnb verify",
    }


def test_defaults():
    deployment = Deployment.parse(GOOD, origin="test")
    assert (deployment.capture.final, deployment.capture.format, deployment.server.port, deployment.server.host) == (
        "pre",
        "safetensors",
        0,
        "127.0.0.1",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"modle": "x"}, r"unknown name modle, expected one of: name, model, shape, server, capture, data"),
        ({"capture": {"boundries": [2]}}, r"capture.boundaries"),
        ({"capture": {"boundaries": [2], "finl": "pre"}}, r"unknown name capture.finl, expected one of: boundaries, final, format"),
        ({"capture": {"boundaries": []}}, r"capture.boundaries is \[\]"),
        ({"capture": {"boundaries": [2], "final": "after"}}, r"capture.final is 'after'"),
        ({"server": {"tp": 8}}, r"unknown name server.tp, expected one of: device, host, port, tp_size"),
        ({"server": {"port": 99999}}, r"server.port is 99999"),
        ({"data": {"source": []}}, r"data.source is \[\], expected demo, a path, or a list of paths"),
        ({"data": {"source": 5}}, r"data.source is 5, expected demo, a path, or a list of paths"),
        ({"data": {"source": ["a", 5]}}, r"data.source is \['a', 5\], expected demo"),
        ({"data": {"seed": -1}}, r"data.seed is -1"),
        ({"extract": {"floor": 1}}, r"unknown name extract.floor, expected one of: attempts, restarts"),
        ({"shape": {"num_layers": 61}}, r"shape.hidden_size"),
    ],
)
def test_a_slip_in_a_params_file_is_named(change, words, tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({**GOOD, **change}))
    with pytest.raises(ParamsError, match=words):
        Deployment.load(file)


@pytest.mark.parametrize(("text", "words"), [("", "a NoneType"), ("- 1", "a list"), ("a: [", "expected YAML")])
def test_what_is_no_params_file(text, words, tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ParamsError, match=words):
        Deployment.load(file)


def test_a_missing_params_file_names_those_there_are():
    with pytest.raises(ParamsError, match=r"choose one of: .*demo\.yaml"):
        Deployment.load("params/dmeo.yaml")


@pytest.mark.parametrize("run", ["", "..", "../x", "a/b", ".hidden"])
def test_a_run_is_a_plain_name(run):
    with pytest.raises(ParamsError, match="a plain folder name below outputs/"):
        run_dir(run)


def test_outputs_that_cannot_be_made_are_named(tmp_path, monkeypatch):
    for name in ("notebooks", "params"):
        (tmp_path / name).mkdir()
    (tmp_path / "outputs").write_text("a file in its place")
    monkeypatch.setenv("HSNB_ROOT", str(tmp_path))
    with pytest.raises(ParamsError, match=r"outputs/x: Not a directory, expected a folder that can be made"):
        run_dir("x")


def test_a_params_file_may_be_named(monkeypatch):
    monkeypatch.chdir(project_root() / "notebooks")
    assert Deployment.load("demo").name == Deployment.load("demo.yaml").name == Deployment.load("params/demo.yaml").name == "demo"


def test_the_root_is_found_from_below(monkeypatch):
    root = project_root()
    monkeypatch.chdir(root / "notebooks")
    assert project_root() == root


def test_a_spool_is_private_and_no_link(tmp_path):
    folder = make_private(tmp_path / "spool")
    assert folder.stat().st_mode & 0o777 == 0o700
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(Exception, match="not a plain folder"):
        make_private(link)
