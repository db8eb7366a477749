"""EAGLE-3 chains on a plain CPU: SGLang knows speculation there with the intel_amx backend only.

Two things are added to torch_native: a backend for drafting (step i attends to the prefix and the i + 1 draft tokens written so
far), and verification (an extend whose prefix is what the request has, and whose tokens are the drafts). Read and run in SGLang
0.5.17 and 0.5.23; sgl_kernel/speculation.py has the ops.
"""

import inspect


def install():
    """Teach torch_native to draft and to verify chains."""
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    class DraftStep(TorchNativeAttnBackend):
        """One step of a chain; the batch's seq_lens are those of the prefix."""

        def __init__(self, runner, step):
            super().__init__(runner)
            self.step = step

        def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            prefix = forward_batch.seq_lens
            forward_batch.seq_lens = prefix + self.step + 1
            try:
                return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            finally:
                forward_batch.seq_lens = prefix

    class Chain:
        """The container of steps that SGLang asks for."""

        def __init__(self, runner, topk, steps):
            if topk != 1:
                raise ValueError("torch_native drafts chains only: --speculative-eagle-topk 1")
            self.attn_backends = [DraftStep(runner, step) for step in range(steps)]

        def init_forward_metadata(self, forward_batch):
            for backend in self.attn_backends:
                backend.init_forward_metadata(forward_batch)

    plain_extend = TorchNativeAttnBackend.forward_extend

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not forward_batch.forward_mode.is_target_verify():
            return plain_extend(self, q, k, v, layer, forward_batch, save_kv_cache)
        drafts = forward_batch.spec_info.draft_token_num
        kept = forward_batch.seq_lens, forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens
        forward_batch.seq_lens = kept[0] + drafts
        forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens = kept[0], torch.full_like(kept[0], drafts)
        try:
            return plain_extend(self, q, k, v, layer, forward_batch, save_kv_cache)
        finally:
            forward_batch.seq_lens, forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens = kept

    TorchNativeAttnBackend.forward_extend = forward_extend
    original = DraftBackendFactory._create_backend
    stamped = "stamps_children" in inspect.signature(original).parameters  # 0.5.23's factories return (name, backend)

    def create(self, backend_name, backend_map, error_template, **more):
        runner = self.draft_model_runner
        steps = "in decode attention backend" in error_template  # the multi-step one; the other extends the drafter's KV
        make = (lambda: Chain(runner, self.topk, self.speculative_num_steps)) if steps else (lambda: TorchNativeAttnBackend(runner))
        entry = (lambda: ("torch_native", make())) if stamped else make
        return original(self, backend_name, {**backend_map, "torch_native": entry}, error_template, **more)

    DraftBackendFactory._create_backend = create
