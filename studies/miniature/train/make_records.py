"""Cut gate records and tune / held-out prompts from files that neither model was trained on.

    python make_records.py --work DIR --out FOLDER

In: DIR/held_out_tokens.jsonl. Out: FOLDER/records.jsonl (64 gate, 64 held-out: 512 tokens of context, 256 scored) and
FOLDER/prompts.jsonl (48 tune, 48 held-out: 768 tokens). Every line comes from a file of its own.
"""

import argparse
import json
import random
from pathlib import Path

CONTEXT_TOKENS, TARGET_TOKENS, PROMPT_TOKENS = 512, 256, 768


def main() -> None:
    """Cut records and prompts, each from a file of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    need = CONTEXT_TOKENS + TARGET_TOKENS
    rows = [json.loads(line) for line in (args.work / "held_out_tokens.jsonl").read_text().splitlines()]
    rows = [r for r in rows if len(r["token_ids"]) >= need]
    rng = random.Random(0)
    rng.shuffle(rows)
    wanted = [
        ("records", "gate", 64),
        ("records", "held-out", 64),
        ("prompts", "tune", 48),
        ("prompts", "held-out", 48),
    ]
    if len(rows) < sum(n for *_, n in wanted):
        raise SystemExit(
            f"{len(rows)} held-out files of {need} tokens or more; {sum(n for *_, n in wanted)} are needed"
        )
    lines: dict[str, list[str]] = {"records": [], "prompts": []}
    for kind, split, n in wanted:
        for i in range(n):
            ids = rows.pop()["token_ids"]
            start = rng.randrange(len(ids) - need + 1)
            ids = ids[start : start + need]
            row = {"id": f"{split}-{i:02d}", "split": split}
            if kind == "records":
                row |= {"context_token_ids": ids[:CONTEXT_TOKENS], "target_token_ids": ids[CONTEXT_TOKENS:]}
            else:
                row |= {"prompt_token_ids": ids}
            lines[kind].append(json.dumps(row))
    for kind, rows_out in lines.items():
        (args.out / f"{kind}.jsonl").write_text("\n".join(rows_out) + "\n")
    print(json.dumps({kind: len(rows_out) for kind, rows_out in lines.items()}))


if __name__ == "__main__":
    main()
