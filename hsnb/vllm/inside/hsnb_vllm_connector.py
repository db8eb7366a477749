"""vLLM's own connector for hidden states, with its one CUDA-only step replaced, for a CPU. On CUDA the stock one is used.

Read and run in vLLM 0.32.0: `ExampleHiddenStatesConnector._submit_async_write` copies through a CUDA stream into pinned memory,
and dies on a CPU with "Cannot access accelerator device". Which rows are whose, and what they hold, stays vLLM's.
"""

import fcntl
import os
from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Copied:
    """Stands for the CUDA event of a copy that is finished already."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class CPUHiddenStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending) -> None:
        """Copy the rows of a finished request out of the cache, and hand them to the thread that writes files."""
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (torch.arange(self._block_size)[None, :] + blocks[:, None] * self._block_size).flatten()
        rows = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone()  # the blocks are freed next
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        tensors, event = {"hidden_states": rows, "token_ids": pending.token_ids.clone()}, _Copied()
        future = self._executor.submit(self._write_tensors, tensors, event, pending.filename, lock)
        self._req_copy_events[pending.req_id] = event
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
