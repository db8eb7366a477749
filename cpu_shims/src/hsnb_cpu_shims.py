"""What SGLang 0.5.17 to 0.5.23 needs on a plain CPU and not on CUDA; installed by requirements/sglang-cpu.txt's users only.

1. torchvision's wheel is a CUDA build: under a CPU torch its operators are missing, and its import dies registering fake
   kernels for them. The .pth file beside this module installs a finder (no torch import, a few ms) that declares the two
   operators just in time. It has to be environment-wide: SGLang and transformers import torchvision long before a plug-in runs.
2. DeepSeek's MLA has no handler for the torch_native attention backend: the plug-in registers the plain one.
3. GGUF checkpoints: SGLang imports their kernels on CUDA only; the plug-in gives the same names in plain torch.
4. MiniMax-M2 norms its queries and keys in Triton: the plug-in puts plain torch in its place.
5. `sgl_kernel` (beside this module) stands in for the CUDA kernels package.
6. Each of a server's three processes imports SGLang anew, a dozen CPU seconds, a fifth of them the garbage collector's, which finds
   nothing to collect among modules: it waits until the plug-ins are loaded.
"""

import gc
import os
import sys

_libraries = []  # a torch.library.Library takes its operators along when it is collected


class _DeclareTorchvisionOps:
    """A finder that finds nothing: it only acts just before torchvision registers its fake kernels."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision._meta_registrations":  # by now torchvision has tried to load its extension, and failed or not
            sys.meta_path.remove(_DeclareTorchvisionOps)
            import torch

            for op in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, op):  # a second definition would raise
                    library = torch.library.Library("torchvision", "FRAGMENT")
                    library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                    _libraries.append(library)


def install():
    """Called from hsnb_cpu_shims.pth at every interpreter's start."""
    sys.meta_path.insert(0, _DeclareTorchvisionOps)
    server = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and {"sglang.launch_server", "--multiprocessing-fork"} & set(sys.orig_argv)
    if server and "hsnb_cpu_shims" in os.environ.get("SGLANG_PLUGINS", "hsnb_cpu_shims"):
        gc.disable()  # only where register() will be called, which gives it back


def register():
    """SGLang's plug-in entry point: DeepSeek's MLA on torch_native, drafters, GGUF weights dequantised, MiniMax-M2's norms."""
    gc.enable()
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
    _name_gguf_kernels()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for function in (rms_sumsq_serial, rms_apply_serial):
        HookRegistry.register(f"sglang.srt.models.minimax_m2.{function.__name__}", function, HookType.REPLACE)

    import hsnb_cpu_speculation

    hsnb_cpu_speculation.install()


def rms_sumsq_serial(q, k):
    """Return each row's sum of squares [2, tokens] in float32; ranks add theirs up."""
    import torch

    return torch.stack([x.float().pow(2).sum(-1) for x in (q, k)])


def rms_apply_serial(q, k, q_weight, k_weight, sum_sq, tp_world=1, eps=1e-5):
    """Return the RMS-normed q and k, whose rows are one rank's part of `tp_world`."""
    pairs = zip((q, k), (q_weight, k_weight), sum_sq, strict=True)
    return tuple((x.float() * (s[:, None] / (x.shape[1] * tp_world) + eps).rsqrt() * w.float()).to(x.dtype) for x, w, s in pairs)


def _name_gguf_kernels():
    """Define what sglang.srt.layers.quantization.gguf calls for dense layers; the kernels of experts stay missing.

    The CUDA kernels quantise the activations as well (a8). These do not: a weight is what the package gguf makes of it.
    """
    import torch
    from gguf import GGMLQuantizationType, dequantize
    from sglang.srt.layers.quantization import gguf as module

    def ggml_dequantize(weight, kind, rows, columns, dtype):
        return torch.from_numpy(dequantize(weight.numpy(), GGMLQuantizationType(kind))).to(dtype)

    def multiply(weight, x, kind, rows):
        return x @ ggml_dequantize(weight, kind, rows, None, x.dtype).T

    module.ggml_dequantize, module.ggml_mul_mat_a8, module.ggml_mul_mat_vec_a8 = ggml_dequantize, multiply, multiply
