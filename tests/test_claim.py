import math
import random

import pytest

from search.claim import PROCESS_SD, TOLERANCE, claim


def passes(draw, level, noise, count=3, prompts=48):
    """Passes of one process: its own level, then noise from pass to pass."""
    base = {f"p{i}": math.exp(draw.gauss(0, 0.3)) for i in range(prompts)}
    here = draw.gauss(0, PROCESS_SD)
    found = []
    for _ in range(count):
        now = draw.gauss(0, noise)
        found.append({p: s * math.exp(now + here - level) for p, s in base.items()})
    return found


def tps(seconds, tokens=64):
    return len(seconds) * tokens / math.fsum(seconds.values())


def test_a_quiet_machine_may_claim_its_mean():
    found = claim([passes(random.Random(0), 0.0, 0.001)], 64)
    assert found.claimed == pytest.approx(found.mean)
    assert found.low < found.mean < found.high
    assert found.p_pass > 0.95 > found.p_pass_new_prompts


def test_a_noisy_machine_claims_less_than_its_mean():
    found = claim([passes(random.Random(0), 0.0, 0.05)], 64)
    assert found.claimed < found.mean
    assert found.p_pass == pytest.approx(0.95)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("noise", [0.002, 0.02, 0.06])
def test_over_1000_confirmations_a_rerun_bears_the_claim_out_as_often_as_promised(noise, processes):
    passed, promised = 0, 0.0
    for study in range(1000):
        draw = random.Random(f"{noise} {study}")
        base = draw.getrandbits(30)
        level = random.Random(base)
        prompts = {f"p{i}": math.exp(level.gauss(0, 0.3)) for i in range(48)}

        def run(prompts=prompts, draw=draw):
            here = draw.gauss(0, PROCESS_SD)
            drawn = [draw.gauss(0, noise) for _ in range(3)]
            return [{p: s * math.exp(here + now) for p, s in prompts.items()} for now in drawn]

        ours, again = claim([run() for _ in range(processes)], 64), claim([run()], 64)
        passed += again.mean >= (1 - TOLERANCE) * ours.claimed
        promised += ours.p_pass
    assert passed / 1000 >= 0.93  # 95 % is promised, or more
    assert passed / 1000 >= promised / 1000 - 0.02


def test_one_pass_supports_no_claim():
    with pytest.raises(ValueError, match="two passes"):
        claim([passes(random.Random(0), 0.0, 0.01, count=1)], 64)


def test_two_processes_that_differ_by_more_than_is_known_of_make_a_careful_claim():
    draw = random.Random(1)
    one = passes(draw, 0.0, 0.001)
    slower = [{p: s * 1.06 for p, s in seconds.items()} for seconds in one]
    alike, unlike = claim([one, one], 64), claim([one, slower], 64)
    assert alike.claimed == pytest.approx(alike.mean) and alike.p_pass > 0.99
    assert unlike.claimed < unlike.mean < alike.mean
    assert unlike.low < tps(slower[0]) < tps(one[0]) < unlike.high
