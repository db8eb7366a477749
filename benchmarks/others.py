"""Measure hsnb beside the other ways of getting states out: same machine, same work, in turns.

    python -m benchmarks.others [--out docs] [--parts saving,sglang,pt,vllm] [--turns 9]

saving: the same states (Kimi's width, bfloat16) from the model's tensors to a whole file, by hsnb's writer, by torch.save of a
sample as SpecForge saves it, by torch.save of each column in the forward (the pt layout as first written), by safetensors'
save_file as vLLM's connector saves them. No engine. sglang: plain prefill, hsnb's capture and SGLang's return_hidden_states on
one server (SmolLM2, CPU). pt: the same server with hsnb's pt layout. vllm: the same prompts by vLLM, plain and with its
extract_hidden_states, in .venv-vllm. Results go to others-results.json, the tables of
docs/performance.md and the README are rendered from it by `python -m benchmarks.render_speed`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from benchmarks.gpu import now, versions
from benchmarks.gpu_site import ROOT
from benchmarks.others_results import FILE, Others, Part, Sample
from hsnb.patch.armed import Armed, ArmedFile
from hsnb.patch.batch import States
from hsnb.patch.ring import Ring
from hsnb.patch.rows import Rows
from hsnb.patch.scribe import Begin
from hsnb.patch.writer import File, Writer

WIDTH, COLUMNS = 7168, 4
LENGTHS = {"128 tokens": (128, 16), "2,048 tokens": (2048, 2)}  # tokens, samples of a turn
META = {"hsnb_format": "1", "boundaries": "[3, 31, 59]", "final": "pre", "dtype": "bfloat16", "model": "others"}


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, measure, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.others", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help=f"folder of {FILE} (default: docs/)")
    parser.add_argument("--parts", default="saving,sglang,pt,vllm")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--limit-s", type=float, default=3600, help="no turn begins after this many seconds")
    args = parser.parse_args(argv)
    end = time.monotonic() + args.limit_s
    for part in args.parts.split(","):
        for name, found in {"saving": saving, "sglang": sglang, "pt": pt, "vllm": vllm}[part](args.turns, end):
            found = found.model_copy(update={"date": now(), "versions": versions()})
            results = Others.read(args.out / FILE)
            Others(parts={**results.parts, name: found}).write(args.out / FILE)
            print(name, {way: [round(s.seconds, 3) for s in samples] for way, samples in found.ways.items()}, flush=True)
    return 0


# -- from the model's tensors to a file, no engine ----------------------------------------------------------------


def saving(turns: int, end: float):
    """Yield (name, Part) of each length; the ways take turns, the first one first.

    torch has one thread: beside other work its pool spins, and what is measured then is who wakes it.
    """
    torch.set_num_threads(1)
    for words, (tokens, count) in LENGTHS.items():
        folder = Path(tempfile.mkdtemp(prefix="hsnb-others-", dir="/dev/shm"))
        columns = [torch.randn(tokens, WIDTH).to(torch.bfloat16) for _ in range(COLUMNS)]
        ids = torch.arange(tokens)
        writer = Hsnb(folder)
        ways: dict[str, Callable[[list[torch.Tensor], torch.Tensor, Path], None]] = {
            "hsnb": writer.save,
            "torch.save a sample (SpecForge)": specforge,
            "torch.save each column (pt, as first written)": as_first_written,
            "safetensors save_file (vLLM's connector)": connector,
        }
        found: dict[str, list[Sample]] = {way: [] for way in ways}
        for turn in range(turns + 1):  # the first one warms up
            if turn > 1 and time.monotonic() > end:
                break
            for way, save in ways.items():
                cpu, began = writer.cpu_s(), time.perf_counter()
                for n in range(count):
                    save(columns, ids, folder / f"{n}")
                stood = time.perf_counter() - began
                writer.writer.settle()
                seconds, spent = time.perf_counter() - began, writer.cpu_s() - cpu
                if turn:
                    nbytes = count * tokens * COLUMNS * WIDTH * 2
                    found[way].append(Sample(tokens=count * tokens, nbytes=nbytes, seconds=seconds, stood_s=stood, cpu_s=spent))
                for path in set(folder.iterdir()) - {writer.writer.armed.path}:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        writer.writer.close()
        shutil.rmtree(folder)
        yield (
            f"saving {words}",
            Part(work=f"{count} samples of {words}, 57,344 bytes a token, into /dev/shm, one thread of torch's", ways=found),
        )


class Hsnb:
    """hsnb's writer as the capture drives it, with its process."""

    def __init__(self, spool: Path):
        self.failures: list[str] = []
        armed = ArmedFile(spool, Armed(state="armed"))
        self.writer = Writer(
            spool, Ring(512 << 20), armed, layout="safetensors", meta=META, failed=lambda file, why: self.failures.append(why)
        )

    def save(self, columns: list[torch.Tensor], ids: torch.Tensor, path: Path) -> None:
        """Queue one prompt. Raises what the process met before."""
        tokens = len(ids)
        self.add(self.file(tokens), 0, tokens, columns, ids)

    def file(self, tokens: int) -> File:
        """Return a new prompt's dump."""
        return File(Begin(uuid.uuid4().hex, tokens, "data", COLUMNS, WIDTH, META["dtype"]))

    def add(self, file: File, start: int, n: int, columns: list[torch.Tensor], ids: torch.Tensor) -> None:
        """Queue rows start..start+n."""
        if self.failures:
            raise RuntimeError(self.failures[0])
        self.writer.add([(file, Rows(file.begin.request_id, 0, start, n, "data"))], States(columns), ids)

    def process(self) -> psutil.Process | None:
        """Return the writing process, when there is one."""
        return next(iter(psutil.Process().children()), None)

    def cpu_s(self) -> float:
        """Return the CPU seconds so far, of this process and of the one that writes."""
        return time.process_time() + (sum(p.cpu_times()[:2]) if (p := self.process()) else 0.0)


def specforge(columns: list[torch.Tensor], ids: torch.Tensor, path: Path) -> None:
    """Save a sample as SpecForge 0.2's prepare_hidden_states.py does."""
    aux, final = torch.cat(columns[:-1], dim=-1)[None], columns[-1][None]
    torch.save({"input_ids": ids, "loss_mask": torch.ones_like(ids), "aux_hidden_state": aux, "hidden_state": final}, f"{path}.ckpt")


def as_first_written(columns: list[torch.Tensor], ids: torch.Tensor, path: Path) -> None:
    """Save aux_0.pt ... final.pt and the metadata."""
    path.mkdir()
    for name, column in zip(("aux_0", "aux_1", "aux_2", "final"), columns, strict=True):
        torch.save(column, path / f"{name}.pt")
    (path / "metadata.json").write_text(json.dumps({**META, "token_ids": ids.tolist()}))


def connector(columns: list[torch.Tensor], ids: torch.Tensor, path: Path) -> None:
    """Save one safetensors file."""
    save_file({"hidden_states": torch.stack(columns, dim=1), "token_ids": ids}, f"{path}.safetensors")


# -- engines ------------------------------------------------------------------------------------------------------


RETURNED = "return_hidden_states"


def sglang(turns: int, end: float):
    """Yield plain prefill and hsnb's capture on one server, and return_hidden_states (the last state only, as JSON) on another."""
    yield "sglang", _served("safetensors", ("plain", "hsnb", RETURNED), turns, end)


def pt(turns: int, end: float):
    """Yield plain prefill and hsnb's pt layout."""
    yield "sglang, pt layout", _served("pt", ("plain", "hsnb, pt layout"), turns, end)


def vllm(turns: int, end: float):
    """Yield vLLM's plain prefill and its own extraction, two engines that stand beside each other."""
    ways = {"vLLM, plain": [], "vLLM, extract_hidden_states": [2, 15, 27, 30]}
    found: dict[str, list[Sample]] = {way: [] for way in ways}
    with contextlib.ExitStack() as stack:
        engines = {way: stack.enter_context(Vllm(ids)) for way, ids in ways.items()}
        for turn, way in itertools.product(range(turns + 1), ways):
            if turn > 1 and time.monotonic() > end:
                break
            sample = engines[way].turn()
            if turn:
                found[way].append(sample)
    whole = min(map(len, found.values()))
    yield "vllm", Part(work="4 prompts of 128 tokens at once, SmolLM2 in float32", ways={w: s[:whole] for w, s in found.items()})


class Vllm:
    """One vLLM in its own environment (others_vllm.py); `ids`: layer ids to extract, [] for a plain one."""

    def __init__(self, ids: list[int]):
        from benchmarks.gpu_probe import prompt_ids
        from benchmarks.speed_load import VOCAB
        from hsnb.demo import model_folder
        from hsnb.vllm.environment import build_env, vllm_python

        self.folder = Path(tempfile.mkdtemp(prefix="hsnb-vllm-", dir="/dev/shm"))
        (self.folder / "raw").mkdir()
        request = {"model": str(model_folder("smollm2-fp32")), "prompts": [prompt_ids(128, VOCAB, seed=n) for n in range(4)], "ids": ids}
        file = self.folder / "request.json"
        file.write_text(json.dumps({**request, "raw": str(self.folder / "raw")}))
        command = [str(vllm_python()), str(Path(__file__).with_name("others_vllm.py")), str(file)]
        with open(self.folder / "log", "w") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            self.engine = subprocess.Popen(command, env=build_env(on_cpu=True), text=True, start_new_session=True, **pipes)

    def __enter__(self) -> Vllm:
        while (line := self.engine.stdout.readline()) != "ready\n":  # vLLM says a good deal before
            if not line:
                raise RuntimeError(f"vLLM did not start:\n{(self.folder / 'log').read_text()[-2000:]}")
        return self

    def turn(self) -> Sample:
        """Send every prompt once."""
        family = [psutil.Process(self.engine.pid), *psutil.Process(self.engine.pid).children(recursive=True)]
        before = sum(sum(p.cpu_times()[:2]) for p in family)
        self.engine.stdin.write("\n")
        self.engine.stdin.flush()
        while not (line := self.engine.stdout.readline()).startswith('{"answered_s"'):
            if not line:
                raise RuntimeError(f"vLLM ended:\n{(self.folder / 'log').read_text()[-2000:]}")
        took = json.loads(line)
        spent = sum(sum(p.cpu_times()[:2]) for p in family) - before
        return Sample(tokens=512, nbytes=0, seconds=took["seconds"], stood_s=took["answered_s"], cpu_s=spent)

    def __exit__(self, *_) -> None:
        os.killpg(self.engine.pid, signal.SIGKILL)
        self.engine.wait()
        shutil.rmtree(self.folder)


def _served(layout: str, ways: tuple[str, ...], turns: int, end: float) -> Part:
    from benchmarks.gpu_probe import prompt_ids
    from benchmarks.speed_load import VOCAB, deployment, one_turn
    from hsnb.server import Server

    made = deployment("cpu", None, layout)
    ids = [prompt_ids(128, VOCAB, seed=n) for n in range(4)]
    found: dict[str, list[Sample]] = {way: [] for way in ways}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hsnb-others-")))
        running = stack.enter_context(Server.start(made, log_dir=logs))
        if RETURNED in ways:  # hsnb refuses to capture on a server that may return them: it changes what the model returns
            flags = {**made.server.flags, "enable-return-hidden-states": True}
            other = made.model_copy(update={"server": made.server.model_copy(update={"flags": flags})})
            returning = stack.enter_context(Server.start(other, log_dir=logs, capture=False))
        for turn, way in itertools.product(range(turns + 1), ways):
            if turn > 1 and time.monotonic() > end:
                break
            server = returning if way == RETURNED else running
            before = _cpu(server)
            if way == RETURNED:
                answered = seconds = _returned(server, ids)
            else:
                done = one_turn(server, ids, 64, "hsnb-bench" if way.startswith("hsnb") else "plain")
                answered, seconds = done.answered_s, done.published_s
            if turn:
                tokens = sum(map(len, ids))
                found[way].append(Sample(tokens=tokens, nbytes=0, seconds=seconds, stood_s=answered, cpu_s=_cpu(server) - before))
    whole = min(map(len, found.values()))
    return Part(work="4 prompts of 128 tokens at once, SmolLM2 in float32", ways={w: s[:whole] for w, s in found.items()})


def _returned(server, ids: list[list[int]]) -> float:
    """Return the seconds until every state has come back as JSON and is read."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_hidden_states": True}
    with server.client() as client:
        began = time.perf_counter()
        replies = client.request("POST", "/generate", body)
        seconds = time.perf_counter() - began
    rows = [len(reply["meta_info"]["hidden_states"][0]) for reply in replies]
    if rows != [len(prompt) for prompt in ids]:
        raise RuntimeError(f"states of {rows} tokens came back")
    return seconds


def _cpu(server) -> float:
    """Return the CPU seconds so far of all of a server's processes, in ticks of 10 ms."""
    launcher = psutil.Process(server.pid)
    return sum(sum(p.cpu_times()[:2]) for p in (launcher, *launcher.children(recursive=True)))


if __name__ == "__main__":
    sys.exit(main())
