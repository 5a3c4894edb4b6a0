"""The GPU kernels' definitions, launch plans, refusals and benchmark; the kernels themselves where there is a GPU.

On a CPU the kernels run in Triton's interpreter: test_kernels_interpreted.py, in a process of its own.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import bench, reference
from kernels.bench import WrongResultError, require_close, require_tokens
from kernels.centroid_head import centroid_top_token
from kernels.window_attention import make_plan, plan_for, window_attention

INTERPRETED = Path(__file__).with_name("test_kernels_interpreted.py")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("these tests need Triton as it is, not its interpreter", allow_module_level=True)


def test_the_kernels_equal_their_definitions_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=INTERPRETED.parent.parent)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout


# The definitions, against another way to compute the same.


@pytest.mark.parametrize("window", [0, 1, 6, 100])
def test_the_attention_definition_is_torchs_own_attention_on_gathered_pages(window):
    torch.manual_seed(0)
    length, rows, page, table = 21, 5, 4, torch.tensor([[5, 0, 3, 1, 2, 4]])
    keys, values = torch.randn(2, 6, page, 2, 8, dtype=torch.float64)
    q = torch.randn(rows, 6, 8, dtype=torch.float64)
    ends = torch.tensor([0, rows]), torch.tensor([length])
    got = reference.window_attention(q, keys, values, *ends, table, scale=0.3, window=window)
    seen = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    if window:
        seen &= ~torch.ones(rows, length, dtype=torch.bool).tril(length - rows - window)
    flat = (cache[table[0]].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (keys, values))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], *flat, attn_mask=seen, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=1e-12, atol=1e-12)


def test_a_softcap_bounds_the_scores_of_the_attention_definition():
    keys = torch.tensor([0.0, 50.0]).view(1, 2, 1, 1)
    values = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
    ends = torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([[0]])
    got = reference.window_attention(torch.ones(1, 1, 1), keys, values, *ends, scale=1.0, softcap=2.0)
    assert got.item() == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item(), rel=1e-6)


@pytest.mark.parametrize("ties", ["candidate", "token"])
def test_the_centroid_definition_is_a_search_over_all_tokens_of_the_best_centroids(ties):
    draw = torch.Generator().manual_seed(1)
    for _ in range(50):
        hidden, centroids, lm_head = (
            torch.randint(-1, 2, shape, generator=draw).double() for shape in ((1, 6), (7, 6), (21, 6))
        )
        ordering = torch.randperm(21, generator=draw)
        scores = (centroids @ hidden[0]).tolist()
        ranked = sorted(range(7), key=lambda c: (-scores[c], c))[:3]
        candidates = [int(token) for c in ranked for token in ordering[3 * c : 3 * c + 3]]
        if ties == "token":
            candidates.sort()
        want = max(candidates, key=lambda token: float(lm_head[token] @ hidden[0]))  # the first of equals
        assert reference.centroid_top_token(hidden, centroids, ordering, lm_head, 3, ties=ties).item() == want


# Plans and refusals.

H200, A10G = (132, 232448), (80, 101376)


@pytest.mark.parametrize("device", [H200, A10G], ids=["H200", "A10G"])
@pytest.mark.parametrize("head_size", [64, 128, 256, 512])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_plan_covers_all_rows_and_leaves_no_multiprocessor_a_second_turn(device, head_size, rows):
    for keys in (1, 40, 519, 4096, 131072):
        for heads, kv_heads in ((8, 2), (8, 1), (7, 1), (16, 16)):
            plan = make_plan(1, rows, heads, kv_heads, head_size, keys, *device)
            assert plan.rows * plan.row_blocks >= rows
            assert plan.block_m >= plan.rows * (heads // kv_heads)
            assert plan.splits == 1 or plan.splits * plan.row_blocks * kv_heads <= device[0]
            assert (plan.splits - 1) * plan.chunks * 16 < keys, "a split would never have a key"


def test_a_full_context_on_one_sequence_fills_the_device():
    plan = make_plan(1, 8, 8, 2, 256, 32768, *H200)
    assert plan.splits * 2 > 0.9 * H200[0]


def attention_arguments(**changes):
    q = torch.zeros(2, 4, 64)
    arguments = {
        "q": q,
        "key_cache": torch.zeros(3, 16, 2, 64),
        "value_cache": torch.zeros(3, 16, 2, 64),
        "out": torch.zeros_like(q),
        "query_start": torch.tensor([0, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([20], dtype=torch.int32),
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "scale": 1.0,
        "max_query_rows": 2,
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 4, 80)}, "Head size 80"),
        ({"q": torch.zeros(2, 3, 64)}, "3 query heads cannot share 2 KV heads"),
        ({"out": torch.zeros(2, 4, 64, dtype=torch.float16)}, "float16"),
        ({"key_cache": torch.zeros(3, 16, 2, 128)[..., ::2]}, "contiguous"),
        ({"max_query_rows": 0}, "max_query_rows is 0"),
        (
            {"workspace": torch.zeros(1), "block_table": torch.zeros(1, 40, dtype=torch.int32)},
            "workspace holds 1 torch",
        ),
    ],
)
def test_attention_names_what_it_does_not_support(changes, message):
    with pytest.raises(ValueError, match=message):
        window_attention(**attention_arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 9}, "top_k is 9"),
        ({"token_ordering": torch.arange(30)}, "30 ordered tokens"),
        ({"lm_head": torch.zeros(16, 4)}, "Hidden size 8"),
        ({"lm_head": torch.zeros(16, 8, dtype=torch.float16)}, "Dtypes differ"),
        ({"ties": "last"}, "ties is 'last'"),
    ],
)
def test_the_centroid_head_names_what_it_does_not_support(changes, message):
    arguments = {
        "hidden": torch.zeros(1, 8),
        "centroids": torch.zeros(8, 8),
        "token_ordering": torch.arange(16),
        "lm_head": torch.zeros(16, 8),
        "top_k": 2,
    }
    with pytest.raises(ValueError, match=message):
        centroid_top_token(**(arguments | changes))


# The benchmark.


@pytest.mark.parametrize("spoil", [lambda x: x * 1.01, lambda x: x.where(x != x.max(), torch.nan)])
def test_the_benchmark_times_no_result_that_is_off_or_not_a_number(spoil):
    want = torch.randn(8, 8, dtype=torch.float64)
    assert require_close("case", want.float(), want, 1e-6) < 1e-6
    with pytest.raises(WrongResultError, match="case: relative error"):
        require_close("case", spoil(want), want, 4e-3)


def test_the_benchmark_times_no_token_whose_logit_is_lower():
    hidden, lm_head = torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[1.0], [1.001], [0.9]])
    require_tokens("head", torch.tensor([1] * 50), torch.tensor([1] * 50), hidden.expand(50, 1), lm_head)
    require_tokens("head", torch.tensor([0] + [1] * 49), torch.tensor([1] * 50), hidden.expand(50, 1), lm_head)
    with pytest.raises(WrongResultError, match="1 differ from the reference, 1 by more than a rounding"):
        require_tokens("head", torch.tensor([2] + [1] * 49), torch.tensor([1] * 50), hidden.expand(50, 1), lm_head)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so_and_times_nothing(capsys):
    assert bench.main([]) == 1
    assert "no CUDA GPU" in capsys.readouterr().err


# On a GPU.


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_size", [64, 128, 256, 512])
@pytest.mark.parametrize(("rows", "window"), [(1, 100), (8, 0), (16, 100)])
def test_on_a_gpu_attention_is_its_definition_up_to_rounding(dtype, head_size, rows, window):
    case = bench.AttentionCase(rows, 8, 2, head_size, window, 700, dtype=dtype)
    data = bench.AttentionData(case)
    data.ours(1)
    require_close(case.name, data.out, data.reference(1), bench.BOUNDS[dtype])


@gpu
@pytest.mark.parametrize("page_size", [24, 32, 48, 64, 272])
def test_on_a_gpu_pages_of_any_size_are_read(page_size):
    data = bench.AttentionData(bench.AttentionCase(8, 8, 2, 256, 300, 1000, page_size=page_size))
    data.ours(1)
    require_close(str(page_size), data.out, data.reference(1), bench.BOUNDS[torch.bfloat16])


@gpu
@pytest.mark.parametrize("changes", [{"chunks": 1}, {"num_stages": 3}, {"num_stages": 5}, {"num_warps": 8}])
@pytest.mark.parametrize("splits", [1, 2, 9, 33])
def test_on_a_gpu_every_plan_gives_the_same_answer(changes, splits):
    case = bench.AttentionCase(8, 8, 2, 256, 0, 3000)
    data = bench.AttentionData(case)
    plan = plan_for(data.q, data.keys, data.tables[0], max_query_rows=8)
    plan = dataclasses.replace(plan, splits=splits, **changes)
    tensors = data.q, data.keys, data.values, data.out, data.query_start, data.seq_lens, data.tables[0]
    window_attention(*tensors, scale=data.scale, max_query_rows=8, plan=plan)
    require_close(str(plan), data.out, data.reference(0), bench.BOUNDS[case.dtype])


@gpu
@pytest.mark.parametrize("head_size", [64, 256, 512])
@pytest.mark.parametrize("rows", [1, 8])
def test_on_a_gpu_the_plan_for_a_smaller_device_gives_the_same_answer(head_size, rows):
    case = bench.AttentionCase(rows, 8, 2, head_size, 0, 4000)
    data = bench.AttentionData(case)
    plan = make_plan(1, rows, 8, 2, head_size, 4000, *A10G)
    tensors = data.q, data.keys, data.values, data.out, data.query_start, data.seq_lens, data.tables[0]
    window_attention(*tensors, scale=data.scale, max_query_rows=rows, plan=plan)
    require_close(str(plan), data.out, data.reference(0), bench.BOUNDS[case.dtype])


@gpu
@pytest.mark.parametrize("window", [0, 60])
def test_on_a_gpu_a_captured_call_follows_lengths_and_tables_that_change(window):
    case = bench.AttentionCase(4, 8, 2, 64, 0, 900)
    data = bench.AttentionData(case)
    arguments = {"scale": data.scale, "max_query_rows": 4, "max_seq_len": 900, "window": window}
    table = data.tables[0].clone()
    tensors = data.q, data.keys, data.values, data.out, data.query_start, data.seq_lens, table
    window_attention(*tensors, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        window_attention(*tensors, **arguments)
    for length in (900, 4, 33, 512, 0):
        data.seq_lens.fill_(length)
        table.copy_(data.tables[1])
        data.out.fill_(torch.nan)
        graph.replay()
        want = reference.window_attention(*tensors[:3], *tensors[4:], scale=data.scale, window=window)
        if length == 0:
            assert (data.out == 0).all()
        else:
            require_close(f"length {length}", data.out, want, bench.BOUNDS[case.dtype])


@gpu
@pytest.mark.parametrize("ties", ["candidate", "token"])
@pytest.mark.parametrize("top_k", [1, 8, 49, 300])
def test_on_a_gpu_the_centroid_head_finds_the_token_of_its_definition(ties, top_k):
    torch.manual_seed(top_k)
    weights = [torch.randint(-2, 3, (rows, 256), device="cuda").bfloat16() for rows in (512, 512 * 64)]
    ordering = torch.randperm(512 * 64, device="cuda")
    for _ in range(20):
        hidden = torch.randint(-2, 3, (5, 256), device="cuda").bfloat16()
        arguments = hidden, weights[0], ordering, weights[1], top_k
        want = reference.centroid_top_token(*arguments, ties=ties)
        assert torch.equal(centroid_top_token(*arguments, ties=ties), want)


@gpu
def test_on_a_gpu_a_thousand_calls_give_one_answer():
    data = bench.AttentionData(bench.AttentionCase(8, 8, 2, 256, 512, 4096))
    data.ours(0)
    first = data.out.clone()
    for _ in range(1000):
        data.out.fill_(torch.nan)
        data.ours(0)
        assert torch.equal(data.out, first)
