"""Folders that no trainer reads as they are: a spool of ours, vLLM's connector files, and the first deployment's req_N folders."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hsnb.dumps import UNKNOWN, Dump, list_dumps, open_dump
from hsnb.dumps.dump import NO_FINAL, unreadable
from hsnb.trainers.folder import FileFolder, TrainingSample

_OURS = re.compile(r"[0-9a-f]{32}\.safetensors")
_REQ = re.compile(r"req_\d+")


class _DumpFolder(FileFolder):
    """One dump a sample; what a dump says of itself must be what the first one says."""

    def list_files(self) -> list[str]:
        return [p.name for p in list_dumps(self.path) if self.takes(p.name)]

    @staticmethod
    def takes(name: str) -> bool:
        raise NotImplementedError

    @classmethod
    def is_here(cls, path: Path, names: set[str]) -> bool:
        return any(cls.takes(n) for n in names)

    @cached_property
    def _first(self) -> Dump | None:
        return open_dump(self.path / self.files[0]) if self.files else None

    def claim(self) -> dict[str, Any]:
        first = self._first
        if first is None or first.boundaries == UNKNOWN:
            return {}
        return {"boundaries": first.boundaries, "final": first.final, "hidden_size": first.hidden_size, **_model(first)}

    def read(self, file: Path):
        dump, first = open_dump(file), self._first
        if (dump.boundaries, dump.final) != (first.boundaries, first.final):
            raise unreadable(
                file,
                f"boundaries {dump.describe(dump.boundaries)}, final {dump.final}, beside {first.describe(first.boundaries)}, {first.final}",
                "two servers wrote here: move the dumps of one away",
            )
        return dump.token_ids, None, [dump.column(k) for k in range(dump.columns - 1)], dump.column(-1)


class SpoolFolder(_DumpFolder):
    """A spool of ours in the safetensors layout: {xxh3-128}.safetensors."""

    layout = "spool-safetensors"
    looked_for = "{xxh3-128 of a request id}.safetensors (a spool of hsnb)"

    @staticmethod
    def takes(name: str) -> bool:
        return bool(_OURS.fullmatch(name))


class PtSpoolFolder(_DumpFolder):
    """req_N folders: a spool of ours in the pt layout, or the first deployment's, which say neither boundaries nor norm."""

    layout = "spool-pt"
    looked_for = "req_{N}/aux_0.pt ... and final.pt"

    @staticmethod
    def takes(name: str) -> bool:
        return bool(_REQ.fullmatch(name))


class ConnectorFolder(_DumpFolder):
    """vLLM's connector files, {id}.safetensors with hidden_states and token_ids: what extract_hidden_states leaves."""

    layout = "vllm"
    looked_for = "{id}.safetensors with hidden_states and token_ids (vLLM's connector)"
    conventions = ("vllm",)

    @staticmethod
    def takes(name: str) -> bool:
        return name.endswith(".safetensors") and not name.startswith(("model", "."))

    def sample(self, index: int) -> TrainingSample:
        """Read one sample; a file that says that it holds no final has aux columns only."""
        made = super().sample(index)
        if self.claims["final"] != NO_FINAL:
            return made
        return replace(made, column_names=tuple(f"aux_{k}" for k in range(len(made.columns))))


def _model(dump: Dump) -> dict[str, str]:
    return {"model": dump.metadata["model"]} if "model" in dump.metadata else {}
