"""What every dump offers, whatever its layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from hsnb.errors import DumpError
from hsnb.show import pairs_html

UNKNOWN = "unknown"
NO_FINAL = "none"  # a dump that says that it holds no final state


class Dump(ABC):
    """The states of one request: boundaries ascending, the final state last.

    Attributes: path; layout ("safetensors" | "pt"); request_id; num_tokens (S); hidden_size (H); columns (boundaries + final);
    dtype; boundaries (tuple of ints, or "unknown"); final ("pre" | "post" | "none" | "unknown"); num_layers (L, None when the
    file does not say); kind ("data" | "warmup" | "health" | "unknown"); metadata (as written).
    """

    path: Path
    layout: str
    request_id: str
    num_tokens: int
    hidden_size: int
    columns: int
    dtype: torch.dtype
    boundaries: tuple[int, ...] | str
    final: str
    num_layers: int | None = None
    kind: str
    metadata: dict

    @property
    @abstractmethod
    def token_ids(self) -> torch.Tensor | None:
        """int64 [S] as the model ran them, None when the file does not hold them."""

    @abstractmethod
    def column(self, index: int) -> torch.Tensor:
        """Return one column [S, H] in the stored dtype; -1 is the final state, where there is one. Reads that column only."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of states, without headers and ids."""

    def state(self, boundary: int | str) -> torch.Tensor:
        """Return boundary k, or "final", as [S, H]. Boundary L is the final state of a dump that holds it before the norm and says L.

        Raises DumpError when the dump does not hold it, or does not say which it holds.
        """
        if boundary == "final" and self.final != NO_FINAL:
            return self.column(-1)
        if self.boundaries != UNKNOWN and boundary in self.boundaries:
            return self.column(self.boundaries.index(boundary))
        if boundary == self.num_layers is not None and self.final == "pre":
            return self.column(-1)
        if self.boundaries == UNKNOWN:
            likely, remedy = "files of a tool that does not write them down", "read it by .column(index)"
        else:
            likely = "the engine was asked for others"
            also = "" if self.final == NO_FINAL else ", or for 'final': the last layer's output"
            remedy = f"ask for one of {list(self.boundaries)}{also}"
        raise DumpError(
            got=f"{self.path}: {'the final state' if boundary == 'final' else f'boundary {boundary}'} asked of boundaries "
            f"{self.describe(self.boundaries)}{' without a final state' if self.final == NO_FINAL else ''}",
            expected="one that the dump holds",
            likely=likely,
            next=remedy,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """What each column is called: B_k, or its number where that is unknown; the last one "final (pre)", where there is one."""
        aux = self.columns - (self.final != NO_FINAL)
        names = [f"B_{b}" for b in self.boundaries] if self.boundaries != UNKNOWN else [f"column {k}" for k in range(aux)]
        return (*names, f"final ({self.final})") if self.final != NO_FINAL else tuple(names)

    def states(self) -> torch.Tensor:
        """Return everything as [S, columns, H]."""
        return torch.stack([self.column(k) for k in range(self.columns)], dim=1)

    @staticmethod
    def describe(value) -> str:
        return UNKNOWN if value == UNKNOWN else str(list(value))

    def frame(self):
        """Return one row a column: name, norm of the rows (median, first token apart), largest absolute value."""
        import pandas as pd

        rows = []
        for k, name in enumerate(self.names):
            values = self.column(k).float()
            norms = values.norm(dim=-1)
            rest = norms[1:].median().item() if len(norms) > 1 else float("nan")
            rows.append({"state": name, "norm of token 0": norms[0].item(), "median norm": rest, "largest": values.abs().max().item()})
        return pd.DataFrame(rows)

    def plot(self, ax=None):
        """Draw the norm of every row, a line a state."""
        from hsnb.figures import norms_of_states

        return norms_of_states({name: self.column(k).float().norm(dim=-1).numpy() for k, name in enumerate(self.names)}, ax=ax)

    def _repr_html_(self) -> str:
        rows = {
            "request": self.request_id,
            "tokens": f"{self.num_tokens:,}",
            "boundaries": self.describe(self.boundaries),
            "final": self.final,
            "states": f"{self.columns} x {self.num_tokens} x {self.hidden_size} {str(self.dtype).removeprefix('torch.')}, {self.nbytes:,} bytes",
            "path": self.path,
        }
        return pairs_html(rows.items())


def unreadable(path: Path, why: object, next: str = "extract the sample again") -> DumpError:
    """Build the error for a file that is not a whole dump."""
    return DumpError(
        got=f"{path}: {' '.join(str(why).split())}",
        expected="a whole dump",
        likely="a truncated or foreign file",
        next=next,
    )
