"""The model bodies that capture is proved for: one line each. docs/models.md says what was run, and why others are not here."""

from __future__ import annotations

from dataclasses import dataclass

from hsnb.patch.settings import version_tuple


@dataclass(frozen=True)
class Body:
    """A class with SGLang's EAGLE-3 capture: forward(input_ids, positions, forward_batch, ...), layers, layers_to_capture, norm.

    `boundary_0_since`: before this SGLang version its loop either adds a residual that layer 0 does not have yet (an error),
    or keeps the embeddings by reference, into which a GPU's fused norm then adds the first attention's output (a wrong B_0).
    """

    boundary_0_since: str = "0.5.17"


BODIES = {  # class name in SGLang: read in 0.5.17, 0.5.20 and 0.5.23
    "DeepseekV2Model": Body(),  # DeepSeek-V2, -V3, -R1, and Kimi-K2 and K2.5 around it
    "Glm4MoeModel": Body(boundary_0_since="0.5.21"),
    "LlamaModel": Body(boundary_0_since="0.5.21"),  # Llama 3, Mistral
    "Qwen3Model": Body(boundary_0_since="0.5.21"),
}
REFUSED = {  # class name: why its aux states are not taken for boundaries; read in the same versions
    "Qwen2MoeModel": "its loop looks at a flag of each layer, not at layers_to_capture",
    "Qwen3MoeModel": "its loop looks at a flag of each layer, not at layers_to_capture",
    "Gemma3TextModel": "its aux states are the blocks' outputs without the residual, at every id but 0",
}


def find_body(model):
    """Return (module, Body) of the first module of `model` whose class is in the table. Raises LookupError naming the classes."""
    for module in model.modules():
        if type(module).__name__ in BODIES and hasattr(module, "layers_to_capture"):
            return module, BODIES[type(module).__name__]
    inner = sorted({type(m).__name__ for m in model.modules() if hasattr(m, "layers_to_capture")})
    if not inner:
        why = "it has no module with layers_to_capture"
    elif inner[0] in REFUSED:
        why = f"{inner[0]}: {REFUSED[inner[0]]}"
    else:
        why = f"{inner[0]} has layers_to_capture, and is not proved"
    raise LookupError(f"no capture for {type(model).__name__}: {why}; hsnb/patch/bodies.py has {', '.join(BODIES)}")


def check_boundaries(boundaries: tuple[int, ...], num_layers: int, body: Body, version: str) -> None:
    """Raise ValueError for a boundary that this model in this SGLang version cannot give."""
    if not all(0 <= b <= num_layers for b in boundaries):
        raise ValueError(f"boundaries {list(boundaries)} of a model with {num_layers} layers, expected each in 0..{num_layers}")
    if 0 in boundaries and version_tuple(version) < version_tuple(body.boundary_0_since):
        raise ValueError(f"boundary 0 needs SGLang {body.boundary_0_since} for this model, this is {version}")
