"""Check the kernels on this GPU, then time them against vLLM's own: python -m kernels.bench [--json FILE] [--seed N].

With --end-to-end it is vLLM that is timed, with and without each patch (see `kernels.end_to_end`).

Every case is first compared with its float64 reference on fresh random data; a kernel that is off is not timed, and
the exit code is 1. Times are medians of CUDA-graph replays, divided by the calls in the graph. Consecutive calls of a
graph use other pages, or other hidden states, of a pool several times the L2 cache, so that each call finds its data
in device memory, as it does between the other layers of a model. The floor is the bytes that a call has to move over
the bandwidth of a large copy (bytes read and written), measured in the same run. Where vllm cannot be imported its
columns stay empty. Exit codes: 0 done, 1 a kernel is wrong or there is no CUDA GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels import reference
from kernels.centroid_head import Ties, centroid_top_token, make_workspace
from kernels.window_attention import plan_for, window_attention

BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
"""Largest |kernel - reference| / |reference| in 2-norms: weights and output are rounded to the dtype."""
POOL_BYTES = 256 << 20
TOP_KS = (8, 16, 32, 49, 64, 96, 128)
Call = Callable[[], Any]


class WrongResultError(RuntimeError):
    """A kernel's result is further from its reference than its bound allows."""


@dataclass(frozen=True)
class AttentionCase:
    """One shape of paged attention; window 0 is full attention."""

    rows: int
    query_heads: int
    kv_heads: int
    head_size: int
    window: int
    context: int
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """Short text for a table."""
        seen = f"window {self.window}" if self.window else "full"
        return f"{self.rows} rows, {self.query_heads}/{self.kv_heads} heads × {self.head_size}, {seen} @ {self.context}"

    @property
    def keys(self) -> int:
        """Keys that at least one row sees."""
        return min(self.context, self.window + self.rows - 1) if self.window else self.context

    @property
    def bytes_moved(self) -> int:
        """Bytes that a call has to move at least: the seen keys and values, queries and output, each once."""
        numbers = 2 * self.keys * self.kv_heads + 2 * self.rows * self.query_heads
        return int(numbers * self.head_size * self.dtype.itemsize)


CASES = (
    AttentionCase(8, 8, 2, 256, 512, 4096),
    AttentionCase(8, 8, 2, 256, 512, 2048),
    AttentionCase(8, 8, 2, 256, 188, 2048),
    AttentionCase(8, 8, 2, 256, 512, 272),
    AttentionCase(8, 8, 2, 256, 0, 4096),
    AttentionCase(8, 8, 2, 256, 0, 32768),
    AttentionCase(8, 8, 2, 512, 0, 272),
    AttentionCase(8, 8, 2, 512, 0, 2048),
    AttentionCase(8, 8, 2, 512, 0, 4096),
    AttentionCase(8, 8, 2, 512, 0, 32768),
    AttentionCase(1, 4, 2, 256, 512, 4096),
    AttentionCase(1, 4, 2, 512, 0, 2048),
    AttentionCase(1, 4, 2, 512, 0, 4096),
)


@dataclass(frozen=True)
class HeadCase:
    """One shape of the drafter's centroid head; E4B's by default."""

    top_k: int
    rows: int = 1
    hidden_size: int = 256
    centroids: int = 2048
    tokens_per_centroid: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def bytes_moved(self) -> int:
        """Bytes for one row: centroids, then the ids (int64) and head rows of the candidates."""
        candidates = self.top_k * self.tokens_per_centroid
        return int((self.centroids + candidates) * self.hidden_size * self.dtype.itemsize + candidates * 8)


def require_close(name: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> float:
    """The relative error of `got`, in 2-norms.

    Raises:
        WrongResultError: the error is over `bound`, or not a number.
    """
    error = float((got.double() - want).norm() / want.norm())
    if not error <= bound:
        raise WrongResultError(f"{name}: relative error {error:.2e} is over {bound:.0e}; not timed.")
    return error


def require_tokens(
    name: str, got: torch.Tensor, want: torch.Tensor, hidden: torch.Tensor, lm_head: torch.Tensor
) -> None:
    """Require the reference's tokens, but for logits that float32 and float64 sums round differently.

    Args:
        name: what is checked, for the message.
        got: [rows] token ids of the kernel.
        want: [rows] token ids of the reference.
        hidden: [rows, hidden size].
        lm_head: [vocabulary, hidden size].

    Raises:
        WrongResultError: a token's logit is further below the reference's than one rounding of the dtype, or more than
            one token in fifty differs.
    """
    ours, theirs = ((hidden.double() * lm_head[tokens].double()).sum(-1) for tokens in (got, want))
    worse = int((theirs - ours > torch.finfo(hidden.dtype).eps * theirs.abs()).sum())
    differ = int((got != want).sum())
    if worse or differ * 50 > want.numel():
        raise WrongResultError(
            f"{name}: of {want.numel()} tokens {differ} differ from the reference, {worse} by more than a rounding; "
            "not timed."
        )


def microseconds(calls: Sequence[Call], replays: int = 20) -> float:
    """Median time of one of `calls` when all of them are captured in one CUDA graph and replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compile, and let libraries allocate, before anything is captured
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / len(calls))
    return statistics.median(times[3:])


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 4 GiB within the device; median of 20, timed by events."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    times_ms = []
    for _ in range(23):  # not in a graph, where a copy of this size was slower
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times_ms.append(float(begin.elapsed_time(end)))
    return 2 * int(source.numel()) * 4 / (statistics.median(times_ms[3:]) * 1e-3)


class AttentionData:
    """Random queries and a pool of pages in vLLM's layout, with one page table for each call of a graph."""

    def __init__(self, case: AttentionCase) -> None:
        self.case = case
        pages = -(-case.context // case.page_size)
        seen = -(-case.keys // case.page_size) + 1
        self.copies = max(4, min(512, POOL_BYTES // case.bytes_moved))
        # As vLLM 0.26 allocates it: [pages, page size, KV heads, K then V].
        pool = torch.randn(
            (self.copies * seen, case.page_size, case.kv_heads, 2 * case.head_size), dtype=case.dtype, device="cuda"
        )
        self.keys, self.values = pool.split(case.head_size, dim=-1)
        order = torch.randperm(self.copies * seen, device="cuda").int().view(self.copies, seen)
        self.tables = torch.zeros((self.copies, 1, -(-pages // 16) * 16), dtype=torch.int32, device="cuda")
        self.tables[:, 0, max(0, pages - seen) : pages] = order[:, : min(seen, pages)]
        self.q = torch.randn((case.rows, case.query_heads, case.head_size), dtype=case.dtype, device="cuda")
        self.out = torch.full_like(self.q, torch.nan)
        self.query_start = torch.tensor([0, case.rows], dtype=torch.int32, device="cuda")
        self.seq_lens = torch.tensor([case.context], dtype=torch.int32, device="cuda")
        self.scale = case.head_size**-0.5
        plan = plan_for(
            self.q, self.keys, self.tables[0], max_query_rows=case.rows, max_seq_len=case.context, window=case.window
        )
        self.workspace = torch.empty(plan.workspace_floats(1, case.kv_heads, case.head_size), device="cuda")

    def reference(self, copy: int) -> torch.Tensor:
        """The definition, in float64."""
        return reference.window_attention(
            self.q,
            self.keys,
            self.values,
            self.query_start,
            self.seq_lens,
            self.tables[copy],
            scale=self.scale,
            window=self.case.window,
        )

    def ours(self, copy: int) -> None:
        """One call of this project's kernel."""
        window_attention(
            self.q,
            self.keys,
            self.values,
            self.out,
            self.query_start,
            self.seq_lens,
            self.tables[copy],
            scale=self.scale,
            max_query_rows=self.case.rows,
            max_seq_len=self.case.context,
            window=self.case.window,
            workspace=self.workspace,
        )

    def stock(self, unified_attention: Callable[..., None]) -> Callable[[int], None]:
        """The kernel of vLLM, called as its Triton attention backend calls it (with the buffers of its split form)."""
        case, segments = self.case, 16
        rows = 128 // case.kv_heads
        one = torch.ones((1, case.kv_heads), device="cuda")
        buffers = {
            "softmax_segm_output": torch.empty((rows, case.query_heads, segments, case.head_size), device="cuda"),
            "softmax_segm_max": torch.empty((rows, case.query_heads, segments), device="cuda"),
            "softmax_segm_expsum": torch.empty((rows, case.query_heads, segments), device="cuda"),
        }

        def call(copy: int) -> None:
            unified_attention(
                q=self.q,
                k=self.keys,
                v=self.values,
                out=self.out,
                cu_seqlens_q=self.query_start,
                max_seqlen_q=case.rows,
                seqused_k=self.seq_lens,
                max_seqlen_k=case.context,
                softmax_scale=self.scale,
                causal=True,
                window_size=(case.window - 1, 0) if case.window else (-1, -1),
                block_table=self.tables[copy],
                softcap=0,
                q_descale=None,
                k_descale=one,
                v_descale=one,
                seq_threshold_3D=rows,
                num_par_softmax_segments=segments,
                **buffers,
            )

        return call


def bench_attention(
    case: AttentionCase, unified_attention: Callable[..., None] | None, bandwidth: float
) -> dict[str, Any]:
    """Check and time one attention shape; a row of the table."""
    data = AttentionData(case)
    data.ours(0)
    error = require_close(case.name, data.out, data.reference(0), BOUNDS[case.dtype])
    ours = microseconds([partial(data.ours, copy) for copy in range(data.copies)])
    stock = stock_error = None
    if unified_attention is not None:
        call = data.stock(unified_attention)
        data.out.fill_(torch.nan)
        call(0)
        stock_error = require_close(f"vLLM's kernel, {case.name}", data.out, data.reference(0), BOUNDS[case.dtype])
        stock = microseconds([partial(call, copy) for copy in range(data.copies)])
    floor = case.bytes_moved / bandwidth * 1e6
    return {
        "case": case.name,
        "error": error,
        "vllm_error": stock_error,
        "ours_us": ours,
        "vllm_us": stock,
        "ratio": stock / ours if stock else None,
        "floor_us": floor,
        "of_copy_bandwidth": floor / ours,
        "shape": {**asdict(case), "dtype": str(case.dtype)},
    }


class HeadData:
    """Random weights of a centroid head and hidden states, one for each call of a graph."""

    def __init__(self, case: HeadCase) -> None:
        self.case = case
        vocabulary = case.centroids * case.tokens_per_centroid
        self.centroids, self.lm_head = (
            torch.randn((count, case.hidden_size), dtype=case.dtype, device="cuda") / case.hidden_size**0.5
            for count in (case.centroids, vocabulary)
        )
        self.ordering = torch.randperm(vocabulary, device="cuda")
        # Enough states that their candidates exceed the L2 cache several times at top-k 16 and above.
        self.hidden = torch.randn((400, case.rows, case.hidden_size), dtype=case.dtype, device="cuda")
        self.workspace = make_workspace(case.rows, self.centroids)
        self.out = torch.empty(case.rows, dtype=torch.int64, device="cuda")

    def ours(self, hidden: torch.Tensor, ties: Ties = "candidate") -> torch.Tensor:
        """One call of this project's kernels."""
        return centroid_top_token(
            hidden,
            self.centroids,
            self.ordering,
            self.lm_head,
            self.case.top_k,
            ties=ties,
            out=self.out,
            workspace=self.workspace,
        )

    def reference(self, hidden: torch.Tensor, ties: Ties) -> torch.Tensor:
        """The definition, in float64."""
        return reference.centroid_top_token(
            hidden, self.centroids, self.ordering, self.lm_head, self.case.top_k, ties=ties
        )


def bench_head(case: HeadCase, embedder: type[Any] | None, bandwidth: float) -> dict[str, Any]:
    """Check and time one centroid head; a row of the table."""
    data = HeadData(case)
    name = f"centroid head, top-k {case.top_k}"
    chosen = {}
    for ties in ("candidate", "token"):
        chosen[ties] = torch.cat([data.ours(hidden, ties).clone() for hidden in data.hidden])
        wanted = torch.cat([data.reference(hidden, ties) for hidden in data.hidden])
        require_tokens(f"{name}, ties by {ties}", chosen[ties], wanted, data.hidden.flatten(0, 1), data.lm_head)
    row: dict[str, Any] = {"top_k": case.top_k}
    row["ours_us"] = microseconds([partial(data.ours, hidden) for hidden in data.hidden])
    for column in ("vllm_us", "ratio", "vllm_full_us", "ratio_full", "agree", "agree_full"):
        row[column] = None
    if embedder is not None:
        vocabulary = data.ordering.numel()
        stock = embedder(case.hidden_size, vocabulary, case.centroids, case.top_k).to("cuda", case.dtype)
        stock.centroids.weight.data = data.centroids
        stock.token_ordering = data.ordering
        calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "": lambda hidden: stock.get_top_tokens(hidden, data.lm_head),
            "_full": lambda hidden: stock(hidden, data.lm_head).argmax(dim=-1),
        }
        for (suffix, call), ties in zip(calls.items(), ("candidate", "token"), strict=True):
            theirs = torch.cat([call(hidden) for hidden in data.hidden])
            row[f"agree{suffix}"] = (theirs == chosen[ties]).double().mean().item()
            row[f"vllm{suffix}_us"] = microseconds([partial(call, hidden) for hidden in data.hidden])
            row[f"ratio{suffix}"] = row[f"vllm{suffix}_us"] / row["ours_us"]
    row["floor_us"] = case.bytes_moved / bandwidth * 1e6
    return row


def environment() -> dict[str, str | None]:
    """Where the figures come from."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "driver": driver[0] if driver else None,
        "torch": torch.__version__,
        "triton": version("triton"),
        "vllm": version("vllm"),
    }


def vllm_kernels() -> tuple[Callable[..., None], type[Any]] | None:
    """The attention function and centroid head of vLLM, or None where it cannot be imported."""
    try:
        from vllm.model_executor.models.gemma4_mtp import Gemma4MTPMaskedEmbedder
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError as error:
        print(f"vLLM's own kernels are not timed: {error}.")
        return None
    return unified_attention, Gemma4MTPMaskedEmbedder


def table(rows: Sequence[dict[str, Any]], columns: dict[str, tuple[str, str]]) -> list[str]:
    """A Markdown table; `columns` maps a heading to a key and a format."""

    def text(value: Any, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(text(row[key], form) for key, form in columns.values()) + " |" for row in rows]


def main(argv: list[str] | None = None) -> int:
    """Check, time, print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description="Check and time the GPU kernels.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the random data (default: a new one)")
    parser.add_argument(
        "--end-to-end",
        nargs="?",
        const="here",
        choices=("here", "separate"),
        help="time vLLM with and without the patches instead, in this process or in one of its own",
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("There is no CUDA GPU here, so nothing is timed. The tests check the kernels on a CPU.", file=sys.stderr)
        return 1
    if args.end_to_end:
        return _end_to_end(args.end_to_end, args.json)
    seed = torch.seed() if args.seed is None else args.seed
    torch.manual_seed(seed)
    stock = vllm_kernels()
    bandwidth = copy_bandwidth()
    found: dict[str, Any] = {"environment": environment(), "seed": seed, "copy_bytes_per_s": bandwidth}
    print(", ".join(f"{key} {value}" for key, value in found["environment"].items()))
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, seed {seed}\n")
    try:
        with torch.inference_mode():
            found["attention"] = [bench_attention(case, stock and stock[0], bandwidth) for case in CASES]
            found["centroid_head"] = [bench_head(HeadCase(k), stock and stock[1], bandwidth) for k in TOP_KS]
    except WrongResultError as error:
        print(error, file=sys.stderr)
        return 1
    attention_columns = {
        "attention": ("case", ""),
        "error": ("error", ".2e"),
        "of vLLM": ("vllm_error", ".2e"),
        "ours, µs": ("ours_us", ".2f"),
        "vLLM, µs": ("vllm_us", ".2f"),
        "vLLM ÷ ours": ("ratio", ".2f"),
        "floor, µs": ("floor_us", ".2f"),
        "of copy bandwidth": ("of_copy_bandwidth", ".0%"),
    }
    head_columns = {
        "top-k": ("top_k", ""),
        "ours, µs": ("ours_us", ".2f"),
        "vLLM get_top_tokens, µs": ("vllm_us", ".2f"),
        "÷ ours": ("ratio", ".2f"),
        "vLLM full logits + argmax, µs": ("vllm_full_us", ".2f"),
        "÷ ours ": ("ratio_full", ".2f"),
        "same token": ("agree", ".0%"),
        "same token (full)": ("agree_full", ".0%"),
        "floor, µs": ("floor_us", ".2f"),
    }
    print("\n".join([*table(found["attention"], attention_columns), "", *table(found["centroid_head"], head_columns)]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _end_to_end(mode: str, file: Path | None) -> int:
    from kernels import end_to_end

    try:
        measured = end_to_end.run_here() if mode == "here" else end_to_end.run_separate()
        found = {"environment": environment(), **measured}
    except end_to_end.WrongTokensError as error:
        print(error, file=sys.stderr)
        return 1
    print(", ".join(f"{key} {value}" for key, value in (found["environment"] | found["mode"]).items()))
    print("\n".join(end_to_end.table(found)))
    if file:
        file.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
