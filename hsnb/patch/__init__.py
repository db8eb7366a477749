"""The plug-in: the code that runs inside SGLang's processes. Opt-in by SGLANG_HS_DUMP_DIR; unset, it leaves no trace."""

from __future__ import annotations

import os


def register() -> None:
    """Register the hooks; SGLang calls this in the launcher, in every scheduler and in the detokenizer.

    SGLang only logs an exception raised here and starts without the plug-in, so a refusal is also written to
    armed-0.json, where the client looks for it.
    """
    if os.environ.get("SGLANG_HS_DRAFTER_DIR"):  # a server with a drafter: nothing is captured, it is asked what it feeds
        from hsnb.drafter.inside import register_hooks as register_drafter_hooks

        register_drafter_hooks()
    if not os.environ.get("SGLANG_HS_DUMP_DIR"):
        return
    from hsnb.patch.arm import register_hooks

    register_hooks()
