"""What the kernels compute, in plain torch: the definition that they are tested and benchmarked against.

Nothing here is fast. Each function computes in `compute_dtype`, float64 unless told otherwise.
"""

from __future__ import annotations

from typing import Literal

import torch


def window_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Causal attention of each sequence's last rows to its paged keys; arguments as in `kernels.window_attention`.

    Returns:
        [tokens, query heads, head size] in `compute_dtype`; zeros where a row sees no key and for rows of no sequence.
    """
    out = torch.zeros(q.shape, dtype=compute_dtype, device=q.device)
    page_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for seq, length in enumerate(lengths):
        rows = starts[seq + 1] - starts[seq]
        if rows == 0 or length == 0:
            continue
        pages = block_table[seq, : -(-length // page_size)].long()
        # [keys, KV heads, head size], each KV head repeated for the query heads that share it
        keys, values = (
            cache[pages].flatten(0, 1)[:length].to(compute_dtype).repeat_interleave(group, 1)
            for cache in (key_cache, value_cache)
        )
        queries = q[starts[seq] : starts[seq + 1]].to(compute_dtype)
        scores = torch.einsum("rhd,khd->hrk", queries, keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length - rows, length, device=q.device)[:, None]  # position of each row
        key_at = torch.arange(length, device=q.device)[None, :]
        seen = key_at <= at
        if window > 0:
            seen &= key_at > at - window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        out[starts[seq] : starts[seq + 1]] = torch.einsum("hrk,khd->rhd", weights, values)
    return out


def centroid_top_token(
    hidden: torch.Tensor,
    centroids: torch.Tensor,
    token_ordering: torch.Tensor,
    lm_head: torch.Tensor,
    top_k: int,
    *,
    ties: Literal["candidate", "token"] = "candidate",
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Token with the largest logit among the tokens of the best centroids; as in `kernels.centroid_head`.

    Scores and logits are computed in `compute_dtype` and rounded to the dtype of `hidden` before they are compared.

    Returns:
        [rows] int64 token ids.
    """
    num_centroids = centroids.shape[0]
    clusters = token_ordering.long().view(num_centroids, -1)
    scores = (hidden.to(compute_dtype) @ centroids.to(compute_dtype).T).to(hidden.dtype)
    best = scores.double().argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    candidates = clusters[best].flatten(1)  # [rows, candidates], those of the best centroid first
    if ties == "token":
        candidates = candidates.sort(dim=-1).values
    logits = torch.einsum("rd,rcd->rc", hidden.to(compute_dtype), lm_head[candidates].to(compute_dtype))
    first = logits.to(hidden.dtype).double().argmax(-1, keepdim=True)  # torch: the first of equal maxima
    return candidates.gather(-1, first).squeeze(-1)
