"""What SGLang 0.5.17 to 0.5.23 needs on a plain CPU and not on CUDA; installed by requirements/sglang-cpu.txt's users only.

1. torchvision's wheel is a CUDA build: under a CPU torch its operators are missing, and its import dies registering fake
   kernels for them. The .pth file beside this module installs a finder (no torch import, a few ms) that declares the two
   operators just in time. It has to be environment-wide: SGLang and transformers import torchvision long before a plug-in runs.
2. DeepSeek's MLA has no handler for the torch_native attention backend: the plug-in registers the plain one.
3. `sgl_kernel` (beside this module) stands in for the CUDA kernels package.
"""

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


def register():
    """SGLang's plug-in entry point: let DeepSeek run its MLA on torch_native."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
