"""Do the speed intervals keep what they promise? Many studies on the simulated machine, whose truth is known."""

import random

import msgspec
import pytest

from search import speed
from search.engine import simulated
from search.engine.protocol import Apply, Decode, Load
from search.engine.worker import answer
from search.spec import read_study
from search.stages import ThroughputStage, reference_passes
from search.store import Store, open_engine

STUDIES = 250  # at each of two noises
SETTINGS = [
    {"sliding_window": 512, "centroid_top_k": 32, "num_speculative_tokens": 4},  # timed on all prompts, an anchor
    {"sliding_window": 256, "centroid_top_k": 16, "num_speculative_tokens": 7},
    {"sliding_window": 256, "centroid_top_k": 16, "num_speculative_tokens": 7},  # the same again
    {"sliding_window": 128, "centroid_top_k": 4, "num_speculative_tokens": 2},
]
SAME = (1, 2)
REFERENCE = {"sliding_window": 512, "centroid_top_k": 32, "num_speculative_tokens": 0}


class InProcess:
    """A session whose engine is here, so that a thousand studies take seconds; each study has prompts of its own."""

    environment_id = 1
    build: dict = {}  # noqa: RUF012

    def __init__(self, seed):
        self._seed = seed
        self._engine = simulated.SimulatedEngine()
        load = Load(model="", drafter="", args={}, limits={"num_speculative_tokens": 10}, seed=seed)
        self._loaded = self._engine.load(load)
        self._engine._decoded = random.Random(seed).randrange(500)  # somewhere on the drift's wave

    def loaded(self):
        return self._loaded

    def ask(self, request, expect):
        if not isinstance(request, Decode):
            return answer(self._engine, request)
        own = msgspec.structs.replace(request, prompt_id=f"{request.prompt_id} of study {self._seed}")
        return msgspec.structs.replace(answer(self._engine, own), prompt_id=request.prompt_id)


class Silent:
    def note(self, text): ...

    def stage(self, *_): ...


class Study:
    """A simulated study whose reference has been measured; the machine drifts from then on."""

    def __init__(self, spec, seed, noise, monkeypatch):
        self._spec, self._seed, self._monkeypatch = spec, seed, monkeypatch
        monkeypatch.setattr(simulated, "LATENCY_NOISE", noise)
        monkeypatch.setattr(simulated, "DRIFT", 0.0)  # figures are relative to the machine as it is now
        self._store = Store(open_engine("sqlite://"), "s")
        self._stage = ThroughputStage(spec, InProcess(seed), self._store, Silent())
        self._store.add_all(self._stage.measure_reference(REFERENCE, REFERENCE)[1])
        self._stage.recall("a card", reference_passes(self._store, None))
        monkeypatch.setattr(simulated, "DRIFT", 0.1)

    def measure(self, trial, rival=None):
        setting = SETTINGS[trial]
        rows = []
        found = self._stage.measure(trial, setting, setting, rival, rows).throughput
        self._store.add_all(rows)
        return found

    def compare(self, trial, other):
        noise = 2**0.5 * self._stage._control_noise(24)
        return speed.compare(self._stage._timings_of(trial), self._stage._timings_of(other), noise)

    def truth(self, setting):
        with self._monkeypatch.context() as quiet:
            quiet.setattr(simulated, "LATENCY_NOISE", 0.0)
            quiet.setattr(simulated, "DRIFT", 0.0)
            session, tokens = InProcess(self._seed), self._spec.workload.output_tokens
            session.ask(Apply(setting=setting, probe=[], probe_tokens=0), None)
            decoded = [
                session.ask(Decode(prompt_id=p.id, prompt=list(p.token_ids), max_tokens=tokens), None)
                for p in self._spec.prompts()
            ]
            return sum(d.tokens for d in decoded) / sum(d.latency_s for d in decoded)


@pytest.mark.parametrize("noise", [0.003, 0.03])
def test_over_500_studies_intervals_cover_and_equal_settings_are_equal_as_often_as_promised(
    study_folder, noise, monkeypatch
):
    spec = read_study(study_folder)
    covered, equal = [], []
    for seed in range(STUDIES):
        study = Study(spec, seed, noise, monkeypatch)
        for trial, setting in enumerate(SETTINGS):
            found = study.measure(trial, rival=1 if trial == 3 else None)
            covered.append(found.low <= study.truth(setting) <= found.high)
        low, high = study.compare(*SAME).interval()
        equal.append(low <= 1 <= high)
    print(f"noise {noise}: {sum(covered) / len(covered):.3f} of {len(covered)} intervals cover the truth;", end=" ")
    print(f"{sum(equal) / len(equal):.3f} of {len(equal)} pairs of equal settings are called equal")
    assert abs(sum(covered) / len(covered) - speed.CONFIDENCE) <= 0.025  # prompts as unlike as the public ones
    assert sum(equal) / len(equal) >= speed.CONFIDENCE - 0.02
