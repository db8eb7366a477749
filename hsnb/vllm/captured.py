"""What a capture by vLLM gave: small, frozen, and read again from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hsnb.dumps import Dump, open_dump
from hsnb.errors import DumpError
from hsnb.show import pairs_html


@dataclass(frozen=True)
class Prompt:
    """One prompt: its token ids [S], the engine's own log p of each next token [S-1], and its greedy answer, if asked for."""

    token_ids: tuple[int, ...]
    path: Path
    logprobs: tuple[float, ...]
    output_ids: tuple[int, ...]
    text: str

    @property
    def dump(self) -> Dump:
        """The states, lazily read."""
        return open_dump(self.path)


@dataclass(frozen=True)
class Captured:
    """One start of vLLM: what was asked, what was loaded, and the prompts in the order given.

    `ids` are vLLM's own `eagle_aux_hidden_state_layer_ids` as given, `boundaries` what they name (ascending, B_L included), and
    `ids_read_back` what the loaded model was armed with (None: way "worker", which arms nothing).
    """

    folder: Path
    prompts: tuple[Prompt, ...]
    ids: tuple[int, ...]
    boundaries: tuple[int, ...]
    ids_read_back: tuple[int, ...] | None
    way: str
    dtype: str
    model: str
    model_class: str
    num_layers: int
    hidden_size: int
    vllm_version: str
    device: str
    startup_seconds: float
    capture_seconds: float
    log: Path

    engine = "vllm"

    @property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(p.token_ids for p in self.prompts)

    @property
    def dumps(self) -> tuple[Dump, ...]:
        """The dumps, one a prompt; each is opened here and read when a column is asked for."""
        return tuple(p.dump for p in self.prompts)

    @property
    def logprobs(self) -> tuple[tuple[float, ...], ...]:
        """log p of each next token, S-1 numbers a prompt, as the engine gave them."""
        return tuple(p.logprobs for p in self.prompts)

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """The greedy answers' token ids; empty without max_new_tokens."""
        return tuple(p.output_ids for p in self.prompts)

    @classmethod
    def load(cls, folder: str | Path) -> Captured:
        """Read a folder that `capture` wrote. Raises DumpError when it is not one, or not a whole one."""
        folder = Path(folder)
        try:
            tree, asked = (json.loads((folder / name).read_text()) for name in ("capture.json", "request.json"))
        except (OSError, ValueError) as error:
            raise DumpError(
                got=f"{folder}: {error}",
                expected="capture.json and request.json of hsnb.vllm.capture",
                likely="another kind of folder, or a capture that did not come to its end",
                next="capture again, or open single files with hsnb.open_dump",
            ) from error
        prompts = tuple(
            Prompt(tuple(ids), folder / p["file"], tuple(p["logprobs"]), tuple(p["output_ids"]), p["text"])
            for p, ids in zip(tree["prompts"], asked["prompts"], strict=True)
        )
        labels, read_back = asked["labels"], tree["ids_read_back"]
        boundaries = [*json.loads(labels["boundaries"]), *([int(labels["num_layers"])] if labels["final"] == "pre" else [])]
        return cls(
            folder=folder, prompts=prompts, ids=tuple(asked["ids"]), boundaries=tuple(boundaries),
            ids_read_back=tuple(read_back) if read_back is not None and asked["way"] == "connector" else None,
            way=asked["way"], dtype=tree["dtype"], model=asked["model"], model_class=tree["model_class"], num_layers=tree["num_layers"],
            hidden_size=tree["hidden_size"], vllm_version=tree["vllm_version"], device=tree["device"],
            startup_seconds=tree["startup_seconds"], capture_seconds=tree["capture_seconds"], log=folder / "vllm.log",
        )  # fmt: skip

    def as_dict(self) -> dict:
        """Return what the table shows, for --json."""
        return {
            "engine": f"vLLM {self.vllm_version} on {self.device}",
            "model": self.model,
            "class": self.model_class,
            "ids": list(self.ids),
            "boundaries": list(self.boundaries),
            "way": self.way,
            "dtype": self.dtype,
            "prompts": len(self.prompts),
            "tokens": sum(len(p.token_ids) for p in self.prompts),
            "startup_seconds": self.startup_seconds,
            "capture_seconds": self.capture_seconds,
            "folder": str(self.folder),
        }

    def frame(self):
        """Return one row a prompt: tokens, mean log p of its tokens, the answer, the file."""
        import pandas as pd

        return pd.DataFrame(
            {
                "tokens": len(p.token_ids),
                "mean logprob": sum(p.logprobs) / len(p.logprobs) if p.logprobs else float("nan"),
                "answer": p.text,
                "file": p.path.name,
            }
            for p in self.prompts
        )

    def _repr_html_(self) -> str:
        return pairs_html(self.as_dict().items())
