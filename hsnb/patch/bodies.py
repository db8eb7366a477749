"""The model bodies that capture is proved for: one line each. docs/models.md says what was run, and why others are not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hsnb.patch.settings import version_tuple


@dataclass(frozen=True)
class Body:
    """A class with SGLang's EAGLE-3 capture: forward(input_ids, positions, forward_batch, ...), layers, layers_to_capture, norm.

    `boundary_0_since`: before this SGLang version its loop either adds a residual that layer 0 does not have yet (an error),
    or keeps the embeddings by reference, into which a GPU's fused norm then adds the first attention's output (a wrong B_0).
    `flag`: the attribute of each layer that its loop looks at instead of layers_to_capture.
    """

    boundary_0_since: str = "0.5.17"
    flag: str = ""

    def asked(self, module) -> list[int]:
        """Return the ids whose states the loop of `module` hands out now, read from what that loop reads."""
        if self.flag:
            return [i for i, layer in enumerate(module.layers) if getattr(layer, self.flag, False)]
        return list(module.layers_to_capture)

    @contextmanager
    def asking(self, module, ids: Sequence[int]) -> Iterator[None]:
        """Have the loop hand out the states at `ids`, and give everything back as it was.

        Set directly, never by the model's setter: setters shift ids, by version and model family.
        """
        own, module.layers_to_capture = module.layers_to_capture, list(ids)
        flags = {i: vars(layer).get(self.flag) for i, layer in enumerate(module.layers)} if self.flag else {}
        try:
            for i in flags:
                setattr(module.layers[i], self.flag, i in ids)
            yield
        finally:
            module.layers_to_capture = own
            for i, value in flags.items():
                if value is None:
                    delattr(module.layers[i], self.flag)
                else:
                    setattr(module.layers[i], self.flag, value)


_PER_LAYER = "_is_layer_to_capture"
BODIES = {  # class name in SGLang: read in 0.5.17, 0.5.20 and 0.5.23
    "DeepseekV2Model": Body(),  # DeepSeek-V2, -V3, -R1, and Kimi-K2 and K2.5 around it
    "Glm4Model": Body(boundary_0_since="0.5.21"),
    "Glm4MoeModel": Body(boundary_0_since="0.5.21"),
    "LlamaModel": Body(boundary_0_since="0.5.21"),  # Llama 3, Mistral
    "MiniMaxM2Model": Body(),
    "Qwen2Model": Body(boundary_0_since="0.5.21"),
    "Qwen2MoeModel": Body(flag=_PER_LAYER),
    "Qwen3Model": Body(boundary_0_since="0.5.21"),
    "Qwen3MoeModel": Body(flag=_PER_LAYER),
}
REFUSED = {  # class name: why its aux states are not taken for boundaries; read in the same versions
    "Gemma3TextModel": "its aux states are the blocks' outputs without the residual, at every id but 0",
    "Gemma4TextModel": "read only: SGLang serves it with no attention backend that a plain CPU has, so nothing was compared",
    "GptOssModel": "read only: SGLang serves it with no attention backend that a plain CPU has, so nothing was compared",
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


def body_config(model, body):
    """Return the config of the language model that `body` is: its own, or its owner's (MiniMax-M2 and gpt-oss keep none)."""
    for module in (body, *(m for m in model.modules() if getattr(m, "model", None) is body)):
        if hasattr(module, "config"):
            return module.config
    raise LookupError(f"no config for {type(body).__name__}")


def check_boundaries(boundaries: tuple[int, ...], num_layers: int, body: Body, version: str) -> None:
    """Raise ValueError for a boundary that this model in this SGLang version cannot give."""
    if not all(0 <= b <= num_layers for b in boundaries):
        raise ValueError(f"boundaries {list(boundaries)} of a model with {num_layers} layers, expected each in 0..{num_layers}")
    if 0 in boundaries and version_tuple(version) < version_tuple(body.boundary_0_since):
        raise ValueError(f"boundary 0 needs SGLang {body.boundary_0_since} for this model, this is {version}")
