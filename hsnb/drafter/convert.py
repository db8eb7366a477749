"""A trained drafter as SGLang loads it: config.json rewritten, every tensor accounted for.

SGLang's LlamaForCausalLMEagle3 (llama_eagle3.py, read in 0.5.17, 0.5.20 and 0.5.23) skips unknown and missing tensors without a
word, reads aux ids from `eagle_config` only, and knows no norm_before_residual: whatever would load and then draft badly is
refused here. No tensor is renamed: its loader knows both `layers.0.` (speculators) and `midlayer.` (SpecForge).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hsnb.boundaries import check_boundaries, from_boundaries, model_family, text_config
from hsnb.drafter.config import IDS, DrafterConfig, read_drafter, trained_on
from hsnb.errors import BoundaryError, ModelError, ParamsError
from hsnb.params import num_layers, read_config
from hsnb.patch.settings import version_tuple
from hsnb.paths import write_json
from hsnb.show import pairs_html
from hsnb.weights import embeddings

LAYER = "layers.0."
_LAYER_TENSORS = (
    "hidden_norm", "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
)  # fmt: skip
DROPPED = ("embed_tokens.weight", "t2d")  # SGLang takes the target's embedding, and makes the map from d2t
_NORMS_SINCE = (0, 5, 17)  # norm_before_fc; fc_norm and norm_output since 0.5.15
_LLAMA_B0_SINCE = (0, 5, 21)
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Converted:
    """A folder that SGLang loads. `ids`: what eagle_config says for `boundaries`; `left_out`: tensors that SGLang has no use for."""

    path: Path
    boundaries: tuple[int, ...]
    ids: tuple[int, ...]
    sglang: str
    family: str
    dtype: str
    bytes: int
    left_out: tuple[str, ...]

    def as_dict(self) -> dict:
        """Return plain values, for --json."""
        return {**asdict(self), "path": str(self.path)}

    def flags(self, steps: int = 3) -> dict:
        """Return the flags of sglang.launch_server for greedy chains of `steps` drafts (all three numbers: one alone asserts)."""
        return {
            "speculative-algorithm": "EAGLE3",
            "speculative-draft-model-path": str(self.path),
            "speculative-num-steps": steps,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": steps + 1,
        }

    def _repr_html_(self) -> str:
        shown = {**self.as_dict(), "bytes": f"{self.bytes:,}"}
        return pairs_html(shown.items())


def convert(
    drafter: Path, out: Path, *, target: Path, sglang: str = "0.5.23", dtype: str = "bfloat16", boundaries: Sequence[int] = ()
) -> Converted:
    """Write the drafter in `drafter` (speculators' save_pretrained, or SpecForge's SGLang export) to `out` as SGLang loads it.

    `target`: the folder of the model it was trained for; `sglang`: the version that will serve. `boundaries`: what it was trained
    on (hsnb.json of the data says); needed where the drafter's own config does not say, and must not contradict it. `dtype` has to
    be the target's own at serving: SGLang casts a float32 config to float16, and dies at the first request of a bfloat16 target.
    Raises ModelError for a drafter that SGLang cannot run as it was trained, BoundaryError for boundaries it cannot be fed.
    """
    config, target_config = read_drafter(drafter), read_config(target)
    if dtype not in _DTYPES:
        raise ParamsError(got=f"dtype {dtype!r}", expected=f"one of: {', '.join(_DTYPES)}", likely="a typo", next="--dtype bfloat16")
    wanted = trained_boundaries(config, target_config, boundaries)
    layers, family = num_layers(target_config), model_family(target_config)
    ids = servable_ids(wanted, layers, family, sglang)
    refuse_untranslatable(config, sglang, len(wanted))
    tensors = read_tensors(Path(drafter))
    keep = check_tensors(config, tensors, len(wanted), int(text_config(target_config)["vocab_size"]))
    _same_embedding(config, tensors, target)
    cast = {name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: cast[name].contiguous() for name in keep}, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", sglang_config(config, target_config, wanted, ids, dtype))
    size = (out / "model.safetensors").stat().st_size
    return Converted(out, wanted, tuple(ids), sglang, family, dtype, size, tuple(sorted(set(tensors) - set(keep))))


def trained_boundaries(config: DrafterConfig, target_config: Mapping, given: Sequence[int]) -> tuple[int, ...]:
    """Return what the drafter was trained on, from its config and from `given`. Raises BoundaryError when unknown or at odds."""
    said = trained_on(config, target_config=target_config)
    if given:
        wanted = check_boundaries(given, num_layers(dict(target_config)))
        if config.kind == "speculators" and said and said.boundaries != wanted:
            raise BoundaryError(
                got=f"boundaries {list(wanted)} given",
                expected=f"{list(said.boundaries)}, which the drafter's {said.where} names",
                likely="the data of another run, or a trainer that was told other --target-layer-ids than the data's boundaries",
                next="train again with --target-layer-ids " + " ".join(map(str, wanted)),
            )
        return wanted
    if said and (config.kind == "speculators" or "hsnb_boundaries" in config.raw):
        return said.boundaries
    raise BoundaryError(
        got="a drafter whose config does not say what it was trained on" if said is None else f"SpecForge's {said.where} {said.ids}",
        expected="the boundaries it was trained on",
        likely="an override of the run (aux_hidden_state_layer_ids) is not written into SpecForge's export"
        if config.kind == "sglang"
        else "speculators 0.3 and 0.4 do not write them",
        next="give them: --boundaries 2 15 27 (hsnb.json beside the data says which)",
    )


def servable_ids(boundaries: tuple[int, ...], layers: int, family: str, sglang: str) -> list[int]:
    """Return the ids of eagle_config that make SGLang capture `boundaries`. Raises BoundaryError for what it cannot capture."""

    def refuse(which: int, why: str) -> BoundaryError:
        return BoundaryError(
            got=f"boundary {which}", expected=f"boundaries that SGLang {sglang} can feed to a drafter", likely=why, next="train without it"
        )

    if layers in boundaries:
        raise refuse(layers, "it takes aux states before a layer, and there is no layer after the last")
    if 0 in boundaries and family == "llama" and version_tuple(sglang) < _LLAMA_B0_SINCE:
        raise refuse(0, "before 0.5.21 its loop adds a residual that layer 0 does not have yet")
    if len(boundaries) < 2:
        raise refuse(boundaries[0], "with one aux state the widths agree, and SGLang skips fc: at least two are needed")
    return from_boundaries(boundaries, "sglang-eagle3", num_layers=layers, family=family)


def refuse_untranslatable(config: DrafterConfig, sglang: str, num_aux: int) -> None:
    """Raise ModelError for what this SGLang's Llama drafter does not have, with the flag to train again with."""
    raw, layer = config.raw, config.layer

    def refuse(got: str, why: str, next: str) -> ModelError:
        return ModelError(got=got, expected=f"a drafter that SGLang {sglang} runs as it was trained", likely=why, next=next)

    if raw.get("norm_before_residual"):
        why = "speculators' default; SGLang's Llama drafter has no such option and would run it otherwise: accept length 1.07 for 1.37"
        raise refuse("norm_before_residual true", why, "train again with --no-norm-before-residual")
    if raw.get("norm_before_fc") and version_tuple(sglang) < _NORMS_SINCE:
        raise refuse("norm_before_fc true", "SGLang has it since 0.5.17", "train again with --no-norm-before-fc, or serve with a newer one")
    if raw.get("norm_before_fc") and raw.get("fc_norm"):
        raise refuse("norm_before_fc and fc_norm", "they exclude each other in speculators", "train again with one of them")
    if raw.get("embed_requires_grad"):
        raise refuse("embed_requires_grad true", "SGLang takes the target's embedding for the trained one", "train again without it")
    if layer.get("model_type", "llama") != "llama":
        raise refuse(f"a {layer['model_type']} layer", "LlamaForCausalLMEagle3 is a Llama layer", "train again with --draft-arch llama")
    if int(layer.get("num_hidden_layers", 1)) != 1:
        raise refuse(f"{layer['num_hidden_layers']} layers", "only one layer was read and run", "train again with --num-layers 1")
    if config.kind == "sglang" and raw.get("norm_output") is False and "hsnb_boundaries" not in raw:
        why = "in SpecForge it means no norm before lm_head, which SGLang always has"
        raise refuse("SpecForge's norm_output false", why, "train again with norm_output: true")


def tensor_shapes(config: DrafterConfig, num_aux: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that SGLang needs of this drafter, in speculators' names."""
    layer = config.layer
    width, inner = int(layer["hidden_size"]), int(layer["intermediate_size"])
    heads, kv = int(layer["num_attention_heads"]), int(layer.get("num_key_value_heads") or layer["num_attention_heads"])
    size = int(layer.get("head_dim") or width // heads)
    target_width = int(config.raw.get("target_hidden_size") or width)
    draft_vocab = int(config.raw.get("draft_vocab_size") or vocab)
    shapes = dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (width,))
    shapes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    shapes |= {"self_attn.q_proj": (heads * size, 2 * width), "self_attn.o_proj": (width, heads * size)}
    shapes |= {f"self_attn.{name}_proj": (kv * size, 2 * width) for name in "kv"}
    shapes = {f"{LAYER}{name}.weight": shapes[name] for name in _LAYER_TENSORS}
    shapes |= {"fc.weight": (width, num_aux * target_width), "norm.weight": (width,), "lm_head.weight": (draft_vocab, width)}
    if draft_vocab != vocab:
        shapes["d2t"] = (draft_vocab,)
    if config.raw.get("norm_before_fc"):
        shapes["input_norm.weight"] = (num_aux * target_width,)
    if config.raw.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(num_aux)}
    return shapes


def check_tensors(config: DrafterConfig, tensors: Mapping[str, torch.Tensor], num_aux: int, vocab: int) -> list[str]:
    """Return the names to keep. Raises ModelError for a tensor that is missing, unknown, of another shape, or a d2t out of range."""
    wanted = tensor_shapes(config, num_aux, vocab)
    known = {name: name.replace("midlayer.", LAYER) for name in tensors}
    found = {known[name]: tuple(tensor.shape) for name, tensor in tensors.items()}
    problem = ""
    if missing := sorted(set(wanted) - set(found)):
        problem = f"no {missing[0]}" + (f" ({len(missing)} missing)" if len(missing) > 1 else "")
    elif unknown := sorted(set(found) - set(wanted) - set(DROPPED)):
        problem = f"{unknown[0]}, which it does not know" + (f" ({len(unknown)} such)" if len(unknown) > 1 else "")
    elif wrong := [name for name, shape in wanted.items() if found[name] != shape]:
        problem = f"{wrong[0]} {list(found[wrong[0]])}, expected {list(wanted[wrong[0]])}"
    elif "d2t" in wanted:
        ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
        if not (int(ids.min()) >= 0 and int(ids.max()) < vocab and len(ids.unique()) == len(ids)):
            problem = "d2t, which does not name each of its tokens once in the target's vocabulary (offsets are expected)"
    if problem:
        raise ModelError(
            got=f"{problem}",
            expected=f"the {len(wanted)} tensors of SGLang's LlamaForCausalLMEagle3",
            likely="a drafter with another layer, or a checkpoint that is not whole; SGLang would skip what it does not find",
            next="train with a Llama layer and save with save_pretrained",
        )
    return [name for name in tensors if known[name] in wanted]


def sglang_config(config: DrafterConfig, target_config: Mapping, boundaries: tuple[int, ...], ids: Sequence[int], dtype: str) -> dict:
    """Return the config.json that SGLang loads: the Llama fields flat, its own names for the options, the ids in eagle_config."""
    raw, layer = config.raw, {k: v for k, v in config.layer.items() if k not in ("_name_or_path", "torch_dtype", "eagle_config", IDS)}
    rope = layer.get("rope_parameters") or {}
    vocab = int(text_config(dict(target_config))["vocab_size"])
    layer.pop("norm_output", None)  # SpecForge's key means another thing than SGLang's
    layer.pop("target_hidden_size", None)  # null breaks fc
    ours = config.kind == "speculators" or "hsnb_boundaries" in raw
    layer |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,  # the target's own true would make lm_head the embedding
        "vocab_size": vocab,
        "draft_vocab_size": int(raw.get("draft_vocab_size") or vocab),
        "norm_before_fc": bool(raw.get("norm_before_fc", False)),
        "fc_norm": bool(raw.get("fc_norm", False)),
        "num_aux_hidden_states": len(boundaries),
        "rope_theta": rope.get("rope_theta", layer.get("rope_theta", 10000.0)),
        "dtype": dtype,
        "torch_dtype": dtype,
        "eagle_config": {"use_aux_hidden_state": True, IDS: list(ids)},
        "hsnb_boundaries": list(boundaries),
    }
    if ours:
        layer["norm_output"] = bool(raw.get("norm_output", False))
    if raw.get("target_hidden_size"):
        layer["target_hidden_size"] = int(raw["target_hidden_size"])
    return layer


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the safetensors files in `folder`. Raises ModelError when there are none, or one is not whole."""
    try:
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            got=f"{folder}: {error}", expected="whole safetensors files", likely="a file that was cut", next="save the drafter again"
        ) from error
    if not tensors:
        raise ModelError(
            got=f"{folder}: no *.safetensors",
            expected="a drafter's weights",
            likely="a trainer's checkpoint of another format",
            next="save it with save_pretrained",
        )
    return tensors


def _same_embedding(config: DrafterConfig, tensors: Mapping[str, torch.Tensor], target: Path) -> None:
    """Raise ModelError when the drafter's own embedding, which SGLang replaces, is not the target's."""
    own = tensors.get("embed_tokens.weight")
    if own is None:
        return
    theirs = embeddings(target)
    if own.shape != theirs.shape or not torch.allclose(own.float(), theirs.float(), rtol=1e-2, atol=1e-4):
        raise ModelError(
            got=f"an embedding {list(own.shape)} that is not the target's {list(theirs.shape)}",
            expected="the target's own, which SGLang puts in its place",
            likely="a drafter of another model, or one whose embedding was trained",
            next="name the target that it was trained for, or train with a frozen embedding",
        )
