"""Make prompts.jsonl and records.jsonl: stretches of Python's own source and reference, in tokens of `model/`.

    python studies/gemma-3-270m/make_texts.py

Half is prose, topics of the language reference as pydoc has them; half is code, modules of the standard library. Both
are under the PSF licence, and what is committed came from Python 3.11.7. No file or topic is used twice. The model has
surely read them: perplexity is low, and says how it changes with the window, not how good the model is.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
SEED = 42
PROMPT = 384  # tokens, over the smaller windows so that the window acts on speed
CONTEXT, TARGET = 512, 128  # the window is 512: each scored token is where a smaller one leaves something out
PROMPTS = {"tune": 24, "held-out": 16}
RECORDS = {"gate": 12, "held-out": 12}


def main() -> None:
    """Draw them and write both files."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "model")
    bos = [tokenizer.bos_token_id]
    draw = random.Random(SEED)
    sources = [_shuffled(_prose(), draw), _shuffled(_code(), draw)]

    def stretch(kind: int, size: int) -> tuple[str, list[int]]:
        """The next text of a kind that is long enough: its name, and a stretch from its middle after <bos>."""
        for name, text in sources[kind]:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(tokens) >= size:
                start = (len(tokens) - size) // 2
                return name, bos + tokens[start : start + size - 1]
        raise SystemExit("error: Too few texts are long enough.")

    prompts, records = [], []
    for split, count in PROMPTS.items():
        for number in range(count):
            name, tokens = stretch(number % 2, PROMPT)
            prompts.append({"id": name, "split": split, "prompt_token_ids": tokens})
    for split, count in RECORDS.items():
        for number in range(count):
            name, tokens = stretch(number % 2, CONTEXT + TARGET)
            context, target = tokens[:CONTEXT], tokens[CONTEXT:]
            records.append({"id": name, "split": split, "context_token_ids": context, "target_token_ids": target})
    for file, rows in (("prompts.jsonl", prompts), ("records.jsonl", records)):
        (HERE / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{file}: {len(rows)} lines, {(HERE / file).stat().st_size / 1e3:.0f} kB")


def _prose() -> list[tuple[str, str]]:
    return [(f"topic {name}", text) for name, text in sorted(topics.items())]


def _code() -> list[tuple[str, str]]:
    folder = Path(sysconfig.get_path("stdlib"))
    return [(path.name, path.read_text()) for path in sorted(folder.glob("[a-z]*.py"))]


def _shuffled(texts: list[tuple[str, str]], draw: random.Random) -> Iterator[tuple[str, str]]:
    return iter(draw.sample(texts, len(texts)))


if __name__ == "__main__":
    main()
