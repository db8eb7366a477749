"""The shape of the project: what is light stays light, what is pinned agrees, what is committed is clean."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

from hsnb.notebook import check_cell

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAME = re.compile(r"[-_.]+")


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in listed.stdout.splitlines()]


def pins(file: str) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements" / file).read_text().splitlines()]
    return {NAME.sub("-", name).lower(): version for name, version in (line.split("==") for line in lines if line)}


def test_importing_hsnb_imports_neither_torch_nor_an_engine():
    code = "import sys, hsnb; print(len(hsnb.__all__), sorted({'torch', 'sglang', 'vllm', 'papermill', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, heavy = done.stdout.strip().split(" ", 1)
    assert int(count) <= 10
    assert heavy == "[]"


def test_the_names_that_hsnb_exports_are_there():
    import hsnb

    for name in hsnb.__all__:
        assert getattr(hsnb, name) is not None


def test_the_plug_in_leaves_no_trace_without_its_variable():
    code = "import sys, hsnb.patch; hsnb.patch.register(); print([m for m in sys.modules if m.startswith(('hsnb', 'torch'))])"
    env = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip().replace("'hsnb_cpu_shims', ", "") == "['hsnb', 'hsnb.patch']"


def test_no_distribution_of_hsnb_ships_sgl_kernel():
    assert not list((ROOT / "hsnb").rglob("*sgl_kernel*"))
    assert (ROOT / "cpu_shims" / "src" / "sgl_kernel" / "__init__.py").is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "hsnb").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_stay_small(path):
    assert len(path.read_text().splitlines()) <= 300


def test_every_pin_is_exact_and_no_two_differ():
    """vLLM's and the trainers' environments are others than SGLang's, because they cannot agree; torch-cpu.txt serves all."""
    seen: dict[str, str] = {}
    apart = ("vllm-cpu.txt", "vllm-cuda.txt", "trainers-cpu.txt")
    for file in sorted(p for p in (ROOT / "requirements").glob("*.txt") if p.name not in apart):
        for name, version in pins(file.name).items():
            assert seen.setdefault(name, version) == version, f"{name} in {file.name}"
    assert len(seen) > 150
    assert {"speculators", "specforge", "datasets"} <= set(pins("trainers-cpu.txt"))


def test_vllm_is_pinned_whole_without_what_breaks_it():
    cpu = pins("vllm-cpu.txt")
    assert len(cpu) > 140 and {"torch", "torchvision", "torchaudio", "torchcodec", "hsnb"} & set(cpu) == set()
    assert cpu["vllm-cpu"].rsplit(".", 1)[0] == pins("vllm-cuda.txt")["vllm"].rsplit(".", 1)[0]


def test_what_hsnb_imports_is_pinned():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {NAME.sub("-", re.match(r"[A-Za-z0-9_.-]+", d).group()).lower() for d in project["dependencies"]}
    have = set(pins("sglang-cpu.txt")) | set(pins("torch-cpu.txt")) | set(pins("notebooks.txt"))
    assert wanted - have == set()


def test_environment_yml_parses_and_agrees_with_the_pins():
    tree = yaml.safe_load((ROOT / "environment.yml").read_text())
    (block,) = [d["pip"] for d in tree["dependencies"] if isinstance(d, dict)]
    files = [line.removeprefix("-r ") for line in block]
    assert files == ["requirements/sglang-cuda.txt", "requirements/notebooks.txt"]
    assert all((ROOT / f).is_file() for f in files)
    assert pins("sglang-cuda.txt")["sglang"] == pins("sglang-cpu.txt")["sglang"]


def test_the_installed_environment_is_the_pinned_one():
    from importlib.metadata import PackageNotFoundError, version

    for file in ("sglang-cpu.txt", "notebooks.txt", "dev.txt", "demo.txt"):
        for name, pin in pins(file).items():
            try:
                assert version(name).split("+")[0] == pin, name
            except PackageNotFoundError:
                pytest.fail(f"{name} of requirements/{file} is not installed: make setup")


# -- notebooks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_committed_clean_and_short(path):
    nb = nbformat.read(path, 4)
    nbformat.validate(nb)
    check_cell(nb, path.stem)
    assert "papermill" not in nb.metadata
    for cell in nb.cells:
        assert "papermill" not in cell.metadata
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            assert len(cell.source.splitlines()) <= (20 if "parameters" in cell.metadata.get("tags", []) else 10), cell.source
            assert not re.search(r"^\s*(async\s+)?def |^\s*class |^[!%]", cell.source, re.MULTILINE), cell.source
    assert (nb.cells[0].source.startswith("# ") and "?" in nb.cells[0].source) or path.stem == "03_extract"
    assert any(c.source.startswith("## Verdict") for c in nb.cells)


def test_the_notebooks_of_this_version_are_there():
    assert [p.stem for p in NOTEBOOKS] == ["00_server", "01_probe", "02_divergence", "03_extract", "04_handoff"]


def test_no_states_and_no_outputs_are_committed():
    names = [p.relative_to(ROOT).as_posix() for p in tracked()]
    assert [n for n in names if n.endswith((".safetensors", ".pt", ".ckpt", ".arrow", ".sqlite", ".bin", ".gguf", ".html"))] == []
    assert [n for n in names if n.startswith("outputs/")] == ["outputs/.gitkeep"]
    assert all(p.stat().st_size < 500_000 for p in tracked() if p.is_file())
