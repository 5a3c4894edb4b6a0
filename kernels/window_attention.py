"""Paged attention for few query rows, split over the keys (Triton).

A speculative decoder verifies K+1 query rows of one sequence at a time. One program for each KV head would walk
the whole context while the rest of the GPU waits, so the keys are cut into splits: every program attends to one
split, and a second kernel weighs the partial results by their log-sum-exp (Flash-Decoding, Dao et al. 2023). The
query rows and query heads that share a KV head are packed into one matrix operand (8 rows × 4 heads = 32 rows), so
that K and V are read once. Keys before the sliding window are never touched, nor are their pages.

Everything that changes from step to step (lengths, page tables) is read on the device and the launch depends on
shapes alone, so a call can be captured in a CUDA graph and replayed while the sequences grow.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803, SIM102 (compile-time constants are upper case; Triton joins no constant and tensor with `and`)

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOG2_E = math.log2(math.e)
HEAD_SIZES = (64, 128, 256, 512)
CHUNK = 16
"""Keys of one matrix operand: one tile of the tensor cores, and what vLLM's page sizes are multiples of."""
MAX_SPLITS = 128
NO_WINDOW = 1 << 30
"""Window of full attention, in keys: longer than any sequence."""


@dataclass(frozen=True)
class Plan:
    """How one launch is cut. Depends on shapes and the device only, never on what the tensors hold.

    Attributes:
        rows: query rows of one sequence that a program takes; `row_blocks` programs cover them all.
        block_m: rows of the matrix operand: rows × query heads of a KV head, rounded up to a power of two, at least 16.
        splits: programs that share the keys of one sequence and KV head. 1: no second kernel.
        chunks: chunks of 16 keys that are read in one step, 1 or 2.
    """

    rows: int
    row_blocks: int
    block_m: int
    splits: int
    chunks: int
    num_warps: int
    num_stages: int

    def workspace_floats(self, num_seqs: int, num_kv_heads: int, head_size: int) -> int:
        """Float32 numbers that the partial results of one call take; 0 for a single split."""
        if self.splits == 1:
            return 0
        return num_seqs * self.row_blocks * num_kv_heads * self.splits * self.block_m * (head_size + 1)


@functools.lru_cache(maxsize=1024)
def make_plan(
    num_seqs: int,
    max_query_rows: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_keys: int,
    num_sms: int,
    shared_memory_bytes: int,
    element_bytes: int = 2,
) -> Plan:
    """Cut a launch for a device.

    Args:
        num_seqs: sequences in the call.
        max_query_rows: most query rows that one sequence can have.
        num_query_heads: query heads.
        num_kv_heads: KV heads.
        head_size: elements of one head.
        max_keys: most keys that one sequence can attend to: its longest length, or window + rows - 1 if that is less.
        num_sms: multiprocessors of the device.
        shared_memory_bytes: shared memory that one program may take.
        element_bytes: bytes of one key element.
    """
    group = num_query_heads // num_kv_heads
    # The accumulator (block_m × head_size in float32) stays in registers: at most 64 KB of a multiprocessor's 256.
    most_m = max(CHUNK, min(64, 16384 // head_size))
    rows = min(max_query_rows, max(1, most_m // group))
    row_blocks = triton.cdiv(max_query_rows, rows)
    block_m = max(CHUNK, triton.next_power_of_2(rows * group))

    # Each step reads up to 16 KB of K and of V, and up to three steps are read ahead: K needs that many buffers and V
    # one more, beside the queries and the weights.
    row_bytes = head_size * element_bytes
    most_chunks = 2 if row_bytes <= 512 else 1
    chunks, ahead = next(
        (
            (chunks, ahead)
            for chunks, ahead in ((most_chunks, 3), (most_chunks, 2), (1, 3), (1, 2))
            if block_m * row_bytes + (2 * ahead + 1) * chunks * CHUNK * row_bytes + 8192 <= shared_memory_bytes
        ),
        (1, 1),
    )
    # One program for each multiprocessor, and the same number of steps for as many of them as possible.
    steps = max(1, triton.cdiv(max_keys, chunks * CHUNK))
    most_splits = max(1, min(MAX_SPLITS, num_sms // (num_seqs * row_blocks * num_kv_heads)))
    steps_each = triton.cdiv(steps, most_splits)
    splits = triton.cdiv(steps, steps_each)
    # Triton divides its stages between the page numbers and the loads that need them. Never 1: with wide operands
    # Triton 3.6 was then seen to give wrong results on an H200.
    num_stages = 2 * ahead + 1 if steps_each > 1 else 2
    return Plan(rows, row_blocks, block_m, splits, chunks, 4, num_stages)


@functools.cache
def _multiprocessors_and_shared_memory(device_index: int | None) -> tuple[int, int]:
    """Multiprocessors of the device, and bytes of shared memory that one program may take."""
    if not torch.cuda.is_available():
        return 8, 96 << 10  # Triton's interpreter: any small device
    properties = torch.cuda.get_device_properties(device_index)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


@functools.cache
def overlaps_launches(device_index: int | None) -> bool:
    """Whether a kernel may start while the one that it depends on ends (programmatic dependent launch, Hopper on)."""
    return bool(torch.cuda.is_available() and torch.cuda.get_device_properties(device_index).major >= 9)


@triton.jit
def _rows_and_keys(
    query_start_ptr, seq_lens_ptr, seq, first_row, window, ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr
):
    """Where the rows of one block are, which keys they see, and in how many steps of STEP keys these are read.

    Returns:
        First row of the sequence in q, its number of rows, position of the first, the keys as [first, end), steps.
    """
    start = tl.load(query_start_ptr + seq)
    rows = tl.load(query_start_ptr + seq + 1) - start
    context = tl.load(seq_lens_ptr + seq) - rows
    last_row = tl.minimum(first_row + ROWS, rows) - 1
    first = tl.maximum(context + first_row - window + 1, 0)
    end = tl.maximum(context + last_row + 1, 0)
    steps = tl.cdiv(tl.maximum(end - first // CHUNK * CHUNK, 0), STEP)
    # Padding sequences of a captured graph have no rows, or rows that no key precedes: nothing to read.
    steps = tl.where(first_row < rows, steps, 0)
    return start, rows, context, first, end, steps


@triton.jit
def _chunk_page(table_ptr, chunk, first, end, PAGE: tl.constexpr, CHUNK: tl.constexpr):
    """Page of a chunk, a scalar; where pages do not hold whole chunks, the page of each of its keys, [CHUNK]."""
    if PAGE % CHUNK == 0:
        key = chunk * CHUNK
        return tl.load(table_ptr + key // PAGE, mask=(key + CHUNK > first) & (key < end), other=0).to(tl.int64)
    else:
        key = chunk * CHUNK + tl.arange(0, CHUNK)
        return tl.load(table_ptr + key // PAGE, mask=(key >= first) & (key < end), other=0).to(tl.int64)


@triton.jit
def _load_chunk(
    cache_ptr,
    page,
    chunk,
    first,
    end,
    stride_page,
    stride_slot,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Keys or values of one chunk, [CHUNK, HEAD_SIZE]; zeros outside [first, end), which may be unwritten memory."""
    offs_c = tl.arange(0, CHUNK)
    offs_d = tl.arange(0, HEAD_SIZE)
    key = chunk * CHUNK + offs_c
    inside = ((key >= first) & (key < end))[:, None]
    if PAGE % CHUNK == 0:
        # One base for the chunk: the offsets of its rows are the same every time and leave the loop.
        base = cache_ptr + page * stride_page + (chunk * CHUNK % PAGE) * stride_slot
        return tl.load(base + (offs_c[:, None] * stride_slot + offs_d[None, :]), mask=inside, other=0.0)
    else:
        rows = cache_ptr + page * stride_page + (key % PAGE) * stride_slot
        return tl.load(rows[:, None] + offs_d[None, :], mask=inside, other=0.0)


@triton.jit
def _chunk_scores(k, q_t, chunk, position, window, score_scale, cap, CAPPED: tl.constexpr, CHUNK: tl.constexpr):
    """Scores [CHUNK, rows] in units of log2 e; -inf where a row does not see a key."""
    scores = tl.dot(k, q_t, input_precision="ieee") * score_scale
    if CAPPED:
        # cap · tanh(y) with tanh(y) = 1 - 2 / (e^2y + 1), which saturates where a ratio of exponentials overflows.
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    keys = chunk * CHUNK + tl.arange(0, CHUNK)
    # The mask is cheap beside the bytes, and a loop of its own for chunks without an edge is not worth its code.
    seen = (keys[:, None] <= position[None, :]) & (keys[:, None] > position[None, :] - window)
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=["window"])
def _split_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    score_scale,
    cap,
    window,
    stride_out_row,
    stride_out_head,
    stride_q_row,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    DIRECT: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attention of one block of packed query rows to one split of its keys. Grid: (splits, KV heads, seqs × blocks)."""
    split, splits = tl.program_id(0), tl.num_programs(0)
    kv_head = tl.program_id(1)
    seq, first_row = tl.program_id(2) // ROW_BLOCKS, tl.program_id(2) % ROW_BLOCKS * ROWS
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()

    start, rows, context, first, end, steps = _rows_and_keys(
        query_start_ptr, seq_lens_ptr, seq, first_row, window, ROWS, CHUNK, CHUNK * CHUNKS
    )
    steps_each = tl.cdiv(steps, splits)
    step_lo = split * steps_each
    step_hi = tl.minimum(step_lo + steps_each, steps)
    # A split without keys leaves its partial unwritten: the combine counts the splits in the same way. A single
    # split goes on, because rows that see no key are still answered (with zeros).
    if not DIRECT:
        if step_lo >= step_hi:
            return

    packed = tl.arange(0, BLOCK_M)
    row = first_row + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    valid = (packed < ROWS * GROUP) & (row < rows)
    position = context + row
    offs_d = tl.arange(0, HEAD_SIZE)
    q = tl.load(
        q_ptr + ((start + row).to(tl.int64) * stride_q_row + head * stride_q_head)[:, None] + offs_d[None, :],
        mask=valid[:, None],
        other=0.0,
    )
    q_t = tl.trans(q)
    table_ptr += seq.to(tl.int64) * stride_table
    key_ptr += kv_head * stride_k_head
    value_ptr += kv_head * stride_v_head

    # Scores and output are computed transposed, [keys, rows] and [head size, rows]: the few packed rows are the narrow
    # side of both products, and the warps divide rows and head size among them without doing work twice. A chunk of 16
    # keys is one tile of the tensor cores, so that no maximum has to be taken across warps.
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([CHUNK, BLOCK_M], tl.float32)
    acc = tl.zeros([HEAD_SIZE, BLOCK_M], tl.float32)
    for step in range(step_lo, step_hi):
        chunk = first // CHUNK + step * CHUNKS
        page = _chunk_page(table_ptr, chunk, first, end, PAGE, CHUNK)
        k = _load_chunk(key_ptr, page, chunk, first, end, stride_k_page, stride_k_slot, PAGE, CHUNK, HEAD_SIZE)
        v = _load_chunk(value_ptr, page, chunk, first, end, stride_v_page, stride_v_slot, PAGE, CHUNK, HEAD_SIZE)
        scores = _chunk_scores(k, q_t, chunk, position, window, score_scale, cap, CAPPED, CHUNK)
        highest = scores
        if CHUNKS == 2:  # a second chunk shares the maximum, the rescaling and the barriers of the first
            page2 = _chunk_page(table_ptr, chunk + 1, first, end, PAGE, CHUNK)
            k2 = _load_chunk(
                key_ptr, page2, chunk + 1, first, end, stride_k_page, stride_k_slot, PAGE, CHUNK, HEAD_SIZE
            )
            v2 = _load_chunk(
                value_ptr, page2, chunk + 1, first, end, stride_v_page, stride_v_slot, PAGE, CHUNK, HEAD_SIZE
            )
            scores2 = _chunk_scores(k2, q_t, chunk + 1, position, window, score_scale, cap, CAPPED, CHUNK)
            highest = tl.maximum(scores, scores2)
        new_top = tl.maximum(top, tl.max(highest, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may see none of these keys
        decay = tl.exp2(top - base)
        weights = tl.exp2(scores - base[None, :])
        sums = sums * decay[None, :] + weights
        acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * decay[None, :], input_precision="ieee")
        if CHUNKS == 2:
            weights2 = tl.exp2(scores2 - base[None, :])
            sums += weights2
            acc = tl.dot(tl.trans(v2), weights2.to(v2.dtype), acc, input_precision="ieee")
        top = new_top

    total = tl.sum(sums, 0)
    nonzero = tl.where(total > 0, total, 1.0)
    result = tl.trans(acc / nonzero[None, :])
    if DIRECT:
        tl.store(
            out_ptr + ((start + row).to(tl.int64) * stride_out_row + head * stride_out_head)[:, None] + offs_d[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=valid[:, None],
        )
    else:
        cell = (tl.program_id(2) * tl.num_programs(1) + kv_head) * splits + split
        at = cell.to(tl.int64) * BLOCK_M + packed
        tl.store(partial_ptr + at[:, None] * HEAD_SIZE + offs_d[None, :], result, mask=valid[:, None])
        tl.store(lse_ptr + at, tl.where(total > 0, top + tl.log2(nonzero), float("-inf")), mask=valid)


@triton.jit(do_not_specialize=["window", "splits"])
def _combine_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_start_ptr,
    seq_lens_ptr,
    window,
    splits,
    stride_out_row,
    stride_out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Weigh the splits of one query head's slice. Grid: (head slices, packed rows, seqs × blocks × KV heads)."""
    packed = tl.program_id(1)
    kv_head = tl.program_id(2) % KV_HEADS
    block = tl.program_id(2) // KV_HEADS
    seq, first_row = block // ROW_BLOCKS, block % ROW_BLOCKS * ROWS
    start, rows, _, _, _, steps = _rows_and_keys(
        query_start_ptr, seq_lens_ptr, seq, first_row, window, ROWS, CHUNK, STEP
    )
    steps_each = tl.cdiv(steps, splits)
    row = first_row + packed // GROUP
    offs_s = tl.arange(0, SPLITS)
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    written = offs_s * steps_each < steps
    at = (tl.program_id(2) * splits + offs_s).to(tl.int64) * BLOCK_M + packed
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # lengths were there before the split kernel started; its results were not
    if row >= rows:
        return
    lse = tl.load(lse_ptr + at, mask=written, other=float("-inf"))
    partial = tl.load(partial_ptr + at[:, None] * HEAD_SIZE + offs_d[None, :], mask=written[:, None], other=0.0)
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    result = tl.sum(partial * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    head = kv_head * GROUP + packed % GROUP
    tl.store(
        out_ptr + (start + row).to(tl.int64) * stride_out_row + head * stride_out_head + offs_d,
        result.to(out_ptr.dtype.element_ty),
    )


def plan_for(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    *,
    max_query_rows: int,
    max_seq_len: int | None = None,
    window: int = 0,
) -> Plan:
    """The plan that `window_attention` takes for these tensors; use it to size a workspace."""
    longest = block_table.shape[1] * key_cache.shape[1]
    if max_seq_len is not None:
        longest = min(longest, max_seq_len)
    if window > 0:
        longest = min(longest, window + max_query_rows - 1)
    num_sms, shared_memory_bytes = _multiprocessors_and_shared_memory(q.device.index)
    return make_plan(
        block_table.shape[0],
        max_query_rows,
        q.shape[1],
        key_cache.shape[2],
        q.shape[2],
        longest,
        num_sms,
        shared_memory_bytes,
        key_cache.element_size(),
    )


def window_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    max_query_rows: int,
    window: int = 0,
    softcap: float = 0.0,
    max_seq_len: int | None = None,
    workspace: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> None:
    """Causal attention of each sequence's last rows to its paged keys, written into `out`.

    A sequence of length n with r query rows has them at positions n-r … n-1. The row at position p sees the keys at
    max(0, p - window + 1) … p. Rows that see no key (padding) become zeros; rows of `out` beyond the last sequence
    are left as they are. Scores are accumulated in float32.

    Args:
        q: [tokens, query heads, head size], bfloat16, float16 or float32; the last dimension contiguous.
        key_cache: [pages, page size, KV heads, head size], any strides but a contiguous last dimension: both of
            vLLM's layouts are views of this form. Same dtype as `q`.
        value_cache: like `key_cache`; its strides may differ.
        out: like `q`.
        query_start: [seqs + 1] int32, first row of each sequence in `q`.
        seq_lens: [seqs] int32, length of each sequence with its query rows.
        block_table: [seqs, pages of the longest] int32, page numbers; entries outside the window are not read.
        scale: factor on the scores.
        max_query_rows: no sequence has more rows than this.
        window: keys a row sees, itself counted; 0 for all.
        softcap: scores become softcap · tanh(score / softcap); 0 for none.
        max_seq_len: no sequence is longer than this; by default what the table holds. It only guides the plan.
        workspace: float32, at least `plan_for(…).workspace_floats(…)` elements, not shared between streams;
            allocated when None.
        plan: a plan to use instead of the default one.

    Raises:
        ValueError: a shape, dtype or layout that the kernel does not support; the message names it.
    """
    num_query_heads, head_size = q.shape[1], q.shape[2]
    page_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    if head_size not in HEAD_SIZES:
        raise ValueError(f"Head size {head_size} is not supported: it must be one of {HEAD_SIZES}.")
    if num_query_heads % num_kv_heads:
        raise ValueError(f"{num_query_heads} query heads cannot share {num_kv_heads} KV heads evenly.")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not (
        q.dtype == key_cache.dtype == value_cache.dtype == out.dtype
    ):
        raise ValueError(
            f"q, keys, values and out must share one of bfloat16, float16 and float32, not "
            f"{q.dtype}, {key_cache.dtype}, {value_cache.dtype}, {out.dtype}."
        )
    if any(t.stride(-1) != 1 for t in (q, key_cache, value_cache, out, block_table)):
        raise ValueError("The last dimension of q, keys, values, out and block_table must be contiguous.")
    if max_query_rows < 1:
        raise ValueError(f"max_query_rows is {max_query_rows}: it must be at least 1.")

    if plan is None:
        plan = plan_for(
            q, key_cache, block_table, max_query_rows=max_query_rows, max_seq_len=max_seq_len, window=window
        )
    num_seqs = block_table.shape[0]
    cells = num_seqs * plan.row_blocks * num_kv_heads
    needed = plan.workspace_floats(num_seqs, num_kv_heads, head_size)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=q.device)
    elif workspace.dtype != torch.float32 or workspace.numel() < needed:
        raise ValueError(f"The workspace holds {workspace.numel()} {workspace.dtype}; {needed} float32 are needed.")
    partial = workspace
    lse = workspace[cells * plan.splits * plan.block_m * head_size :]

    group = num_query_heads // num_kv_heads
    effective_window = window if window > 0 else NO_WINDOW
    overlap = plan.splits > 1 and overlaps_launches(q.device.index)
    if softcap > 0:
        score_scale, cap = 2 * LOG2_E * scale / softcap, softcap * LOG2_E
    else:
        score_scale, cap = scale * LOG2_E, 0.0
    _split_kernel[(plan.splits, num_kv_heads, num_seqs * plan.row_blocks)](
        out,
        partial,
        lse,
        q,
        key_cache,
        value_cache,
        query_start,
        seq_lens,
        block_table,
        score_scale,
        cap,
        effective_window,
        out.stride(0),
        out.stride(1),
        q.stride(0),
        q.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        block_table.stride(0),
        GROUP=group,
        HEAD_SIZE=head_size,
        PAGE=page_size,
        CAPPED=softcap > 0,
        DIRECT=plan.splits == 1,
        ROWS=plan.rows,
        ROW_BLOCKS=plan.row_blocks,
        BLOCK_M=plan.block_m,
        CHUNK=CHUNK,
        CHUNKS=plan.chunks,
        OVERLAP=overlap,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if plan.splits == 1:
        return
    padded_splits = triton.next_power_of_2(plan.splits)
    block_d = 64
    _combine_kernel[(head_size // block_d, plan.rows * group, cells)](
        out,
        partial,
        lse,
        query_start,
        seq_lens,
        effective_window,
        plan.splits,
        out.stride(0),
        out.stride(1),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        ROWS=plan.rows,
        ROW_BLOCKS=plan.row_blocks,
        BLOCK_M=plan.block_m,
        CHUNK=CHUNK,
        STEP=plan.chunks * CHUNK,
        SPLITS=padded_splits,
        BLOCK_D=block_d,
        OVERLAP=overlap,
        num_warps=max(1, padded_splits // 64),
        **({"launch_pdl": True} if overlap else {}),
    )
