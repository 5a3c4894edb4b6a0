"""Make the miniature from nothing: corpus, tokenizer, target, drafter, records and prompts.

    python studies/miniature/train/run.py [--work .train] [--target-seconds 470] [--drafter-seconds 545]

Needs torch, transformers and tokenizers, pip with an index for the corpus, and a CUDA GPU for the two training stages
(18 minutes on one H200; on a CPU they run too, and would take days for the same quality). Everything is written
beside this folder; --from STAGE starts later, at one of: corpus, tokenizer, target, drafter, records.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
STUDY = HERE.parent


def main() -> None:
    """Run the stages in order."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path(".train"))
    parser.add_argument("--target-seconds", type=int, default=470)
    parser.add_argument("--drafter-seconds", type=int, default=545)
    parser.add_argument("--from", dest="first", default="corpus")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    target, drafter = STUDY / "target", STUDY / "drafter"
    stages = {
        "corpus": ["corpus.py"],
        "tokenizer": ["tokenizer.py", "--out", target],
        "target": ["train_target.py", "--out", target, "--seconds", args.target_seconds],
        "drafter": [
            "train_drafter.py", "--target", target, "--out", drafter,
            "--seconds", args.drafter_seconds, "--rollouts", 3, "--steps", 6,
        ],
        "records": ["make_records.py", "--out", STUDY],
    }  # fmt: skip
    if args.first not in stages:
        parser.error(f"--from {args.first}: not a stage; one of {', '.join(stages)}")
    names = list(stages)
    for name in names[names.index(args.first) :]:
        script, *rest = stages[name]
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, HERE / script, "--work", args.work, *map(str, rest)], check=True)


if __name__ == "__main__":
    main()
