"""The modes of a server that capture is not proved in, by the name of the flag; read in SGLang 0.5.17, 0.5.20 and 0.5.23.

Fused all-reduce (flashinfer, aiter; on by default on SM90 and SM100 with tp > 1) is left as the engine chooses it, with two
exceptions. It leaves a block's output un-reduced until the next layer's norm, so whoever adds hidden + residual in the loop
keeps a rank's partial sum. DeepSeek, Kimi, Qwen and MiniMax take the residual after that norm (0.5.17, 0.5.20:
communicator.prepare_attn_and_capture_last_layer_outputs; since 0.5.21 StageBoundary._prepare_attention, which also completes the
sum first for all others); Llama, GLM-4, Gemma and dense Qwen did not defer sums before 0.5.21. The last layer never defers, or
is completed before the final norm. A drafter is served with the same kernels. The exceptions are `ADDS_IN_THE_LOOP`.
"""

from __future__ import annotations

from types import SimpleNamespace

from hsnb.patch.settings import version_tuple

ADDS_IN_THE_LOOP = {"Glm4MoeModel": "Glm4MoeForCausalLM", "GptOssModel": "GptOssForCausalLM"}  # body: architecture in config.json
SUMS_FIRST_SINCE = (0, 5, 21)  # there the aux path of these two completes the sum, too
ON = {  # attribute of ServerArgs: the flag that turned it on
    "enable_return_aux_hidden_states": "--enable-return-aux-hidden-states",
    "speculative_algorithm": "--speculative-algorithm",
    "enable_mixed_chunk": "--enable-mixed-chunk",
    "enable_pdmux": "--enable-pdmux",
    "enable_torch_compile": "--enable-torch-compile",
    "enable_two_batch_overlap": "--enable-two-batch-overlap",
    "enable_single_batch_overlap": "--enable-single-batch-overlap",
    "enable_dp_attention": "--enable-dp-attention",
    "enable_prefill_cp": "--enable-prefill-cp",
    "enable_prefill_context_parallel": "--enable-prefill-context-parallel",
    "enable_dsa_prefill_context_parallel": "--enable-dsa-prefill-context-parallel",
    "enable_attn_tp_input_scattered": "--enable-attn-tp-input-scattered",
    "enable_layernorm_sp": "--enable-layernorm-sp",
    "dllm_algorithm": "--dllm-algorithm",
}
PARTS = {  # attribute, expected to be 1: what it splits
    "pp_size": "--pp-size gives each rank a part of the layers",
    "dp_size": "--dp-size splits the requests over replicas",
    "attn_dp_size": "--attn-dp-size splits the requests over groups of ranks",
    "attn_cp_size": "--attn-cp-size splits a sequence over ranks",
    "dcp_size": "--dcp-size splits a sequence over ranks",
    "moe_dp_size": "--moe-dp-size scatters the tokens over ranks",
    "dwdp_size": "--dwdp-size scatters the tokens over ranks",
    "ep_size": "--ep-size scatters the tokens over ranks, with most backends",
    "nnodes": "--nnodes spreads a server over hosts, the spool is on one",
}


def settled() -> SimpleNamespace:
    """Return the arguments that this scheduler runs with, as /server_info shows them.

    Not `runner.server_args`: since 0.5.20 that is what was typed, and says nothing of what is on by default (a prefill CUDA graph)
    or goes by another name in the end (--enable-dp-attention).
    """
    from sglang.srt.runtime_context import get_context

    return SimpleNamespace(**get_context().resolved_server_args_dict())


def unsupported(args) -> str:
    """Return the flag that capture is not proved with and its remedy, "" when there is none. `args`: as `settled` gives them."""
    for name, flag in ON.items():
        if value := getattr(args, name, None):
            return f"{name} is {value!r}: start the server without {flag}"
    for name, splits in PARTS.items():
        if (value := int(getattr(args, name, 1) or 1)) > 1:
            return f"{name} is {value}, expected 1 ({splits}): use tensor parallelism alone (--tp-size)"
    if (backend := getattr(args, "moe_a2a_backend", None) or "none") != "none":
        return f"moe_a2a_backend is {backend!r}: start the server without --moe-a2a-backend, it scatters the tokens over ranks"
    if (mode := getattr(args, "disaggregation_mode", None) or "null") != "null":
        return f"disaggregation_mode is {mode!r}: start the server without --disaggregation-mode"
    if (graph := prefill_graph(args)) not in ("", "disabled"):
        return f"the prefill CUDA graph is {graph!r}, and its replay skips the code that captures: use --disable-prefill-cuda-graph"
    return ""


def partial_sums(args, body: str, version: str) -> str:
    """Return why fused all-reduce would give this body's ranks partial sums, "" when it would not."""
    fused = getattr(args, "flashinfer_allreduce_fusion_backend", None) or getattr(args, "enable_aiter_allreduce_fusion", False)
    if body not in ADDS_IN_THE_LOOP or version_tuple(version) >= SUMS_FIRST_SINCE or args.tp_size == 1 or not fused:
        return ""
    return (
        f"fused all-reduce ({fused}) leaves {body}'s states un-reduced in SGLang {version}: "
        "use --enforce-disable-flashinfer-allreduce-fusion (and no --enable-aiter-allreduce-fusion), or 0.5.21 and newer"
    )


def prefill_graph(args) -> str:
    """Return the backend of the prefill CUDA graph that SGLang settled on, "" where there is none to read."""
    config = getattr(args, "cuda_graph_config", None)
    if not isinstance(config, dict):  # 0.5.17 keeps the object
        config = {"prefill": vars(getattr(config, "prefill", SimpleNamespace()))}
    backend = (config.get("prefill") or {}).get("backend")
    return "" if backend is None else str(getattr(backend, "value", backend))
