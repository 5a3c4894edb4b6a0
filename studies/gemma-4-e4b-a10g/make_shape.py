"""Write a study of gemma-4-E4B-it's shape without its weights, to dry-run a search on a GPU.

    python studies/gemma-4-e4b-a10g/make_shape.py /tmp/shape
    python -m search.run --study /tmp/shape --engine tests.real_engines:RandomWeights --trials 40

Sizes are those of the public configuration; the weights are drawn at random where vLLM loads them, and steered so that
both models always give one token (see `kernels.random_checkpoint`): every draft is accepted, and the records, which
hold that token, are likely. What a trial takes is real; what it says of quality and acceptance is not, and the search
marks all of it as simulated.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from kernels.random_checkpoint import LOAD_FORMAT, TARGET, TOKEN, write_configs

PROMPTS, PROMPT_TOKENS = 16, 272  # the contest's prompts hold 272 tokens on average
RECORDS, CONTEXT, SCORED = 32, 512, 480  # its records, 483
STUDY = f"""\
name: gemma-4-e4b-shape
engine:
  model: ./target
  drafter: ./drafter
  args:
    load_format: {LOAD_FORMAT}
    skip_tokenizer_init: true
    max_model_len: 4096
    max_num_seqs: 1
    max_num_batched_tokens: 512
    gpu_memory_utilization: 0.90
knobs:
  sliding_window: {{low: 64, high: 512, step: 4}}
  centroid_top_k: {{low: 8, high: 128}}
  num_speculative_tokens: {{low: 0, high: 10, default: 7}}
workload: {{prompts: prompts.jsonl, output_tokens: 512, prompts_per_trial: 8}}
gate: {{records: records.jsonl, ceiling: {{ratio: 1.05}}}}
"""


def main() -> None:
    """Write the folder that is named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python make_shape.py FOLDER")
    folder = Path(sys.argv[1])
    write_configs(folder)
    draw = random.Random(0)

    def text(count: int) -> list[int]:
        return [draw.randrange(TARGET["vocab_size"]) for _ in range(count)]

    prompts = [
        {"id": f"p{i}", "prompt_token_ids": text(PROMPT_TOKENS), "split": "held-out" if i % 2 else "tune"}
        for i in range(PROMPTS)
    ]
    target = [TOKEN] * SCORED
    records = [{"id": f"r{i}", "context_token_ids": text(CONTEXT), "target_token_ids": target} for i in range(RECORDS)]
    for name, rows in (("prompts.jsonl", prompts), ("records.jsonl", records)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "study.yaml").write_text(STUDY)
    print(
        f"Wrote {folder}: {PROMPTS} prompts, {RECORDS} records, configs of both models. In this repository's folder:\n"
        f"python -m search.run --study {folder} --engine tests.real_engines:RandomWeights --trials 40"
    )


if __name__ == "__main__":
    main()
