"""Measure a served folder over HTTP: what `confirm` claims from and `verify` checks the claim with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scipy import stats

from search.agreement import Agreement, compare, judge, unpack
from search.answers import judge as judge_answers
from search.answers import marked
from search.claim import CONFIDENCE
from search.data import Prompt, Record, Task, Wave, waves
from search.endpoint import Endpoint, EndpointError
from search.gate import RecordScore
from search.gates import Finding
from search.pace import elasticity

WARMUPS = 4
LEAST_PASSES, MOST_PASSES = 3, 6
SELF_PROMPTS = 4  # on which the scored path is held against the served one
SELF_SHIFT = 0.02  # nats a token that the two may differ by, rounding being what it is
NARROW = 0.01  # relative standard error of the mean of the passes that is narrow enough
PROBE_EVERY = 4  # prompts

Tell = Callable[[str, int, int], None]  # what is being measured, how much of it is done, of how much


@dataclass
class Served:
    """Timed passes over a set of prompts in one process: seconds by wave (alone: by prompt), tokens by prompt id.

    `machine_s[i]` is how long the probe took during pass i: reading one prompt and giving one token. That is the same
    work whenever the same folder is served, and says how fast the machine was (see `search.pace`).
    """

    passes: list[dict[str, float]] = field(default_factory=list)
    machine_s: list[float] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    drafts: int = 0
    draft_tokens: int = 0
    stable: bool = True  # every pass gave the same tokens

    def at(self, machine_s: float, elasticity: float) -> list[dict[str, float]]:
        """The passes, as they would have gone on a machine whose probe takes `machine_s`."""
        return [
            {p: latency_s * (machine_s / now) ** elasticity for p, latency_s in seconds.items()}
            for seconds, now in zip(self.passes, self.machine_s, strict=True)
        ]

    @property
    def paces(self) -> list[tuple[float, float]]:
        """Seconds of the probe and of all prompts, by pass."""
        return [(now, math.fsum(seconds.values())) for seconds, now in zip(self.passes, self.machine_s, strict=True)]

    @property
    def pace_s(self) -> float:
        """How long the probe took, over all passes."""
        return statistics.geometric_mean(self.machine_s)

    @property
    def drafts_a_step(self) -> float:
        """K as it acted."""
        return self.draft_tokens / self.drafts if self.drafts else 0.0


def time_prompts(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    output_tokens: int,
    tell: Tell,
    *,
    probe: Prompt | None = None,
    once: bool = False,
    concurrency: int = 1,
) -> Served:
    """Warm up, then time all prompts, one at a time and in one order, until the mean over passes is narrow.

    With a `concurrency` above 1 they are asked for in waves of so many, as in the search.

    Args:
        endpoint: the server.
        prompts: what to time.
        output_tokens: that each is decoded to.
        tell: told how it goes.
        probe: the prompt whose first token shows how fast the machine is; the first of `prompts` if there is none.
        once: make a single pass.
        concurrency: how many are asked for at the same time.

    Raises:
        EndpointError: an answer was not what was asked for, or a prompt came from the prefix cache.
    """
    served, probe, in_waves = Served(), probe or prompts[0], waves(prompts, concurrency)
    for wave in in_waves[:WARMUPS]:
        _complete(endpoint, wave, output_tokens)
    counted = endpoint.draft_counts()
    while len(served.passes) < (1 if once else MOST_PASSES) and not _narrow(served):
        seconds: dict[str, float] = {}
        probes = []
        for number, wave in enumerate(in_waves):
            tell("prompts, once" if once else f"pass {len(served.passes) + 1}", number, len(in_waves))
            if number % PROBE_EVERY == 0:
                probes.append(endpoint.complete(probe.token_ids, 1).latency_s)
            outputs, seconds[wave.id] = _complete(endpoint, wave, output_tokens)
            for prompt, token_ids in zip(wave.prompts, outputs, strict=True):
                served.stable &= served.tokens.setdefault(prompt.id, token_ids) == token_ids
        served.passes.append(seconds)
        served.machine_s.append(statistics.geometric_mean(probes))
    served.drafts, served.draft_tokens = (b - a for a, b in zip(counted, endpoint.draft_counts(), strict=True))
    if cached := endpoint.cached_tokens():
        raise EndpointError(
            f"{cached} tokens of the timed prompts came from the server's prefix cache: it did less than it was asked."
        )
    return served


def _complete(endpoint: Endpoint, wave: Wave, output_tokens: int) -> tuple[list[list[int]], float]:
    """Tokens after each prompt of a wave, and the seconds until all were there."""
    if len(wave.prompts) == 1:
        found = endpoint.complete(wave.prompts[0].token_ids, output_tokens)
        return [found.token_ids], found.latency_s
    return endpoint.complete_together([prompt.token_ids for prompt in wave.prompts], output_tokens)


def score_records(endpoint: Endpoint, records: Sequence[Record], tell: Tell, top: int = 0) -> dict[str, RecordScore]:
    """Scores of the records through the endpoint's `prompt_logprobs`, by record id; with `top` their distributions."""
    found = {}
    for number, record in enumerate(records):
        tell("records", number, len(records))
        found[record.id] = endpoint.score(record.context, record.target, top)
    return found


def agreement_gates(
    reference: Mapping[str, bytes], scores: Mapping[str, RecordScore], limits: Mapping[str, float]
) -> list[Finding]:
    """What the gates say that ask for agreement, from records that were scored with their distributions.

    Args:
        reference: packed distributions of the reference setting, by record.
        scores: of all gate records.
        limits: by gate.

    Raises:
        ValueError: the reference's are of other records, or of so many other tokens.
    """
    if missing := scores.keys() - reference.keys():
        raise ValueError(f"there are none of record {min(missing)}")
    found = [compare(unpack(reference[r]), unpack(s.distributions or b"")) for r, s in scores.items()]
    agrees = Agreement(sum(one.top1 for one in found), math.fsum(one.kl for one in found))
    tokens = sum(score.tokens for score in scores.values())
    return judge(agrees, tokens, tokens, limits)


def task_gate(
    endpoint: Endpoint, tasks: Sequence[Task], max_tokens: int, stop: Sequence[str], least: float, tell: Tell
) -> Finding:
    """What the gate says that asks tasks: all of them, by the server as it decodes, drafts and all."""
    answers = {}
    for number, task in enumerate(tasks):
        tell("tasks", number, len(tasks))
        answers[task.id] = marked(endpoint.solve(task.prompt, max_tokens, stop), task.expected)
    return judge_answers(answers, list(answers), least)


def path_shift(endpoint: Endpoint, prompts: Sequence[Prompt], output_tokens: int) -> float:
    """How far the scored path lies from the served path: nats a token.

    Tokens that the endpoint generates after SELF_PROMPTS prompts are scored again as a text; an endpoint whose
    perplexity is another model's than the one that it decodes with
    gives itself away here.
    """
    said, scored = [], []
    for prompt in prompts[:SELF_PROMPTS]:
        shown = endpoint.complete(prompt.token_ids, output_tokens, show=True)
        again = endpoint.score(prompt.token_ids, shown.token_ids)
        said.append(-math.fsum(shown.logprobs))
        scored.append(again.nll)
    return abs(math.fsum(scored) - math.fsum(said)) / (output_tokens * len(said))


def tps(seconds: Mapping[str, float], tokens: int) -> float:
    """Tokens a second of one pass over prompts or waves, each of `tokens` generated tokens."""
    return len(seconds) * tokens / math.fsum(seconds.values())


def fall(tune: Mapping[str, float], held_out: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """How far throughput falls from tune to held-out prompts, and the least fall that the measurement allows.

    Both relative (0.05 is 5 %). The second is the lower end of a two-sided 95 % interval (Student's t). It allows for
    the spread of prompts, taken from both sets together, so that two held-out prompts that happen to be alike do not
    pass for certainty; and for the spread of passes, as a single one was made over the tune prompts. Both half-widths
    are added in quadrature, which is exact where one of them counts and a little wide elsewhere; of three passes that
    differ by 1 % it is 5 % to either side.

    Args:
        tune: seconds by prompt id, three prompts or more.
        held_out: the same of two passes or more over the held-out prompts; each for as many tokens.
    """
    passes = [statistics.fmean(seconds.values()) for seconds in held_out]
    again = [statistics.fmean(seconds[prompt] for seconds in held_out) for prompt in held_out[0]]
    means = statistics.fmean(tune.values()), statistics.fmean(again)
    deviations = [s / means[0] - 1 for s in tune.values()] + [s / means[1] - 1 for s in again]
    freedoms = len(deviations) - 2, len(passes) - 1
    of_prompts = math.fsum(d**2 for d in deviations) / freedoms[0] * (1 / len(tune) + 1 / len(again))
    of_passes = statistics.variance(passes) / means[1] ** 2 * (1 + 1 / len(passes))
    halves = [
        float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(variance)
        for freedom, variance in zip(freedoms, (of_prompts, of_passes), strict=True)
    ]
    found, half = math.log(means[1] / means[0]), math.hypot(*halves)
    return -math.expm1(-found), -math.expm1(half - found)


def _narrow(served: Served) -> bool:
    if len(served.passes) < LEAST_PASSES:
        return False
    at_one_pace = served.at(served.pace_s, elasticity([served.paces]))
    logs = [math.log(math.fsum(seconds.values())) for seconds in at_one_pace]
    return statistics.stdev(logs) / math.sqrt(len(logs)) <= NARROW
