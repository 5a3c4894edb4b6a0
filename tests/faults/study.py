"""Studies that faults are injected into: the synthetic one and a small miniature; a hang meets its limit soon."""

import json

import yaml

from tests.conftest import MINIATURE, STUDY, write_lines, write_texts

STALL_S = {"synthetic": 8, "miniature": 90}  # a compilation is silent for a minute


def write_study(folder):
    """The synthetic study, as tests/conftest.py makes it."""
    folder.mkdir()
    (folder / "study.yaml").write_text(f"{STUDY}limits: {{stall_s: {STALL_S['synthetic']}}}\n")
    write_texts(folder)
    return folder


def small_miniature(folder):
    """The miniature with few texts and three windows, so that a whole search takes two minutes."""
    folder.mkdir()
    study = yaml.safe_load((MINIATURE / "study.yaml").read_text())
    study["name"] = "small"
    study["engine"] |= {part: str((MINIATURE / study["engine"][part]).resolve()) for part in ("model", "drafter")}
    study["knobs"]["sliding_window"] = {"low": 16, "high": 256, "step": 80}
    study["gate"]["ceiling"] = {"ratio": 1.1}
    study["limits"] = {"stall_s": STALL_S["miniature"]}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    for name, splits in (
        ("prompts.jsonl", {"tune": 12, "held-out": 8}),
        ("records.jsonl", {"gate": 16, "held-out": 8}),
    ):
        rows = [json.loads(line) for line in (MINIATURE / name).read_text().splitlines()]
        kept = [row for split, count in splits.items() for row in [r for r in rows if r["split"] == split][:count]]
        write_lines(folder / name, kept)
    return folder
