"""docs/errors.md against the code that it is made of, and docs/dump-format.md against what the writers write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import torch

from benchmarks import render_errors
from benchmarks.screenshots import EXPLORERS
from hsnb import errors
from hsnb.dumps import open_dump
from hsnb.patch.spool import LAYOUTS, bits
from hsnb.trainers import layout
from hsnb.trainers.layout import Row

DOCS = Path(__file__).resolve().parents[1] / "docs"
META = {
    "hsnb_format": "1", "boundaries": "[2, 4, 6]", "final": "pre", "dtype": "bfloat16", "model": "m", "sglang_version": "0.5.23",
    "patch_version": "0.1.0", "tp_rank": "0", "tp_size": "1",
}  # fmt: skip


def test_the_page_of_errors_is_what_the_code_says():
    assert render_errors.PAGE.read_text() == render_errors.render(), "run `python -m benchmarks.render_errors`"


def test_every_error_class_has_its_section_and_its_places():
    known = render_errors.classes()
    ours = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.HsnbError)}
    assert set(known) >= ours - {"HsnbError"}
    assert known["DiskFull"][0] == "ExtractError"
    page = render_errors.render()
    assert all(f"\n## {name}\n" in page for name in known)
    assert "| boundaries {given} | each boundary once |" in page
    found = render_errors.sites(set(known))
    assert {site.name for site in found} == set(known)


def test_every_picture_of_the_pages_is_there_and_is_shown():
    shown = dict(re.findall(r"!\[[^\]]{20,}\]\((figures/pages/(.+?)\.png)\)", (DOCS / "pages.md").read_text()))
    notebooks = {path.stem for path in (DOCS.parent / "notebooks").glob("*.ipynb")}
    assert set(shown.values()) == notebooks | set(EXPLORERS) | {"index", "shards", "failed", "health"}
    assert {path.relative_to(DOCS).as_posix() for path in (DOCS / "figures" / "pages").iterdir()} == set(shown)


def schema(title: str) -> dict:
    blocks = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", (DOCS / "dump-format.md").read_text(), re.S)]
    (found,) = [block for block in blocks if block["title"].startswith(title)]
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def header(file: Path) -> dict:
    with open(file, "rb") as opened:
        return json.loads(opened.read(int.from_bytes(opened.read(8), "little")))


def written(kind: str, spool: Path, chunks=((0, 3), (3, 5))) -> Path:
    request = LAYOUTS[kind]("hsnb-a/../b", 5, "data", 4, 8, "bfloat16", META)
    request.begin(spool)
    for start, end in chunks:
        request.put(start, bits(torch.randn(end - start, 4, 8).bfloat16()), torch.arange(start, end).numpy())
    request.publish(spool)
    (path,) = [p for p in spool.iterdir() if not p.name.startswith(".")]
    return path


def test_the_schema_of_the_safetensors_dump_is_the_writers(tmp_path):
    tree = header(written("safetensors", tmp_path))
    jsonschema.validate(tree, schema("the header of a dump"))
    for change in ({"boundaries": "2, 4, 6"}, {"final": "after"}, {"layer_ids": "[2, 4, 6]"}, {"kind": "probe"}):
        wrong = {**tree, "__metadata__": {**tree["__metadata__"], **change}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema("the header of a dump"))


def test_the_schema_of_the_pt_dump_is_the_writers(tmp_path):
    path = written("pt", tmp_path)
    tree = json.loads((path / "metadata.json").read_text())
    jsonschema.validate(tree, schema("metadata.json of a dump"))
    assert path.name == "req_0"
    assert sorted(p.name for p in path.iterdir()) == ["aux_0.pt", "aux_1.pt", "aux_2.pt", "final.pt", "metadata.json"]
    assert (tmp_path / ".next").read_text() == "1"
    with pytest.raises(jsonschema.ValidationError, match="'token_ids' is a required property"):
        jsonschema.validate({k: v for k, v in tree.items() if k != "token_ids"}, schema("metadata.json of a dump"))


def test_the_schema_of_a_published_sample_is_the_layouts(tmp_path):
    dump = open_dump(written("safetensors", tmp_path))
    meta = {k: META[k] for k in ("model", "sglang_version", "patch_version")} | {"request_id": "row-7"}
    row = Row(7, dump.token_ids, None, dump.states(), dump.boundaries, dump.final, "m", meta)
    layout("speculators").save(tmp_path / "hs_7.safetensors", row)
    tree = header(tmp_path / "hs_7.safetensors")
    jsonschema.validate(tree["__metadata__"], schema("__metadata__ of a published sample"))
    assert tree["hidden_states"]["shape"] == [5, 4, 8]
