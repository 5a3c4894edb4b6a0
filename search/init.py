r"""Write the folder of a new study: ranges and arguments from the model's own config, texts taken in and split.

    python -m search.init my-study --model google/gemma-4-E4B-it --drafter google/gemma-4-E4B-it-assistant \
        --prompts prompts.json --records records.jsonl

What is not given is asked for where somebody can answer. Exit codes: 0 done, 2 bad arguments or files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from search.cli import add_output_arguments, fail, set_up_errors

QUESTIONS = {
    "model": "Model (a folder or a Hugging Face id): ",
    "drafter": "Its drafter (empty: none): ",
    "prompts": "Prompts (JSON Lines, ShareGPT, an OpenAI-style log, .txt): ",
    "records": "Gate records (JSON Lines, .txt; search.records build makes them): ",
}
OPTIONAL = ("drafter",)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m search.init", description="Write the folder of a new study.")
    p.add_argument("folder", type=Path, metavar="FOLDER", help="to be made; its name is the study's")
    p.add_argument("--model", help="a folder or a Hugging Face id")
    p.add_argument("--drafter", help="a folder or a Hugging Face id")
    p.add_argument("--prompts", metavar="FILE", help="prompts (JSON Lines, ShareGPT, an OpenAI-style log, .txt)")
    p.add_argument("--records", metavar="FILE", help="gate records (JSON Lines of token ids or text, .txt)")
    ceiling = p.add_mutually_exclusive_group()
    ceiling.add_argument("--ppl", type=float, metavar="X", help="absolute ceiling on perplexity")
    ceiling.add_argument("--ratio", type=float, metavar="X", help="ceiling relative to the reference (default 1.05)")
    p.add_argument("--ngram", action="store_true", help="also draft what followed the same tokens before")
    p.add_argument("--seed", type=int, default=42, metavar="N", help="of the split into halves (default 42)")
    add_output_arguments(p, json=False)
    return p


def main(argv: list[str] | None = None) -> int:
    """Write the folder; returns the exit code."""
    args = parser().parse_args(argv)
    with set_up_errors(args.debug):
        asking = sys.stdin.isatty()
        answers = {name: _answer(name, getattr(args, name), asking) for name in QUESTIONS}
        from search.newstudy import Wanted, write_study

        ceiling = {"ppl": args.ppl} if args.ppl is not None else {"ratio": args.ratio or 1.05}
        wanted = Wanted(
            model=answers["model"],
            drafter=answers["drafter"] or None,
            prompts=Path(answers["prompts"]),
            records=Path(answers["records"]),
            ceiling=ceiling,
            seed=args.seed,
            ngram=args.ngram,
        )
        for line in write_study(args.folder, wanted):
            print(line)
        print(f"Look at it: {args.folder / 'study.yaml'}")
        print(f"Next: python -m search.doctor --study {args.folder}; python -m search.run --study {args.folder}")
    return 0


def _answer(name: str, given: str | None, asking: bool) -> str:
    """What was given for `name`; otherwise what is answered, or nothing where it may be left out."""
    if given is not None:
        return given
    if asking:
        given = input(QUESTIONS[name]).strip()
    if not given and name not in OPTIONAL:
        fail(f"--{name} is needed.")
    return given or ""


if __name__ == "__main__":
    sys.exit(main())
