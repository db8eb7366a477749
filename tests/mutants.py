"""The capture with one protection switched off, by name, inside a real server. For tests only: production code has no such switch.

A server that is started with `environment(folder)` finds a sitecustomize.py there, which lets this module change the methods of
Capture when a scheduler imports it, and of Scribe in the process that writes. Which mutant acts is read from a file at each call, so that one server
serves them all, and is sane while the file is empty. Only the standard library is imported at the top: every process of the
server runs this.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

SWITCH = "HSNB_TEST_MUTANT_FILE"
TARGETS = {"hsnb.patch.capture": "Capture", "hsnb.patch.scribe": "Scribe"}


def environment(folder: Path) -> dict[str, str]:
    """Write `folder`/sitecustomize.py and return the variables of a server that can be mutated."""
    (folder / "sitecustomize.py").write_text("import tests.mutants\n\ntests.mutants.install()\n")
    be(folder, "")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[1])]), SWITCH: str(folder / "mutant")}


def be(folder: Path, name: str) -> None:
    """Switch the server of `environment(folder)` to a mutant, or with "" back to sane."""
    if name and name not in MUTANTS:
        raise KeyError(name)
    (folder / "mutant").write_text(name)


def install() -> None:
    """Have the capture changed as soon as this process imports it."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in TARGETS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def then_change(module):
            run(module)
            changed = getattr(module, TARGETS[name])
            for method in {mutant.method for mutant in MUTANTS.values()} & set(vars(changed)):
                _wrap(changed, method)

        spec.loader.exec_module = then_change
        return spec


def _wrap(cls, method: str) -> None:
    sane = getattr(cls, method)

    @functools.wraps(sane)
    def either(self, *args, **kwargs):
        mutant = MUTANTS.get(Path(os.environ[SWITCH]).read_text())
        if mutant is None or mutant.method != method:
            return sane(self, *args, **kwargs)
        return mutant.act(sane, self, *args, **kwargs)

    setattr(cls, method, either)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`act(sane, self, ...)` stands in for a method of Capture or Scribe; `removes` says which protection is gone."""

    method: str
    removes: str
    act: Callable


# -- which boundary: Capture.borrow(...) -> ({boundary or "final": [tokens, H]}, what the model returns)


def _asking(ids_of):
    """Ask the model for other layers, and label what comes with the boundaries that were wanted."""

    def act(sane, self, *args, **kwargs):
        own, self.inner = self.inner, ids_of(self)
        try:
            states, hidden = sane(self, *args, **kwargs)
        finally:
            asked, self.inner = self.inner, own
        return states | {k: states[j] for k, j in zip(own, asked, strict=True)}, hidden

    return act


def _by_the_setter(self) -> list[int]:
    """Return what SGLang's own EAGLE-3 setter makes of the boundaries, by running it on a stand-in."""
    from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM

    model = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), config=None, model=SimpleNamespace())
    DeepseekV3ForCausalLM.set_eagle3_layers_to_capture(model, self.inner)
    return model.model.layers_to_capture


def _states(change):
    """Change every state of a batch."""

    def act(sane, self, *args, **kwargs):
        states, hidden = sane(self, *args, **kwargs)
        return {k: change(v) for k, v in states.items()}, hidden

    return act


def _states_exchanged(sane, self, input_ids, positions, batch, *args, **kwargs):
    """Exchange the states of two requests of one length, and leave their token ids: the echo does not see it."""
    states, hidden = sane(self, input_ids, positions, batch, *args, **kwargs)
    lengths, starts = batch.extend_seq_lens_cpu, [sum(batch.extend_seq_lens_cpu[:i]) for i in range(len(batch.rids))]
    pairs = [(i, j) for i in range(len(lengths)) for j in range(i) if lengths[i] == lengths[j]]
    for i, j in pairs[:1]:
        for k, state in states.items():
            a, b = slice(starts[i], starts[i] + lengths[i]), slice(starts[j], starts[j] + lengths[j])
            states[k] = state.clone()
            states[k][a], states[k][b] = state[b], state[a]
    return states, hidden


def _normed_as_pre(sane, self, *args, **kwargs):
    states, hidden = sane(self, *args, **kwargs)
    return states | {"final": hidden}, hidden


def _normed_twice(sane, self, *args, **kwargs):
    states, hidden = sane(self, *args, **kwargs)
    return states, self.body.norm(hidden)


# -- which rows of which request: Capture.wanted(batch) -> [Rows]


def _exchanged(sane, self, batch):
    rows = sane(self, batch)
    pairs = [(i, j) for i in range(len(rows)) for j in range(i) if rows[i].n == rows[j].n]
    if pairs:
        i, j = pairs[0]
        rows[i], rows[j] = (
            dataclasses.replace(rows[i], offset=rows[j].offset),
            dataclasses.replace(rows[j], offset=rows[i].offset),
        )
    return rows


def _everybodys(sane, self, batch):
    own, self.settings = self.settings, dataclasses.replace(self.settings, only="")
    try:
        return sane(self, batch)
    finally:
        self.settings = own


def _taken_again(sane, self, batch):
    for rid in batch.rids:
        self.lengths[rid] = self.lengths[rid]._replace(answered=0)
        self.lengths[rid].seen.prefilled = False
    return sane(self, batch)


def _stand_in(sane, self, reqs):
    sane(self, reqs)
    for req in reqs:
        self.lengths[req.rid] = self.lengths[req.rid]._replace(aborted=False)


def _one_short(sane, self, reqs):
    sane(self, reqs)
    for req in reqs:
        known = self.lengths[req.rid]
        self.lengths[req.rid] = known._replace(tokens=known.tokens - 1)


# -- which place in the file: Scribe.put(request, part)


def _lost(sane, self, request, part):
    if part.start == 64:  # noted as come, and never written
        from hsnb.patch.spool import Request

        states, ids = _rows(self, request, part)
        return Request.put(request, part.start, states, ids)
    return sane(self, request, part)


def _twice(sane, self, request, part):
    sane(self, request, part)
    if part.start == 64:
        from hsnb.patch.spool import _write_all

        states, _ = _rows(self, request, part)
        _write_all(request._fd, memoryview(states.reshape(-1)), request._states_at)  # over row 0 onwards, too


def _by_reference(sane, self, request, part):
    """Keep views of one place until the prompt is whole, as a capture without a copy would."""
    self.kept = getattr(self, "kept", {})
    self.kept.setdefault(part.key, []).append((part, _rows(self, request, part)[1].copy()))
    if part.start + part.n >= request.num_tokens:
        for earlier, ids in self.kept.pop(part.key):
            states, _ = _rows(self, request, earlier._replace(states_at=part.states_at))  # all of them where the last rows are
            request.put(earlier.start, states, ids, earlier.goes_on)


def _too_soon(sane, self, request, part):
    """Show a file under its name while its rows are still coming."""
    sane(self, request, part)
    if part.start == 0 and not request.whole:
        from hsnb.patch.spool import _write_all

        header = request._header([[0, request.num_tokens]])
        size = request._header_size
        _write_all(request._fd, memoryview(size.to_bytes(8, "little") + header.ljust(size)), 0)
        shutil.copyfile(request._temporary, request._path)


def _rows(self, request, part):
    import numpy as np

    states = self.view(part.states_at, part.n * request.row_bytes).reshape(part.n, request.columns, -1)
    return states, self.view(part.ids_at, 8 * part.n).view(np.int64)


def _kept_for_ever(sane, self, live):
    return None


MUTANTS = {
    "one layer late": Mutant("borrow", "layers_to_capture is the boundaries themselves", _asking(lambda self: [i + 1 for i in self.inner])),
    "one layer early": Mutant(
        "borrow", "layers_to_capture is the boundaries themselves", _asking(lambda self: [i - 1 for i in self.inner])
    ),
    "through the setter": Mutant("borrow", "the list is set directly, never by the model's setter", _asking(_by_the_setter)),
    "normed as pre": Mutant("borrow", "the final state is the norm's input", _normed_as_pre),
    "result changed": Mutant("borrow", "the model gets back what it would have had", _normed_twice),
    "other dtype": Mutant("borrow", "states keep the model's own dtype", _states(lambda v: v.bfloat16().to(v.dtype))),
    "rows shifted by one": Mutant("borrow", "a request's rows begin where its tokens do", _states(lambda v: v.roll(1, 0))),
    "states exchanged": Mutant("borrow", "each request has its own rows of the batch", _states_exchanged),
    "rows exchanged": Mutant("wanted", "each request has the rows of its own offset in the batch", _exchanged),
    "not kept out": Mutant("wanted", "only requests with the prefix are captured", _everybodys),
    "retracted, taken again": Mutant("wanted", "a prompt that ran whole is not taken a second time", _taken_again),
    "stand-in taken": Mutant("note_lengths", "what SGLang runs in place of a refused prompt is not the prompt", _stand_in),
    "one token short": Mutant("note_lengths", "the length is the prompt's", _one_short),
    "a chunk lost": Mutant("put", "every chunk is written", _lost),
    "a chunk twice": Mutant("put", "every chunk is written at its own place only", _twice),
    "by reference": Mutant("put", "rows are copied before the next batch runs", _by_reference),
    "published too soon": Mutant("put", "a file has its name only when it is whole", _too_soon),
    "half made for ever": Mutant("let_go", "what an aborted request had begun is removed", _kept_for_ever),
}
