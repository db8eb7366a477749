"""The ops that SGLang's CPU path of speculative decoding names, in plain torch, for chains (topk 1) only.

Read in SGLang 0.5.17 (speculative/eagle_utils.py, spec_utils.py) and 0.5.23 (kernels/ops/speculative): the same names and
arguments. `retrive` is their spelling.
"""

import ctypes

import torch


def assign_draft_cache_locs_contiguous_cpu(req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps):
    """Copy each request's topk * num_steps slots from seq_lens on out of its row of req_to_token."""
    n = topk * num_steps
    for i, (row, start) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        out_cache_loc[i * n : (i + 1) * n] = req_to_token[row, start : start + n].to(out_cache_loc.dtype)


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Copy each request's slots [start, end) out of its row of req_to_token, one request after the other."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        out_cache_loc[taken : taken + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        taken += end - start


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling,
    topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    """Lay out a chain: token j of a request follows token j - 1 and nothing else. The mask is [draft tokens, draft tokens] a request."""
    if topk != 1:
        raise NotImplementedError("chains only on a CPU: --speculative-eagle-topk 1")
    requests, n = verified_seq_len.numel(), draft_token_num
    steps = torch.arange(n)
    positions.copy_((verified_seq_len.view(-1, 1).to(torch.long) + steps).reshape(-1))
    retrieve_index.copy_(torch.arange(requests * n).view(requests, n))
    retrieve_next_token[:, :-1] = steps[1:]
    tree_mask.view(-1)[: requests * n * n] = torch.ones(n, n, dtype=torch.bool).tril().repeat(requests, 1).reshape(-1)


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict
):
    """Accept each request's leading drafts that are the target's own choice, and predict the target's token after them."""
    requests, n = candidates.shape
    for b in range(requests):
        accepted = 0
        accept_index[b, 0] = retrive_index[b, 0]
        while accepted + 1 < n and int(candidates[b, accepted + 1]) == int(target_predict[b, accepted]):
            predicts[int(retrive_index[b, accepted])] = target_predict[b, accepted].to(predicts.dtype)
            accepted += 1
            accept_index[b, accepted] = retrive_index[b, accepted]
        predicts[int(retrive_index[b, accepted])] = target_predict[b, accepted].to(predicts.dtype)
        accept_token_num[b] = accepted


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """Copy each request's last accepted token, the target's own."""
    flat = accept_tokens.reshape(-1)
    for i, n in enumerate(accept_lens.tolist()):
        bonus_tokens[i] = flat[accept_stride * i + n - 1].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Pack the cache slots of the accepted tokens."""
    kept = out_cache_loc[accept_index[accept_index > -1].long()]
    accept_out_cache_loc[: len(kept)] = kept.to(accept_out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy rows of every layer's KV buffer, given by addresses and bytes a row; all are read before any is written."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * size, size) for row in sources]
        for row, content in zip(targets, rows, strict=True):
            ctypes.memmove(address + row * size, content, size)
