"""What a server's log says about why it did not start, in words."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path

FIRED_UP = "The server is fired up and ready to roll"
_HEAD_BYTES, _TAIL_BYTES = 256 * 1024, 512 * 1024


@dataclass(frozen=True)
class Cause:
    """Why a server failed: `words` for people, `next` to mend it, `line` of the log that says so."""

    words: str
    next: str
    line: str = ""


# In order: the first that matches names the root; later lines of a log are often only its consequences.
_PATTERNS: list[tuple[str, str, str]] = [
    (
        r"unrecognized arguments: (?P<what>.+)|error: argument (?P<arg>\S+): (?P<why>.+)|error: ambiguous option: (?P<amb>.+)",
        "a wrong flag: {what}",
        "mend it under server.flags; python -m sglang.launch_server --help lists them",
    ),
    (
        r"\[?Errno 98\]?|[Aa]ddress already in use|port \S* ?is (?:already )?in use|not available.{0,40}port|Port \d+ is (?:not available|occupied)",
        "the port is in use",
        "stop what listens there, or server.port: 0 for a free one",
    ),
    (
        r"(?:torch\.)?(?:cuda\.)?OutOfMemoryError|CUDA out of memory",
        "the GPU's memory is too small",
        "lower mem_fraction_static, or raise tp_size",
    ),
    (
        r"Not enough memory|Please try to (?:in|de)crease --mem-fraction-static|Try increasing --mem-fraction-static",
        "too little memory is left for the KV cache",
        "change mem_fraction_static under server.flags, or lower max_total_tokens",
    ),
    (
        r"DefaultCPUAllocator: (?:can't|not enough)|MemoryError\b|Cannot allocate memory",
        "the host's memory is too small",
        "close what else uses memory, lower max_total_tokens, or take a smaller model",
    ),
    (
        r"No space left on device|Errno 28|SIGBUS|Bus error",
        "a disk or /dev/shm is full",
        "free space under /dev/shm and where the log lies",
    ),
    (
        r"Model architectures? .{0,80}not supported|(?:model type|architecture) `?'?(?P<what>[\w-]+)'?`? but Transformers does not recognize"
        r"|Unsupported architectures?: (?P<arg>.+)|has no SGLang implementation",
        "an unknown architecture {what}",
        "see architectures in config.json; a newer SGLang may know it",
    ),
    (
        r"Cannot find any model weights|No safetensors|no .{0,20}weights? files? found|does not appear to have a file named .{0,60}(?:safetensors|bin)"
        r"|Missing (?:weight|parameter)|No such file or directory: '[^']*\.safetensors'|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer",
        "the model's weights are missing or not whole",
        "check the model folder: safetensors files and their index",
    ),
    (
        r"config\.json|Can't load the configuration|Unrecognized model in|Can't load tokenizer|Couldn't instantiate the backend tokenizer"
        r"|LocalEntryNotFoundError|Repo id must",
        "the model folder has no usable config or tokenizer",
        "name a folder that holds config.json, the tokenizer and the weights",
    ),
    (
        r"boundar(?:y|ies) .{0,60}(?:past|beyond|outside|expected)|layers_to_capture.{0,60}(?:range|index)",
        "a boundary past the model's last layer",
        "see num_hidden_layers in config.json; boundaries go from 0 to it",
    ),
    (
        r"NCCL (?:error|WARN)|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|DistBackendError",
        "NCCL failed between the GPUs",
        "see NCCL_* under server.env; NCCL_DEBUG=INFO says more",
    ),
    (r"PermissionError|Errno 13|Permission denied", "a folder or file may not be read or written", "see the path in the log's last lines"),
    (
        r"CUDA driver version is insufficient|no NVIDIA driver|No CUDA GPUs are available|Found no NVIDIA",
        "no usable GPU",
        "server.device: cpu, or mend the driver",
    ),
    (r"(?:ModuleNotFoundError|ImportError): (?P<what>.+)", "a package is missing or broken: {what}", "make setup"),
    (r"warmup error", "the warm-up request failed", "see the traceback in the log"),
    (r"(?P<what>(?:[A-Za-z_.]*Error|AssertionError|Exception): .+)", "the server raised {what}", "see the traceback in the log"),
]
_IGNORED = re.compile(r"Ignore import error|UserWarning|DeprecationWarning|^\s*warnings\.warn|server_args=|FutureWarning|^# hsnb")
_NOISE = re.compile(
    r"^\s*$|^  |UserWarning|warnings\.warn|server_args=|Ignore import error|^\S+\s*$|HTTP/1\.1\"|^Traceback|deprecated|^# hsnb"
)
_STAMP = re.compile(r"^\[[0-9-]+ [0-9:.]+[^\]]*\]\s*")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def read_lines(log: Path) -> list[str]:
    """Return the log's lines; of a log that is too long its beginning and its end."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            data = file.read(_HEAD_BYTES + _TAIL_BYTES)
            if size > len(data):
                data = data[:_HEAD_BYTES]
                file.seek(size - _TAIL_BYTES)
                data += b"\n" + file.read()
    except OSError:
        return []
    return _ANSI.sub("", data.decode(errors="replace")).splitlines()


def tail(log: Path, lines: int = 20, width: int = 240) -> str:
    """Return the log's last `lines`, each cut to `width` characters."""
    return "\n".join(deque((line[:width] for line in read_lines(log)), lines))


def last_meaningful(log: Path, width: int = 100) -> str:
    """Return the last line that tells a person something: no warning, no traceback frame, no access line."""
    for line in reversed(read_lines(log)):
        if not _NOISE.search(line):
            return _STAMP.sub("", line)[:width]
    return ""


def is_fired_up(log: Path) -> bool:
    """Say whether SGLang wrote that its warm-up came back; a hint for when to believe HTTP, never a proof."""
    return any(FIRED_UP in line for line in read_lines(log))


def cannot_listen(log: Path, port: int) -> str:
    """Return the line that says that the port was taken when the server came to listen, or "": SGLang then hangs."""
    said = re.compile(rf"error while attempting to bind on address \(.*, {port}(?:, .*)?\): address already in use")
    return next((_STAMP.sub("", line).strip() for line in read_lines(log) if said.search(line)), "")


def plugin_failure(lines: list[str]) -> str:
    """Return why hsnb's plug-in did not load (the error under SGLang's log line), or "". SGLang starts without it."""
    for i, line in enumerate(lines):
        if re.search(r"Failed to (?:execute general|load) plugin:? hsnb", line):
            errors = [later for later in lines[i : i + 60] if re.match(r"[A-Za-z_.]+(?:Error|Exception)?: ", later)]
            return (errors or [_STAMP.sub("", line)])[0][:240]
    return ""


def find_cause(lines: list[str], *, code: int | None = None) -> Cause:
    """Return the likely cause that the log or the exit code (negative: a signal) gives away."""
    text = [line for line in lines if not _IGNORED.search(line)]
    for pattern, words, remedy in _PATTERNS:
        regex = re.compile(pattern)
        hits = [(line, m) for line in text if (m := regex.search(line))]
        if hits:
            # A chain of tracebacks ends with the error that mattered; the other lines are told by their first.
            line, match = hits[-1] if "Error|Assertion" in pattern else hits[0]
            return Cause(words.format(what=_what(match)).strip(), remedy, _STAMP.sub("", line).strip()[:240])
    if code == -9 or any("exit code -9" in line or "exitcode=-9" in line for line in text):
        return Cause(
            "it was killed by signal 9, as the kernel does when the host's memory runs out",
            "close what else uses memory, lower max_total_tokens, or take a smaller model",
        )
    if code is not None and code < 0:
        return Cause(f"it was ended by signal {-code}", "see who sent it; the log's last lines say what it was doing")
    return Cause("the log does not say why" if lines else "nothing was written to the log", "read the log")


def _what(match: re.Match) -> str:
    groups = {k: v for k, v in match.groupdict().items() if v}
    if "arg" in groups and "why" in groups:
        return f"{groups['arg']}: {groups['why']}"[:160]
    return next(iter(groups.values()), "")[:160]
