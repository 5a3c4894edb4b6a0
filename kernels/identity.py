"""Greedy tokens with and without the patches on a real model: python -m kernels.identity FOLDER [--dtype float32].

FOLDER holds target/, drafter/ and prompts.jsonl, as studies/miniature does. One engine in this process decodes every
prompt with vLLM's own code, twice, and with each set of patches. Where texts part, it is said how far apart the two
likeliest tokens' logits were there in vLLM's own run, and how far apart neighbouring numbers of that size are: a patch
adds up in another order, rounds otherwise and may turn such a tie, but nothing wider. In float32 there are hardly any
ties, and the texts should be equal. Drafts and accepted drafts are counted too. Exit codes: 0 equal but for ties, 1
not, or no CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.end_to_end import DRAFTS, STOCK, VARIANTS, Engine

OUTPUT_TOKENS = 128
COMPARED: dict[str, dict[int, tuple[str, ...]]] = {
    "bfloat16": {512: tuple(VARIANTS), 64: (STOCK, "all")},
    "float32": {512: (STOCK, "all"), 64: (STOCK, "all")},
}
"""Variants to compare, by dtype and window."""
BITS = {"bfloat16": 8, "float32": 11}
"""Significant bits that a logit can be trusted to: vLLM's attention multiplies float32 matrices in tf32, of 11 bits."""
TIE_STEPS = 4
"""A tie is a gap of at most so many steps: two logits that may each be off by two."""
AGAIN = "stock again"


@dataclass(frozen=True)
class Text:
    """What one prompt gave: its tokens, and at each the logits of the two likeliest."""

    tokens: tuple[int, ...]
    best: tuple[float, ...]
    second: tuple[float, ...]
    drafts: int
    accepted: int


@dataclass(frozen=True)
class Parting:
    """The first token at which a text leaves vLLM's own."""

    prompt: int
    position: int
    gap: float
    step: float

    @property
    def is_tie(self) -> bool:
        """Whether the two likeliest tokens were as close as rounding."""
        return self.gap <= TIE_STEPS * self.step


def step_at(value: float, bits: int) -> float:
    """Distance between numbers of the size of `value` that have so many significant bits."""
    return math.ldexp(1.0, math.frexp(value)[1] - bits)


def partings(stock: Sequence[Text], other: Sequence[Text], bits: int) -> list[Parting]:
    """Where texts of the same prompts part from those of `stock`."""
    found = []
    for prompt, (mine, theirs) in enumerate(zip(stock, other, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(mine.tokens, theirs.tokens, strict=True)) if a != b), None)
        if at is not None:
            gap = mine.best[at] - mine.second[at]
            found.append(Parting(prompt, at, gap, step_at(mine.best[at], bits)))
    return found


def largest_shift(stock: Sequence[Text], other: Sequence[Text]) -> float:
    """Largest change of the likeliest token's logit, over all positions before texts part."""
    shift = 0.0
    for mine, theirs in zip(stock, other, strict=True):
        for a, b, x, y in zip(mine.tokens, theirs.tokens, mine.best, theirs.best, strict=True):
            if a != b:
                break
            shift = max(shift, abs(x - y))
    return shift


def decode_all(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Text]:
    """The text of every prompt; the engine's `logprobs_mode` is raw_logits."""
    texts = []
    for prompt in prompts:
        timed, output = engine.decode(prompt, OUTPUT_TOKENS, logprobs=2)
        ranked = [sorted((entry.logprob for entry in at.values()), reverse=True) for at in output.outputs[0].logprobs]
        best, second = zip(*((first, next_) for first, next_, *_ in ranked), strict=True)
        texts.append(Text(timed.tokens, best, second, timed.drafts, timed.accepted))
    return texts


def compare(stock: Sequence[Text], other: Sequence[Text], dtype: str = "bfloat16") -> dict[str, Any]:
    """How the texts of a variant lie to vLLM's own."""
    parted = partings(stock, other, BITS[dtype])
    return {
        "prompts": len(stock),
        "equal": len(stock) - len(parted),
        "partings": [{**asdict(parting), "is_tie": parting.is_tie} for parting in parted],
        "largest_logit_shift": largest_shift(stock, other),
        "accepted_a_step": sum(text.accepted for text in other) / sum(text.drafts for text in other),
        "drafts": sum(text.drafts for text in other),
    }


def build(folder: Path, **arguments: Any) -> Engine:
    """An engine on the folder's models, which shows logits."""
    return Engine(
        model=str(folder / "target"),
        max_model_len=1024,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=256 << 20,
        logprobs_mode="raw_logits",
        speculative_config={"method": "mtp", "model": str(folder / "drafter"), "num_speculative_tokens": DRAFTS},
        **arguments,
    )


def read_prompts(folder: Path) -> list[list[int]]:
    """The folder's prompts, as token ids."""
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_token_ids"] for line in lines]


def table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The comparisons as a Markdown table."""
    lines = [
        "| window, variant | equal texts | parted | at ties | widest gap | largest logit shift | accepted a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        ties = sum(parting["is_tie"] for parting in row["partings"])
        widest = max((parting["gap"] for parting in row["partings"]), default=0.0)
        lines.append(
            f"| {name} | {row['equal']} of {row['prompts']} | {len(row['partings'])} | {ties} | {widest:.4f} "
            f"| {row['largest_logit_shift']:.4f} | {row['accepted_a_step']:.3f} |"
        )
    return lines


def run(folder: Path, dtype: str) -> dict[str, dict[str, Any]]:
    """Compare the variants, and vLLM's own code run again, at every window; by "window, variant"."""
    engine, prompts = build(folder, dtype=dtype), read_prompts(folder)
    found = {}
    for window, names in COMPARED[dtype].items():
        engine.switch((), window)
        stock = decode_all(engine, prompts)
        found[f"{window}, {AGAIN}"] = compare(stock, decode_all(engine, prompts), dtype)
        for name in names:
            engine.switch(VARIANTS[name], window)
            texts = stock if name == STOCK else decode_all(engine, prompts)
            found[f"{window}, {name}"] = compare(stock, texts, dtype) | {"patches": engine.patches()}
    return found


def main(argv: list[str] | None = None) -> int:
    """Compare, print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernels.identity", description="Compare greedy tokens.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="target/, drafter/ and prompts.jsonl")
    parser.add_argument("--dtype", choices=tuple(COMPARED), default="bfloat16", help="of weights and cache")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("There is no CUDA GPU here, so nothing is compared.", file=sys.stderr)
        return 1
    found = run(args.folder, args.dtype)
    print("\n".join(table(found)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(parting["is_tie"] for row in found.values() for parting in row["partings"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
