"""The servers of a GPU run: what each one serves, started together where there is room, each one once, retried once."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu_models import llama_folder
from benchmarks.gpu_results import said
from hsnb.demo import model_folder
from hsnb.errors import HsnbError
from hsnb.params import Deployment, num_layers, read_config
from hsnb.server import Server

# The kernels that a machine without FlashAttention or FlashInfer's downloads has.
GPU_FLAGS = {
    "skip-tokenizer-init": True,
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "cuda-graph-backend-decode": "disabled",
    "mem-fraction-static": 0.8,  # of what is free at the start; the cap on tokens below is what holds
}
# Without NVLink multicast: it can take the GPUs of a shared host out of service.
TP_FLAGS = {"disable-custom-all-reduce": True, "enforce-disable-flashinfer-allreduce-fusion": True}
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass(frozen=True)
class Plan:
    """The sizes of a run. `chunk` tokens a prefill chunk; `long` a prompt of more than one chunk; `wide` a chunk that holds it whole."""

    device: str
    gpus: int
    deepseek: str  # demo name of the mixture of experts with latent attention
    deepseek_dtype: str
    boundaries: tuple[int, ...]
    llama: str
    llama_dtypes: tuple[str, ...]
    chunk: int
    long: int
    wide: int
    lengths: tuple[int, ...]  # of the prompts sent together; a chunk holds their sum
    bench_prompts: int
    bench_tokens: int
    max_total_tokens: int
    context: int
    together: bool  # start the servers at once

    @classmethod
    def gpu(cls, gpus: int) -> Plan:
        """Kimi's depth and width in bfloat16, and a dense Llama whose states can be compared in half precision."""
        # Tensor-parallel servers start one after the other: two groups on the same GPUs would wait for each other's kernels.
        return cls(
            "cuda", gpus, "kimi-shape", "bfloat16", (2, 30, 58), "wide", ("bfloat16", "float16") if gpus == 1 else ("bfloat16",),
            chunk=2048, long=3000, wide=8192, lengths=(10, 24, 65, 128, 250, 400, 700), bench_prompts=32, bench_tokens=2048,
            max_total_tokens=131072, context=8192, together=gpus == 1,
        )  # fmt: skip

    @classmethod
    def tiny(cls, gpus: int) -> Plan:
        """The same code path on a CPU in two minutes, for rehearsal; its figures say nothing about a GPU."""
        return cls(
            "cpu", gpus, "tiny-deepseek", "float32", (2, 4, 6), "narrow", ("float32",),
            chunk=128, long=200, wide=512, lengths=(10, 24, 33), bench_prompts=8, bench_tokens=64,
            max_total_tokens=4096, context=1024, together=False,
        )  # fmt: skip

    def names(self) -> list[str]:
        """Return the servers of this run, in the order in which they are needed."""
        off = ["deepseek off"] if self.gpus == 1 else []
        return ["deepseek", *off, *(f"llama {d}" for d in self.llama_dtypes), "deepseek wide"]

    def deployment(self, name: str, limit_s: float) -> Deployment:
        """Return the deployment of one of `names`."""
        llama = name.startswith("llama ")
        folder = llama_folder(self.llama) if llama else model_folder(self.deepseek)
        on_gpu = self.device == "cuda"
        layers = num_layers(read_config(folder))
        server = {
            "device": self.device,
            "dtype": name.split()[1] if llama else self.deepseek_dtype,
            "tp_size": self.gpus,
            "context_length": self.context,
            "chunked_prefill_size": self.wide if name == "deepseek wide" else self.chunk,
            "max_total_tokens": self.max_total_tokens,
            "ready_timeout_s": max(limit_s, 1.0),
            "flags": {**(GPU_FLAGS if on_gpu else {"skip-tokenizer-init": True}), **(TP_FLAGS if on_gpu and self.gpus > 1 else {})},
            "env": NO_MULTICAST if on_gpu else {},
        }
        # Llama's B_0 needs SGLang 0.5.21, so B_1 .. B_L of it.
        capture = {"boundaries": list(range(1, layers + 1)) if llama else list(self.boundaries)}
        return Deployment.parse({"name": name, "model": str(folder), "server": server, "capture": capture}, origin="benchmarks/gpu.py")


@dataclass
class Fleet:
    """The running servers by name. `get` starts one, or waits for one that was begun; a start that failed beside others is tried alone."""

    plan: Plan
    logs: Path
    limit_s: float = 300.0  # for one start
    tries: dict[str, list[tuple[float, str]]] = field(default_factory=dict)  # per server: (seconds, why it failed) of each start
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8), repr=False)
    _begun: dict[str, Future] = field(default_factory=dict, repr=False)
    _retried: set[str] = field(default_factory=set, repr=False)

    def begin(self) -> None:
        """Begin every start, where the plan has them run together: the first alone, because it compiles what the others reuse."""
        if self.plan.together:
            first, *others = self.plan.names()
            self._begun[first] = self._pool.submit(self._start, first)
            for n, name in enumerate(others):
                self._begun[name] = self._pool.submit(self._start_after, self._begun[first], name, float(n))

    def _start_after(self, first: Future, name: str, pause_s: float) -> Server:
        wait([first])
        time.sleep(pause_s)  # so that each picks a free port for itself
        return self._start(name)

    def get(self, name: str) -> Server:
        """Return the running server `name`. Raises what its start raised."""
        if not self.plan.together:
            self.stop(*(n for n in self._begun if n != name))
        if name not in self._begun:
            self._begun[name] = self._pool.submit(self._start, name)
            self._retried.add(name)
        try:
            return self._begun[name].result()
        except HsnbError:
            if name in self._retried:
                raise
            self._retried.add(name)
            self._begun[name] = self._pool.submit(self._start, name)
            return self._begun[name].result()

    def _start(self, name: str) -> Server:
        print(f"  starting {name} ...", flush=True)
        tries = self.tries.setdefault(name, [])
        try:
            deployment = self.plan.deployment(name, self.limit_s)
            server = Server.start(deployment, log_dir=self.logs / name.replace(" ", "-"), capture=name != "deepseek off")
        except Exception as error:
            tries.append((0.0, said(error)))
            raise
        tries.append((server.startup_seconds, ""))
        print(f"  {name} answers after {server.startup_seconds:.0f} s", flush=True)
        return server

    def stop(self, *names: str) -> None:
        """Stop the named servers, each once its start has ended; those that failed have nothing to stop."""
        for name in names:
            future = self._begun.pop(name, None)
            if future is not None and future.exception() is None:
                future.result().stop()

    def stop_all(self, *, but: tuple[str, ...] = ()) -> None:
        """Stop every server but the named ones."""
        self.stop(*(n for n in list(self._begun) if n not in but))
