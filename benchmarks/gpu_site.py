"""Make hsnb findable on a machine where nothing can be installed: packages unpacked into one folder, on PYTHONPATH.

SGLang finds plug-ins by the entry points of installed distributions, so a folder `hsnb-VERSION.dist-info` beside the package
is all that an installation would add. Only the standard library is imported here: pydantic and the rest lie in that folder.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def prepare(site: Path) -> Path:
    """Link hsnb into `site` and write its dist-info; return the dist-info. What an earlier call left is replaced."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    site.mkdir(parents=True, exist_ok=True)
    package = site / project["name"]
    if package.is_symlink():
        package.unlink()
    elif package.exists():
        shutil.rmtree(package)
    package.symlink_to(ROOT / project["name"], target_is_directory=True)
    for old in site.glob(f"{project['name']}-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return info


def environment(site: Path) -> dict[str, str]:
    """Return this process's environment with `site` in front of PYTHONPATH."""
    rest = os.environ.get("PYTHONPATH", "")
    folders = [str(site), *(p for p in rest.split(os.pathsep) if p and p != str(site))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
