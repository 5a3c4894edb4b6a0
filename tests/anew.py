"""What a trial costs that starts vLLM anew and measures everything: python -m tests.anew STUDY ENGINE TRIALS

The same settings, records and prompts as a search's trial, in an engine of its own each: no live knob, no remembered
perplexity, no trial that is stopped early. Prints a line a trial and the medians.
"""

import itertools
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from search.engine.process import Worker
from search.engine.protocol import Applied, Apply, Decode, Decoded, Load, Loaded, Score, Scored
from search.spec import read_study
from search.stages.base import PROBE_TOKENS


def main():
    study, engine, trials = sys.argv[1:]
    spec, draw = read_study(Path(study) / "study.yaml"), random.Random(0)
    limits = {knob.name: knob.largest for knob in spec.knobs}
    request = Load(model=spec.engine.model, drafter=spec.engine.drafter, args=spec.engine.args, limits=limits)
    prompts, workload = spec.prompts(), spec.workload
    probe = list(prompts[0].token_ids)
    rows = []
    for number in range(int(trials)):
        setting = {knob.name: knob.nearest(draw.randint(knob.low, knob.high)) for knob in spec.knobs}
        times = [time.perf_counter()]
        with tempfile.TemporaryDirectory() as folder, Worker(engine, Path(folder) / "worker.log") as worker:
            worker.ask(request, Loaded, 1800)
            times.append(time.perf_counter())
            worker.ask(Apply(setting=setting, probe=probe, probe_tokens=PROBE_TOKENS), Applied, 600)
            times.append(time.perf_counter())
            for record in spec.records():
                worker.ask(Score(record=record.id, context=[*record.context], target=[*record.target]), Scored, 600)
            times.append(time.perf_counter())
            for prompt in prompts[: workload.prompts_per_trial]:
                ask = Decode(prompt_id=prompt.id, prompt=[*prompt.token_ids], max_tokens=workload.output_tokens)
                worker.ask(ask, Decoded, 600)
            times.append(time.perf_counter())
        rows.append([b - a for a, b in itertools.pairwise(times)] + [time.perf_counter() - times[0]])
        print(number, setting, _words(rows[-1]), flush=True)
    print("median", _words([statistics.median(column) for column in zip(*rows, strict=True)]))


def _words(seconds):
    return ", ".join(
        f"{n} {s:.1f} s" for n, s in zip(("start", "apply", "gate", "speed", "in all"), seconds, strict=True)
    )


if __name__ == "__main__":
    main()
