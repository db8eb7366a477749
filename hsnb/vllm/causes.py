"""What vLLM's log and failure.json say about why a capture failed, in words."""

from __future__ import annotations

import re

from hsnb.server.causes import Cause

# In order: the first that matches names the root. EngineCore's own errors are only in the log: the driver sees "see above".
_PATTERNS: list[tuple[str, str, str]] = [
    (
        r"ModuleNotFoundError: No module named '(?P<what>vllm[\w.]*|torch|safetensors)'",
        "that Python has no {what}",
        "make setup-vllm",
    ),
    (
        r"torchvision|torchcodec|torchaudio",
        "torchvision, torchaudio or torchcodec is in vLLM's environment, built for another torch",
        "make setup-vllm from nothing: it leaves them out",
    ),
    (
        r"Model architectures? (?P<what>.{0,80}?) (?:are|is) not supported|failed to be inspected"
        r"|(?:model type|architecture) `?(?P<arch>[\w-]+)`? but Transformers does not recognize",
        "vLLM does not know this model {what}",
        "see architectures in config.json and vLLM's list of supported models",
    ),
    (
        r"Model does not support EAGLE3 interface|does not support.{0,40}(?:eagle3|aux)",
        "vLLM cannot extract hidden states from this model's class",
        'way="worker" reads them by hooks',
    ),
    (
        r"hooks cannot read its input",
        "the hooks do not know this model's layers",
        'way="connector", vLLM\'s own extraction',
    ),
    (
        r"OutOfMemoryError|CUDA out of memory",
        "the GPU's memory is too small",
        "raise tensor_parallel_size, or take a smaller model",
    ),
    (
        r"No available memory for the cache blocks|KV cache is needed, which is larger than|larger than the available KV cache|"
        r"Available memory on node|Free memory on device|is less than desired (?:CPU|GPU) memory",
        "too little memory is left for vLLM's cache",
        "fewer ids, shorter prompts, or close what else uses memory (on a CPU: cpu_cache_bytes)",
    ),
    (
        r"DefaultCPUAllocator: (?:can't|not enough)|MemoryError\b|Cannot allocate memory|bad_alloc",
        "the host's memory is too small",
        "close what else uses memory, or take a smaller model",
    ),
    (r"No space left on device|Errno 28", "a disk or /dev/shm is full", "free space where the files go and under /dev/shm"),
    (
        r"Cannot find any model weights|SafetensorError|No such file or directory: '[^']*\.safetensors'|MetadataIncompleteBuffer|HeaderTooLarge",
        "the model's weights are missing or not whole",
        "check the model folder: safetensors files and their index",
    ),
    (
        r"expected \[\d+, \d+, \d+\]: tokens, ids, width|armed with ids|states of another prompt|states in torch",
        "vLLM gave other states than it was asked for",
        "see the log; it may be another vLLM than 0.32.0, whose extraction hsnb has not been run on",
    ),
    (
        r"Cannot access accelerator|pin_memory|Pinned memory requires",
        "vLLM's connector took its CUDA path on a CPU",
        "another vLLM than 0.32.0? make setup-vllm has the one that was run",
    ),
]
_ERROR = re.compile(r"^(?:\(\S+ pid=\d+\) )?(?:ERROR \S+ \S+ \[[^\]]*\] )?(?P<line>[\w.]*(?:Error|Exception|Interrupt)\b: .+)")
_STAMP = re.compile(r"^(?:\([\w -]+pid=\d+\) )?(?:(?:ERROR|WARNING|INFO) \S+ \S+ \[[^\]]*\] )?")


def find_cause(lines: list[str], failure: dict, *, code: int | None = None) -> Cause:
    """Return the likely cause that the log, failure.json ({} when the driver wrote none) or the exit code gives away."""
    said = f"{failure['type']}: {failure['message']}" if failure else ""
    errors = [m["line"] for line in lines if (m := _ERROR.match(line))]
    for pattern, words, remedy in _PATTERNS:
        regex = re.compile(pattern)
        for line in [said, *errors]:
            if match := regex.search(line):
                what = next((v for v in match.groupdict().values() if v), "")
                return Cause(words.format(what=what).strip(), remedy, _STAMP.sub("", line)[:300])
    if code in (-9, 137) or any("exit code -9" in line or "SIGKILL" in line for line in lines):
        return Cause(
            "a process of vLLM was killed by signal 9, as the kernel does when the host's memory runs out",
            "close what else uses memory, or take a smaller model",
        )
    if code is not None and code < 0:
        return Cause(f"it was ended by signal {-code}", "see who sent it; the log's last lines say what it was doing")
    # A chain of tracebacks ends with the errors that the first one caused.
    first = next((e for e in errors if not e.startswith(("RuntimeError: Engine core init", "EngineDeadError"))), said)
    return Cause(first[:300] or ("the log does not say why" if lines else "nothing was written to the log"), "read the log")
