"""What runs inside vLLM's own environment. Standard library, torch, safetensors and vllm only: hsnb is not installed there.

The files are run by path, so that their folder is where vLLM looks for `hsnb_vllm_connector` and `hsnb_vllm_worker`.
"""
