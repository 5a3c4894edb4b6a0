"""Measure the miniature on a grid of settings: what `search.landscapes.miniature` is fitted to.

    python studies/miniature/measure_grid.py --out studies/miniature/grid

Every window's perplexity over the gate records; then speed on windows x top-k x K, and on settings off that grid, six
tune prompts each, in random order, one prompt at a fixed control setting after every setting. One engine, live knobs;
12 minutes, during which the machine should be left alone.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import random
import time
from pathlib import Path

from search.engine.process import Worker
from search.engine.protocol import Applied, Apply, Decode, Decoded, Load, Loaded, Score, Scored
from search.knobs import DRAFTS, TOP_K, WINDOW
from search.spec import StudySpec, read_study

WINDOWS = (32, 64, 112, 128, 192, 256)
TOP_KS = (1, 4, 8, 16, 32, 128)
KS = (1, 2, 3, 4, 6, 8, 10)
GATED_WINDOWS = (512, *range(16, 257, 16))
CONTROL = {WINDOW: 128, TOP_K: 32, DRAFTS: 3}
OFF_GRID, PROMPTS, PROBE_TOKENS, ANSWER_S = 30, 6, 24, 300.0
FIELDS = ("order", "kind", WINDOW, TOP_K, DRAFTS, "prompt", "latency_s", "drafts", "draft_tokens", "accepted_per_pos")


def settings(draw: random.Random) -> list[tuple[str, dict[str, int]]]:
    """What is timed, in random order: the grid, no drafts at every window, and settings between the grid's."""
    grid = [{WINDOW: w, TOP_K: t, DRAFTS: k} for w, t, k in itertools.product(WINDOWS, TOP_KS, KS)]
    plain = [{WINDOW: w, TOP_K: 32, DRAFTS: 0} for w in (*WINDOWS, 512)]
    between = [
        {
            WINDOW: draw.choice((48, 80, 96, 144, 160, 176, 208, 224, 240)),
            TOP_K: draw.choice((2, 3, 6, 12, 20, 24, 48, 64, 96)),
            DRAFTS: draw.choice((1, 2, 3, 4, 5, 7, 9)),
        }
        for _ in range(OFF_GRID)
    ]
    chosen = [("grid", s) for s in (*grid, *plain)] + [("off-grid", s) for s in between]
    draw.shuffle(chosen)
    return chosen


def measure(spec: StudySpec, out: Path) -> None:
    """Write perplexity.csv, speed.csv.gz and conditions.json into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    limits = {WINDOW: 512, **{knob.name: knob.largest for knob in spec.knobs if knob.name != WINDOW}}
    prompts = spec.prompts()[:PROMPTS]
    probe = list(prompts[0].token_ids)
    with Worker("vllm", out / "worker.log") as worker:
        load = Load(model=spec.engine.model, drafter=spec.engine.drafter, args=spec.engine.args, limits=limits)
        loaded = worker.ask(load, Loaded, 900.0)

        def apply(setting: dict[str, int], tokens: int = 0) -> float:
            request = Apply(setting=dict(setting), probe=probe if tokens else [], probe_tokens=tokens)
            return worker.ask(request, Applied, ANSWER_S).apply_s

        with (out / "perplexity.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("sliding_window", "record", "nll", "tokens", "score_s"))
            for window in GATED_WINDOWS:
                apply({**CONTROL, WINDOW: window}, PROBE_TOKENS)
                for record in spec.records():
                    request = Score(record=record.id, context=list(record.context), target=list(record.target))
                    found = worker.ask(request, Scored, ANSWER_S)
                    rows.writerow((window, record.id, repr(found.nll), found.tokens, f"{found.score_s:.4f}"))
        gated_s = time.perf_counter() - started
        applied = []
        with gzip.open(out / "speed.csv.gz", "wt", newline="") as packed:
            rows = csv.writer(packed)
            rows.writerow(FIELDS)

            def timed(order: int, kind: str, setting: dict[str, int], prompt: int) -> None:
                text = prompts[prompt]
                request = Decode(prompt_id=text.id, prompt=list(text.token_ids), max_tokens=spec.workload.output_tokens)
                d = worker.ask(request, Decoded, ANSWER_S)
                accepted = " ".join(map(str, d.accepted_per_pos[: setting[DRAFTS]]))
                values = (setting[WINDOW], setting[TOP_K], setting[DRAFTS], text.id, f"{d.latency_s:.6f}")
                rows.writerow((order, kind, *values, d.drafts, d.draft_tokens, accepted))

            for order, (kind, setting) in enumerate(settings(random.Random(9))):
                applied.append(apply(setting, PROBE_TOKENS))
                for prompt in range(PROMPTS):
                    timed(order, kind, setting, prompt)
                apply(CONTROL)
                timed(order, "control", CONTROL, order % PROMPTS)
    conditions = {
        **loaded.environment,
        "model_hash": loaded.model_hash,
        "drafter_hash": loaded.drafter_hash,
        "output_tokens": spec.workload.output_tokens,
        "prompts": [p.id for p in prompts],
        "start_s": round(loaded.start_s, 1),
        "gated_s": round(gated_s, 1),
        "median_apply_s": sorted(applied)[len(applied) // 2],
        "wall_s": round(time.perf_counter() - started, 1),
        "made_at": time.strftime("%Y-%m-%d"),
    }
    (out / "conditions.json").write_text(json.dumps(conditions, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path(__file__).parent)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    measure(read_study(args.study), args.out)
