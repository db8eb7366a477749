"""A torch data set over any folder of training files, for a trainer of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hsnb.dumps import UNKNOWN
from hsnb.errors import BoundaryError, DataError
from hsnb.trainers.find import open_folder


class StatesDataset(torch.utils.data.Dataset):
    """Samples as {"input_ids": int64 [S], "loss_mask": int64 [S], "states": [S, K, H] ascending, "final": [S, H]}, in the stored dtype.

    A sample is read (mapped where the file allows it) when it is asked for; the object can be handed to DataLoader's workers.
    `boundaries`, `final` and `lengths` say what is in it. Nothing is padded, cut or dropped: what cannot be read is a DumpError.

    >>> data = StatesDataset("outputs/demo/data", boundaries=[2, 15, 27], final="pre")  # doctest: +SKIP
    """

    def __init__(self, path: str | Path, *, boundaries: Sequence[int] | None = None, final: str | None = None):
        """Open a folder. `boundaries`: those wanted, of those captured; `final`: "pre" or "post", refused when it is the other.

        Raises BoundaryError for what the folder does not hold, or does not say, and DumpError for a folder of no known layout.
        """
        self.folder = open_folder(path)
        claims = self.folder.claims
        have, self.final = claims["boundaries"], claims["final"]
        for asked, got in ((None if boundaries is None else list(boundaries), have), (final, self.final)):
            holds = got != UNKNOWN and (set(asked) <= set(got) if isinstance(asked, list) else asked == got) if asked else True
            if not holds:
                raise BoundaryError(
                    got=f"{path} with {'boundaries' if isinstance(asked, list) else 'final'} {got if got == UNKNOWN else list(got) if isinstance(got, tuple) else got}",
                    expected=f"{asked}",
                    likely="a tool that does not write it down" if got == UNKNOWN else "another capture than the one wanted",
                    next=f"hsnb identify {path}" if got == UNKNOWN else "capture it, or hsnb export with the model for its norm",
                )
        self.boundaries = have if have == UNKNOWN else tuple(sorted(have if boundaries is None else boundaries))
        self._picks = None if have == UNKNOWN else [have.index(b) for b in self.boundaries]

    def __len__(self) -> int:
        return len(self.folder)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample; for a batch sampler. Reads ids, not states."""
        return [len(self.folder.labels(k)[0]) for k in range(len(self))]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.folder.sample(range(len(self))[index])
        if sample.token_ids is None or sample.loss_mask is None:
            raise DataError(
                got=f"{self.folder.path / sample.name}: no {'token ids' if sample.token_ids is None else 'loss mask'}",
                expected="ids and a mask",
                likely="a server's dumps, which know no mask",
                next="read an extracted folder, or use hsnb.trainers.open_folder",
            )
        picks = range(len(sample.columns) - 1) if self._picks is None else self._picks
        return {
            "input_ids": sample.token_ids,
            "loss_mask": sample.loss_mask,
            "states": torch.stack([sample.columns[k] for k in picks], dim=1),
            "final": sample.columns[-1],
        }

    @staticmethod
    def collate(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pad samples [S_i, ...] to a batch [B, max S, ...] with zeros, and add "lengths" int64 [B]; masks are 0 where it is padded."""
        batch = {key: torch.nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True) for key in samples[0]}
        return batch | {"lengths": torch.tensor([len(s["input_ids"]) for s in samples])}
