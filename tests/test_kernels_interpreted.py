"""The kernels in Triton's interpreter, on a CPU, against their definitions.

Triton decides at import whether it interprets, so this file runs in a process of its own, which test_kernels.py starts.
The interpreter multiplies no bfloat16 matrices: attention is checked here in float32 and float16, on a GPU in bfloat16.
"""

import dataclasses
import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_kernels.py runs these tests in a process of their own", allow_module_level=True)

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.centroid_head import centroid_top_token, make_workspace
from kernels.window_attention import plan_for, window_attention

few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def caches(layout, pages, page_size, kv_heads, head_size, dtype):
    """Keys and values full of NaN, in one of the layouts that vLLM has."""
    if layout == "keys and values apart":
        both = torch.full((pages, 2, page_size, kv_heads, head_size), torch.nan, dtype=dtype)
        return both[:, 0], both[:, 1]
    if layout == "interleaved":
        both = torch.full((pages, page_size, kv_heads, 2 * head_size), torch.nan, dtype=dtype)
    else:  # one KV head after the other
        both = torch.full((pages, kv_heads, page_size, 2 * head_size), torch.nan, dtype=dtype).transpose(1, 2)
    return both.split(head_size, dim=-1)


@dataclasses.dataclass
class Problem:
    """Sequences whose keys are random where a row may see them and NaN wherever a kernel has no business."""

    rows: list[int]
    lengths: list[int]
    kv_heads: int = 2
    group: int = 2
    head_size: int = 64
    page_size: int = 16
    window: int = 0
    softcap: float = 0.0
    layout: str = "interleaved"
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self):
        torch.manual_seed(self.seed)
        used = [-(-length // self.page_size) for length in self.lengths]
        nowhere = sum(used)  # a page of NaN: where the table points for what must not be read
        self.keys, self.values = caches(
            self.layout, nowhere + 1, self.page_size, self.kv_heads, self.head_size, self.dtype
        )
        self.table = torch.full((len(used), max(used) + 2), nowhere, dtype=torch.int32)
        pages = iter(torch.randperm(nowhere).tolist())
        for seq, (length, rows) in enumerate(zip(self.lengths, self.rows, strict=True)):
            first = max(0, length - rows - self.window + 1) if self.window else 0
            for page in range(used[seq]):
                number = next(pages)
                if (page + 1) * self.page_size <= first:
                    continue
                self.table[seq, page] = number
                for slot in range(self.page_size):
                    if first <= page * self.page_size + slot < length:
                        self.keys[number, slot] = torch.randn(self.kv_heads, self.head_size)
                        self.values[number, slot] = torch.randn(self.kv_heads, self.head_size)
        heads = self.kv_heads * self.group
        self.q = torch.randn(sum(self.rows) + 1, heads, self.head_size).to(self.dtype)  # the last row is nobody's
        self.query_start = torch.tensor([0, *torch.tensor(self.rows).cumsum(0).tolist()], dtype=torch.int32)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)

    def plan(self, **changes):
        plan = plan_for(self.q, self.keys, self.table, max_query_rows=max(self.rows), window=self.window)
        return dataclasses.replace(plan, **changes)

    def answer(self, **options):
        out = torch.full_like(self.q, 7.0)
        window_attention(
            self.q,
            self.keys,
            self.values,
            out,
            self.query_start,
            self.seq_lens,
            self.table,
            scale=0.2,
            max_query_rows=max(self.rows),
            window=self.window,
            softcap=self.softcap,
            **options,
        )
        assert (out[-1] == 7.0).all(), "a row of no sequence was written"
        return out[:-1]

    def truth(self):
        return reference.window_attention(
            self.q,
            self.keys.nan_to_num(),
            self.values.nan_to_num(),
            self.query_start,
            self.seq_lens,
            self.table,
            scale=0.2,
            window=self.window,
            softcap=self.softcap,
        )[:-1]


def error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-12)).item()


@st.composite
def problems(draw):
    count = draw(st.integers(1, 2))
    rows = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    return Problem(
        rows=rows,
        lengths=[draw(st.integers(n, 90)) for n in rows],
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 4)),
        head_size=draw(st.sampled_from([64, 64, 128])),
        page_size=draw(st.sampled_from([16, 32, 48, 24, 7])),
        window=draw(st.sampled_from([0, 1, 5, 17, 40, 1000])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        layout=draw(st.sampled_from(["keys and values apart", "interleaved", "head after head"])),
        seed=draw(st.integers(0, 999)),
    )


@few
@given(problems(), st.integers(1, 6), st.integers(1, 2))
def test_attention_is_its_definition_for_any_shape_table_window_and_split(problem, splits, chunks):
    got = problem.answer(plan=problem.plan(splits=splits, chunks=chunks))
    assert error(got, problem.truth()) < 1e-5


@pytest.mark.parametrize("head_size", [64, 128, 256, 512])
def test_attention_in_half_precision_is_off_by_roundings_only(head_size):
    problem = Problem([3], [50], head_size=head_size, window=30, dtype=torch.float16)
    assert error(problem.answer(plan=problem.plan(splits=2)), problem.truth()) < 5e-4


def test_more_query_rows_than_one_program_takes_are_cut_into_blocks():
    problem = Problem([9], [40], group=3)
    plan = problem.plan(rows=4, row_blocks=3, block_m=16, splits=2)
    assert error(problem.answer(plan=plan), problem.truth()) < 1e-5


def test_what_an_earlier_call_left_in_the_workspace_is_never_read():
    problem = Problem([2, 1], [70, 5])  # the second sequence leaves most of its splits idle
    workspace = torch.full((200_000,), torch.nan)
    got = problem.answer(plan=problem.plan(splits=5), workspace=workspace)
    assert error(got, problem.truth()) < 1e-5
    assert workspace.isnan().any() and not workspace.isnan().all()


@pytest.mark.parametrize("splits", [1, 3])
def test_padding_sequences_and_rows_that_see_no_key_become_zeros(splits):
    problem = Problem([2, 0, 3], [20, 0, 2])  # nothing for the second; the third's first row is at position -1
    got = problem.answer(plan=problem.plan(splits=splits))
    assert (got[2] == 0).all()
    assert error(got, problem.truth()) < 1e-5


@pytest.mark.parametrize("rows", [1, 16])
def test_the_plan_of_a_launch_answers_every_row_it_promises(rows):
    problem = Problem([rows], [64], group=8, kv_heads=1)
    assert error(problem.answer(), problem.truth()) < 1e-5


@st.composite
def heads(draw):
    """Small whole numbers: every sum is exact, equal logits abound, and any correct kernel finds the same token."""
    torch.manual_seed(draw(st.integers(0, 999)))
    centroids, tokens, hidden = draw(st.integers(1, 40)), draw(st.integers(1, 20)), draw(st.integers(1, 70))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    largest = draw(st.integers(1, 3))

    def whole(*shape):
        return torch.randint(-largest, largest + 1, shape).to(dtype)

    ordering = torch.randperm(centroids * tokens).to(draw(st.sampled_from([torch.int32, torch.int64])))
    rows, spare = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    return (
        whole(rows, hidden),
        whole(centroids, hidden),
        ordering,
        whole(centroids * tokens + spare, hidden),
        draw(st.integers(1, centroids)),
    )


@few
@given(heads(), st.sampled_from(["candidate", "token"]))
def test_the_centroid_head_finds_the_token_of_its_definition_also_among_equals(head, ties):
    assert torch.equal(centroid_top_token(*head, ties=ties), reference.centroid_top_token(*head, ties=ties))


def test_the_two_ways_to_break_ties_differ_and_both_are_kept():
    hidden, centroids = torch.ones(1, 4), torch.tensor([[1.0] * 4, [2.0] * 4])
    lm_head, ordering = torch.ones(4, 4), torch.tensor([0, 1, 3, 2])  # all logits equal; the second centroid leads
    assert centroid_top_token(hidden, centroids, ordering, lm_head, 2, ties="candidate").tolist() == [3]
    assert centroid_top_token(hidden, centroids, ordering, lm_head, 2, ties="token").tolist() == [0]


def test_hidden_states_that_are_not_numbers_still_give_a_token_of_the_vocabulary():
    hidden, centroids, lm_head = torch.full((1, 8), torch.nan), torch.ones(6, 8), torch.ones(24, 8)
    workspace = make_workspace(1, centroids)
    got = centroid_top_token(hidden, centroids, torch.arange(24), lm_head, 3, workspace=workspace)
    assert 0 <= got.item() < 24


def test_a_workspace_for_more_rows_serves_fewer():
    torch.manual_seed(0)
    head = (torch.randn(2, 16), torch.randn(8, 16), torch.randperm(40), torch.randn(40, 16), 3)
    workspace = make_workspace(5, head[1])
    first = centroid_top_token(*head, workspace=workspace)
    assert torch.equal(first, reference.centroid_top_token(*head))
    assert torch.equal(centroid_top_token(*head, workspace=workspace), first)
