"""vLLM's worker extension: say which model was really loaded and armed, and the second way to its states, by forward hooks.

The hooks share nothing with vLLM's own extraction: no speculative config, no aux list, no cache, no connector. A decoder layer
of vLLM takes (positions, hidden_states, residual, ...) and the residual stream at its input is the sum of the last two (read in
0.32.0 for Llama and DeepSeek; another model's first forward is refused, not guessed). Eager mode only: a compiled forward or a
CUDA graph skips Python.
"""

import inspect

import torch
from safetensors.torch import save_file


class HiddenStatesWorker:
    """Mixed into vLLM's Worker by `worker_extension_cls`; `self.model_runner` is the worker's own."""

    def hsnb_describe(self) -> dict:
        """Return the class of the loaded model, its number of layers, its dtype, and the aux ids as the model holds them."""
        model = self.model_runner.get_model()
        decoder = self._hsnb_decoder()
        ids = getattr(decoder, "aux_hidden_state_layers", None)
        return {
            "model_class": type(model).__name__,
            "num_layers": len(decoder.layers),
            "dtype": str(self.model_runner.model_config.dtype).removeprefix("torch."),  # of the states; weights may be quantised
            "ids_read_back": None if ids is None else [int(i) for i in ids],
            "hidden_size": int(self.model_runner.model_config.get_hidden_size()),
        }

    def _hsnb_decoder(self):
        model = self.model_runner.get_model()
        model = getattr(model, "language_model", model)  # Kimi-K2.5 and other wrappers
        return model.model

    def hsnb_hook(self, ids: list) -> None:
        """Keep the residual stream at the input of each layer named in `ids`; an id of L: at the input of the final norm."""
        decoder = self._hsnb_decoder()
        layers = list(decoder.layers)
        self._hsnb_rows = {k: [] for k in ids}
        for k in ids:
            module = layers[k] if k < len(layers) else decoder.norm
            module.register_forward_pre_hook(self._hsnb_keep(k, module), with_kwargs=True)

    def _hsnb_keep(self, k: int, module):
        # vLLM's norms are CustomOps, whose forward(*args, **kwargs) hands on to forward_native or a kernel of the same signature.
        signature = inspect.signature(getattr(module, "forward_native", module.forward))
        state = next((name for name in ("hidden_states", "x") if name in signature.parameters), None)
        if state is None or "residual" not in signature.parameters:
            raise NotImplementedError(
                f"{type(module).__name__}.forward{signature} has no hidden_states (or x) and residual: hooks cannot read its input"
            )

        def keep(_module, args, kwargs):
            given = signature.bind(*args, **kwargs).arguments
            rows, residual = given[state], given.get("residual")
            self._hsnb_rows[k].append((rows if residual is None else rows + residual).detach().clone())  # overwritten in place later

        return keep

    def hsnb_forget(self) -> None:
        """Drop what was kept so far: vLLM's own warm-up, or the prompt before."""
        for rows in self._hsnb_rows.values():
            rows.clear()

    def hsnb_write(self, file: str, num_tokens: int) -> None:
        """Write the first `num_tokens` rows of what was kept, [num_tokens, ids, H], ids ascending; rank 0 of TP only.

        The batch holds one request, so its rows come in order, chunk by chunk; rows past the prompt are generated tokens.
        """
        if self.rank == 0:
            states = torch.stack([torch.cat(self._hsnb_rows[k])[:num_tokens] for k in sorted(self._hsnb_rows)], dim=1)
            save_file({"hidden_states": states.cpu().contiguous()}, file)
