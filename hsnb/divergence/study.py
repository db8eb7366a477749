"""The divergence notebook's work, step by step: what is asked, both parties, the tools' own settings, the conclusion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hsnb import boundaries as bd
from hsnb import reference as hf
from hsnb.divergence import capture, noise, offsets
from hsnb.divergence.compare import Comparison, compare
from hsnb.divergence.folders import folder_states, shared_samples
from hsnb.divergence.measure import distances, steps
from hsnb.divergence.prompts import default_prompts
from hsnb.divergence.settings import Setting, short
from hsnb.divergence.states import States
from hsnb.errors import ParamsError, ServerError
from hsnb.params import Deployment, num_layers, read_config
from hsnb.paths import resolve, run_dir
from hsnb.server import Server, attach
from hsnb.session import deployment_of, starting
from hsnb.vllm import vllm_python
from hsnb.weights import Head

SPAN = 3  # boundaries on either side of an id that are looked at
ALL = 40  # a model of so many layers is captured at every boundary
ENGINES = ("sglang", "vllm", "transformers")
SGLANG_OPTION = "--return-aux-hidden-state-layer-ids"
VLLM_OPTION = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Study:
    """What is compared on what. `ids`: the list that the tools are given; `window`: the boundaries captured from both engines."""

    deployment: Deployment
    model: Path
    folder: Path  # of the run
    family: str
    architecture: str
    layers: int
    ids: tuple[int, ...]
    window: tuple[int, ...]
    prompts: dict[str, list[int]] = field(repr=False)
    words: dict[int, tuple[str, list[str]]] = field(repr=False)
    dtype: str = "float32"
    server_url: str = ""
    spool: str = ""
    folders: tuple[Path, ...] = ()  # of the parties that are folders, in the order given
    samples: tuple = ()  # folders.Chosen: those that are compared

    @property
    def lists(self) -> list[tuple[int, ...]]:
        """Return the lists that the tools are given: the ids, every id on a small Llama, and on DeepSeek the same list from 1 on.

        SGLang's setter shifts every list on Llama, and on DeepSeek and Kimi those that begin with 1.
        """
        if self.family == "deepseek":
            return [self.ids, tuple(sorted({1, *self.ids[1:]}))] if self.ids[0] != 1 else [self.ids]
        return [self.ids, tuple(range(1, self.layers - 1))] if self.layers <= ALL else [self.ids]

    @property
    def for_vllm(self) -> tuple[int, ...]:
        """Return the window as vLLM can give it: id 0 ends its engine on DeepSeek (0.32)."""
        return tuple(k for k in self.window if k or self.family != "deepseek")

    def frame(self):
        """Return what is asked as a table."""
        import pandas as pd

        tokens = sum(map(len, self.prompts.values()))
        what = {
            "model": self.deployment.model,
            "class": f"{self.architecture}, {self.layers} layers, SGLang's {self.family} rule",
            "dtype": self.dtype,
            "ids": list(self.ids),
            "boundaries captured": f"{self.window[0]}..{self.window[-1]} ({len(self.window)})",
            "prompts": f"{len(self.prompts)} ({', '.join(self.prompts)}), {tokens} tokens",
        }
        return pd.DataFrame({"what": list(what), "value": [str(v) for v in what.values()]})


def begin(p, prompts: dict[str, list[int]] | None = None) -> Study:
    """Return the study that the notebook's parameters `p` ask for. Raises ParamsError or BoundaryError before anything is started.

    `prompts`: {name: token ids}; default: a few texts, or the samples of the folders that are compared.
    """
    deployment = deployment_of(p)
    model = deployment.model_path()
    config = read_config(model)
    layers, family = num_layers(config), bd.model_family(config)
    for name in (p.a, p.b):
        if name not in ENGINES and "://" not in name and not resolve(name).is_dir():
            raise ParamsError(
                got=f"party {name!r}",
                expected=f"one of {', '.join(ENGINES)}, a URL (http://...) or a folder of states",
                likely="a typo, or a folder that is not there",
                next="-p a sglang -p b vllm",
            )
    if "vllm" in (p.a, p.b):
        vllm_python()  # says how to get it, before anything is started
    ids = tuple(sorted(p.ids)) or bd.default_boundaries(layers)
    bd.check_boundaries(ids, layers)
    _check_lists(ids, (p.a, p.b), layers, family)
    around = {k for i in (*ids, 1) for k in range(i - SPAN, i + SPAN + 1) if 0 <= k <= layers}
    window = tuple(range(layers + 1)) if layers <= ALL else tuple(sorted({*around, layers - 1, layers}))
    folders = [resolve(name) for name in (p.a, p.b) if name not in ENGINES and "://" not in name]
    words: dict[int, tuple[str, list[str]]] = {}
    samples = tuple(shared_samples(folders)) if folders else ()
    if folders:
        prompts = {c.name: list(c.ids) for c in samples}
    elif prompts is None:
        prompts, tokenizer = default_prompts(model)
        words = {n: (name, [tokenizer.decode([i]) for i in ids]) for n, (name, ids) in enumerate(prompts.items())}
    architecture = (config.get("architectures") or ["unknown"])[0]
    server = deployment.server.model_copy(update={"dtype": p.dtype})
    capture_all = deployment.capture.model_copy(update={"boundaries": list(window), "final": "pre", "format": "safetensors"})
    asked = deployment.model_copy(update={"server": server, "capture": capture_all})
    return Study(
        asked, model, run_dir(p.run), family, architecture, layers, ids, window, prompts, words, p.dtype, p.server_url, p.spool,
        tuple(folders), samples,
    )  # fmt: skip


def _check_lists(ids: tuple[int, ...], parties: tuple[str, str], layers: int, family: str) -> None:
    """Raise BoundaryError for ids that name no boundary in the numbering of an engine that will be given them."""
    for engine, convention in (("sglang", "sglang-eagle3"), ("vllm", "vllm")):
        if engine in parties:
            bd.to_boundaries(ids, convention, num_layers=layers, family=family)
    if "vllm" in parties and family == "deepseek" and 0 in ids:
        raise ParamsError(
            got=f"ids {list(ids)}",
            expected="ids from 1 on",
            likely="id 0 ends vLLM's engine on DeepSeek (0.32)",
            next="leave 0 out: the map of boundaries has it from SGLang",
        )


def take(study: Study, party: str) -> tuple[States, dict[int, float]]:
    """Return a party's states on the study's prompts, and the noise that it showed itself ({} where it shows none).

    `party`: sglang (a server of its own, or the study's server_url), vllm, transformers, a URL, or a folder of files.
    """
    prompts = list(study.prompts.values())
    if party == "vllm":
        with starting() as tell:
            return capture.through_vllm(study.model, study.for_vllm, prompts, study.dtype, study.folder / "vllm", tell), {}
    if party == "transformers":
        return capture.through_transformers(study.model, prompts, study.dtype), {}
    if "://" in party or (party == "sglang" and study.server_url):
        url, spool = (study.server_url, study.spool) if party == "sglang" else (party, "")
        return capture.through_hsnb(attach(url, spool=spool), prompts)
    if party == "sglang":
        with starting() as tell:
            server = Server.start(study.deployment, log_dir=study.folder, progress=tell)
        with server:
            return capture.through_hsnb(server, prompts)
    folder = resolve(party)
    return folder_states(folder, study.samples, study.folders.index(folder), study.layers, study.family), {}


def witness(study: Study) -> States | None:
    """Return transformers' states in float32, None when the model does not fit into this machine's memory."""
    return capture.through_transformers(study.model, list(study.prompts.values())) if hf.fits(study.model) else None


def measure(study: Study, a: tuple[States, dict], b: tuple[States, dict], reference: States | None) -> Comparison:
    """Compare two parties; `reference` is the neutral witness."""
    (one, noise_one), (other, noise_other) = a, b
    if one.numbered() and not other.numbered():  # the one whose numbers are known is the measure
        (one, noise_one), (other, noise_other) = b, a
    prompts = list(study.prompts.values())
    least = noise.floor(one.dtype, other.dtype)
    coarse = max(one.dtype, other.dtype, key=lambda d: noise.floor(d))
    estimates, half = [noise_one, noise_other], {}
    if reference is not None:
        estimates.append(noise.by_number(noise.of_dtype(study.model, prompts, reference, coarse), reference))
        half = estimates[-1] if coarse == "bfloat16" else {}
        half = half or noise.by_number(noise.of_dtype(study.model, prompts, reference, "bfloat16"), reference)
    return compare(
        one,
        other,
        noise.combined(other, estimates, least),
        reference=reference,
        reference_noise=noise.combined(reference, estimates, least) if reference is not None else None,
        half_noise=half,
        head=Head.load(study.model),
        names=study.words,
    )


def own_settings(study: Study, sides: dict[str, States], known: States, own_noise: dict[int, float]) -> tuple[Setting, ...]:
    """Give each engine among `sides` the lists of ids by its own option, and find which boundary of `known` each one is.

    `sides`: {party: its states}; vLLM's were taken by its own option already, a list more. `known`: a party whose numbers are
    boundaries (transformers, or SGLang through hsnb). An engine that is compared by URL or by folder is not started for this.
    """
    prompts, result = list(study.prompts.values()), []
    cost, least = steps(known), noise.floor(study.dtype, known.dtype)
    noise_of = noise.combined(known, [own_noise], least)

    def found(taken: States, option: str, ids: Sequence[int], convention: str) -> Setting:
        returned = offsets.find_offsets(distances(taken, known), taken, known, cost, noise_of)
        expected = bd.to_boundaries(ids, convention, num_layers=study.layers, family=study.family)
        return Setting(taken.name, option, tuple(ids), expected, returned, taken)

    if "sglang" in sides and not study.server_url:
        for ids in study.lists:
            with _told(f"SGLang {SGLANG_OPTION} {short(ids)}"), starting() as tell:
                taken = capture.through_sglangs_option(study.deployment, ids, prompts, study.folder, tell)
                result.append(found(taken, SGLANG_OPTION, ids, "sglang-eagle3"))
    if "vllm" in sides:
        result.append(found(sides["vllm"], VLLM_OPTION, study.for_vllm, "vllm"))
        for ids in (i for i in study.lists if len(i) <= len(study.ids)):
            with _told(f"vLLM {VLLM_OPTION} {short(ids)}"), starting() as tell:
                taken = capture.through_vllm(study.model, ids, prompts, study.dtype, study.folder / "vllm", tell)
                result.append(found(taken, VLLM_OPTION, ids, "vllm"))
    return tuple(result)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Say that a list was not measured, and why, and go on: what was measured before is worth its conclusion."""
    try:
        yield
    except ServerError as error:
        print(f"not measured: {what}: {error}")
