"""Greedy token of an MTP drafter whose head scores only the tokens of its best centroids (Triton).

Gemma 4's drafter groups its vocabulary by centroids. For one hidden state it scores the centroids, keeps the best
`top_k` and scores only their tokens. As separate operations that is a matrix product, a top-k, two gathers (one of
which copies top_k × tokens × hidden numbers), a second product and an argmax. Here it is three kernels:

1. Every program scores a few centroids.
2. Every program ranks one centroid by counting those ahead of it, which needs no sort. If it is among the first
   `top_k`, the same program scores its tokens and leaves the best of them, with a 64-bit key (logit, order among
   equals), at its rank.
3. One program takes the token with the largest of the `top_k` keys.

Scores and logits are accumulated in float32 and rounded to the model's dtype before they are compared, as the model's
own matrix products round them: in bfloat16 equal logits are common, and which of them wins is part of the result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 (compile-time constants are upper case)

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from kernels.window_attention import overlaps_launches

LOWEST_KEY = -(1 << 63)

Ties = Literal["candidate", "token"]
"""Which of several equal logits wins.

`candidate`: the first in candidate order, best centroid first; the argmax over the gathered candidates
(`Gemma4MTP.get_top_tokens`). `token`: the smallest token id; the argmax over full-vocabulary logits
(`Gemma4MTP.compute_logits`).
"""


class Workspace(NamedTuple):
    """Scratch of one call; every call overwrites it. Not to be shared between streams."""

    scores: torch.Tensor
    keys: torch.Tensor
    tokens: torch.Tensor


def make_workspace(rows: int, centroids: torch.Tensor) -> Workspace:
    """Scratch for calls of up to `rows` hidden states with these centroids."""
    count, device = centroids.shape[0], centroids.device
    return Workspace(
        scores=torch.empty((rows, count), dtype=centroids.dtype, device=device),
        keys=torch.empty((rows, count), dtype=torch.int64, device=device),
        tokens=torch.zeros((rows, count), dtype=torch.int64, device=device),
    )


def without_tokens(token_ordering: torch.Tensor, num_centroids: int, tokens: Sequence[int]) -> torch.Tensor:
    """An ordering in which none of `tokens` is a candidate: each one's place is given to a neighbour in its centroid.

    A token that stands twice changes no maximum.

    Raises:
        ValueError: a centroid would have no token left.
    """
    clusters = token_ordering.clone().view(num_centroids, -1)
    barred = torch.isin(clusters, torch.as_tensor(list(tokens), dtype=clusters.dtype, device=clusters.device))
    if bool(barred.all(-1).any()):
        raise ValueError("A centroid holds only tokens that may not be drafted.")
    neighbour = clusters.gather(-1, (~barred).to(torch.uint8).argmax(-1, keepdim=True))
    return torch.where(barred, neighbour, clusters).flatten()


@triton.jit
def _score_kernel(
    score_ptr,
    hidden_ptr,
    centroid_ptr,
    stride_hidden,
    stride_centroid,
    CENTROIDS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Scores of BLOCK_C centroids for one hidden state. Grid: (blocks of centroids, rows)."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1)
    offs_c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros([BLOCK_C], tl.float32)
    for at in tl.static_range(0, HIDDEN, BLOCK_D):
        offs_d = at + tl.arange(0, BLOCK_D)
        hidden = tl.load(hidden_ptr + row * stride_hidden + offs_d, mask=offs_d < HIDDEN, other=0.0)
        weight = tl.load(
            centroid_ptr + offs_c[:, None] * stride_centroid + offs_d[None, :],
            mask=(offs_c < CENTROIDS)[:, None] & (offs_d < HIDDEN)[None, :],
            other=0.0,
        )
        acc += tl.sum(weight.to(tl.float32) * hidden.to(tl.float32)[None, :], 1)
    tl.store(score_ptr + row * CENTROIDS + offs_c, acc.to(score_ptr.dtype.element_ty), mask=offs_c < CENTROIDS)


@triton.jit(do_not_specialize=["top_k"])
def _candidate_kernel(
    key_ptr,
    token_ptr,
    score_ptr,
    hidden_ptr,
    head_ptr,
    ordering_ptr,
    top_k,
    stride_hidden,
    stride_head,
    CENTROIDS: tl.constexpr,
    TOKENS: tl.constexpr,
    HIDDEN: tl.constexpr,
    LOWEST: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rank one centroid and, if it is chosen, find its best token. Grid: (centroids, rows)."""
    centroid, row = tl.program_id(0), tl.program_id(1)
    offs_all = tl.arange(0, ALL)
    real = offs_all < CENTROIDS
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    scores = tl.load(score_ptr + row * CENTROIDS + offs_all, mask=real, other=0.0).to(tl.float32)
    score = tl.load(score_ptr + row * CENTROIDS + centroid).to(tl.float32)
    ahead = (scores > score) | ((scores == score) & (offs_all < centroid))
    rank = tl.sum((ahead & real).to(tl.int32), 0)
    if rank >= top_k:  # most programs end here
        return

    best_key = tl.full([], LOWEST, tl.int64)
    best_token = tl.full([], 0, tl.int64)
    for first in range(0, TOKENS, BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        there = offs_t < TOKENS
        token = tl.load(ordering_ptr + centroid * TOKENS + offs_t, mask=there, other=0).to(tl.int64)
        acc = tl.zeros([BLOCK_T], tl.float32)
        for at in tl.static_range(0, HIDDEN, BLOCK_D):
            offs_d = at + tl.arange(0, BLOCK_D)
            hidden = tl.load(hidden_ptr + row * stride_hidden + offs_d, mask=offs_d < HIDDEN, other=0.0)
            weight = tl.load(
                head_ptr + token[:, None] * stride_head + offs_d[None, :],
                mask=there[:, None] & (offs_d < HIDDEN)[None, :],
                other=0.0,
            )
            acc += tl.sum(weight.to(tl.float32) * hidden.to(tl.float32)[None, :], 1)
        # Rounded to the model's dtype; -0 becomes 0, so that both compare equal below.
        logit = acc.to(head_ptr.dtype.element_ty).to(tl.float32)
        bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
        rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # integers in the order of the floats
        if BY_TOKEN:
            order = token
        else:
            order = (rank * TOKENS + offs_t).to(tl.int64)
        key = tl.where(there, (rising << 32) | (0x7FFFFFFF - order), LOWEST)
        top = tl.max(key, 0)
        # Equal keys are the same token, which stands twice (see `without_tokens`).
        best_token = tl.where(top > best_key, tl.max(tl.where(key == top, token, 0), 0), best_token)
        best_key = tl.maximum(best_key, top)
    tl.store(key_ptr + row * CENTROIDS + rank, best_key)
    tl.store(token_ptr + row * CENTROIDS + rank, best_token)


@triton.jit(do_not_specialize=["count"])
def _winner_kernel(
    out_ptr,
    key_ptr,
    token_ptr,
    count,
    stride,
    LOWEST: tl.constexpr,
    COUNT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The token with the largest of `count` keys. Grid: (rows,)."""
    row = tl.program_id(0)
    offs = tl.arange(0, COUNT)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    key = tl.load(key_ptr + row * stride + offs, mask=offs < count, other=LOWEST)
    token = tl.load(token_ptr + row * stride + offs, mask=offs < count, other=0)
    tl.store(out_ptr + row, tl.max(tl.where((key == tl.max(key, 0)) & (offs < count), token, 0), 0))


def centroid_top_token(
    hidden: torch.Tensor,
    centroids: torch.Tensor,
    token_ordering: torch.Tensor,
    lm_head: torch.Tensor,
    top_k: int,
    *,
    ties: Ties = "candidate",
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Token with the largest logit among the tokens of the `top_k` best centroids, for each hidden state.

    Equal centroid scores are ranked by the lower centroid index. Nothing is read back to the host, so a call can be
    captured in a CUDA graph; `top_k` is part of the captured launch.

    Args:
        hidden: [rows, hidden size], bfloat16, float16 or float32; the last dimension contiguous.
        centroids: [centroids, hidden size], same dtype.
        token_ordering: [vocabulary], int32 or int64: the tokens of centroid 0, then of centroid 1, and so on, the
            same number each.
        lm_head: [at least vocabulary, hidden size], same dtype: the rows of the output embedding.
        top_k: centroids kept, 1 … centroids.
        ties: which of several equal logits wins.
        out: [rows] int64 to write into.
        workspace: scratch from `make_workspace` for at least as many rows; allocated when None.

    Returns:
        [rows] int64 token ids; `out` if it was given.

    Raises:
        ValueError: shapes or dtypes that do not fit together; the message names them.
    """
    rows, hidden_size = hidden.shape
    num_centroids, vocabulary = centroids.shape[0], token_ordering.shape[0]
    if centroids.shape[1] != hidden_size or lm_head.shape[1] != hidden_size:
        raise ValueError(
            f"Hidden size {hidden_size} fits no centroids of {centroids.shape[1]} and head of {lm_head.shape[1]}."
        )
    if vocabulary % num_centroids or lm_head.shape[0] < vocabulary or vocabulary >= 1 << 31:
        raise ValueError(
            f"{vocabulary} ordered tokens do not fit {num_centroids} centroids and a head of {lm_head.shape[0]} rows."
        )
    if not 1 <= top_k <= num_centroids:
        raise ValueError(f"top_k is {top_k}: it must be between 1 and the number of centroids, {num_centroids}.")
    if not hidden.dtype == centroids.dtype == lm_head.dtype:
        raise ValueError(f"Dtypes differ: {hidden.dtype}, {centroids.dtype}, {lm_head.dtype}.")
    if any(t.stride(-1) != 1 for t in (hidden, centroids, lm_head, token_ordering)):
        raise ValueError("The last dimension of hidden, centroids, token_ordering and lm_head must be contiguous.")
    if ties not in ("candidate", "token"):
        raise ValueError(f"ties is {ties!r}: it must be 'candidate' or 'token'.")

    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=hidden.device)
    if workspace is None:
        workspace = make_workspace(rows, centroids)
    tokens = vocabulary // num_centroids
    overlap = overlaps_launches(hidden.device.index)
    block_d = min(256, triton.next_power_of_2(hidden_size))
    block_c = 8
    launch = {"launch_pdl": True} if overlap else {}
    _score_kernel[(triton.cdiv(num_centroids, block_c), rows)](
        workspace.scores,
        hidden,
        centroids,
        hidden.stride(0),
        centroids.stride(0),
        CENTROIDS=num_centroids,
        HIDDEN=hidden_size,
        BLOCK_C=block_c,
        BLOCK_D=block_d,
        OVERLAP=overlap,
        num_warps=4,
    )
    _candidate_kernel[(num_centroids, rows)](
        workspace.keys,
        workspace.tokens,
        workspace.scores,
        hidden,
        lm_head,
        token_ordering,
        top_k,
        hidden.stride(0),
        lm_head.stride(0),
        CENTROIDS=num_centroids,
        TOKENS=tokens,
        HIDDEN=hidden_size,
        LOWEST=LOWEST_KEY,
        BY_TOKEN=ties == "token",
        ALL=triton.next_power_of_2(num_centroids),
        BLOCK_T=min(128, triton.next_power_of_2(tokens)),
        BLOCK_D=block_d,
        OVERLAP=overlap,
        num_warps=4,
        **launch,
    )
    _winner_kernel[(rows,)](
        out,
        workspace.keys,
        workspace.tokens,
        top_k,
        num_centroids,
        LOWEST=LOWEST_KEY,
        COUNT=triton.next_power_of_2(top_k),
        OVERLAP=overlap,
        num_warps=1 if top_k <= 256 else 4,
        **launch,
    )
    return out
