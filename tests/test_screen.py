"""What a person sees of a search: in a terminal of any width, without colours, in a file, and at its end."""

import io
import os
import pty
import re
import subprocess

import pytest
from made_studies import CEILING, outcome
from rich.console import Console

from search import closing
from search.screen import Screen, StageTimes, sparkline
from search.store import Confirmation, FrontPoint
from search.summary import Summary


def point(trial, tps, ppl):
    setting = {"sliding_window": 128, "centroid_top_k": 31, "num_speculative_tokens": 3}
    return FrontPoint(study="s", trial=trial, tps=tps, tps_low=tps, tps_high=tps, ppl=ppl, setting=setting)


FRONT = [point(1, 100.0, 2.30), point(2, 150.0, 2.36), point(3, 200.0, 2.41)]


def summary(**changes):
    values = {
        "study": "s",
        "simulated": False,
        "counts": {"complete": 45, "pruned": 15, "failed": 0},
        "cards": {"card 0": 60},
        "methods": {},
        "reused": 2,
        "reference": outcome(-1, tps=100.0, ppl=2.3),
        "ceiling": CEILING,
        "front": [],
        "best": {"trial": 3, "knobs": FRONT[2].setting, "tps": 200.0, "tps_low": 196, "tps_high": 204, "ppl": 2.41},
        "wall_s": 300.0,
        "engine_starts": 1,
        "gate": {},
        "gates": {},
        "drift": [],
        "warnings": [],
        "confirmed": [],
        "winner": None,
        "objectives": ("tps", "ppl"),
    }
    return Summary(**(values | changes))


def confirmed():
    values = {"claimed": 190.0, "mean": 192.0, "low": 188.0, "high": 196.0, "p_pass": 0.98}
    return Confirmation(study="s", trial=3, setting=FRONT[2].setting, eligible=True, figures={}, **values)


def test_the_time_a_trial_takes_is_told_by_stage_and_only_of_recent_trials():
    now = [0.0]
    times = StageTimes(lambda: now[0])

    def trial(gate_s, speed_s):
        for stage, seconds in (("gate", gate_s), ("speed", speed_s)):
            for _ in range(4):  # a stage goes on in steps
                times.enter(stage)
                now[0] += seconds / 4
        times.end_trial()
        now[0] += 0.5

    trial(100.0, 100.0)
    times.restart()
    for _ in range(2):
        trial(2.0, 4.0)
    assert times.per_trial() == pytest.approx({"ask": 0.5 / 3, "gate": 104 / 3, "speed": 108 / 3})
    for _ in range(30):
        trial(2.0, 4.0)
    assert times.per_trial() == pytest.approx({"ask": 0.5, "gate": 2.0, "speed": 4.0})


def test_nothing_is_estimated_from_two_trials():
    times = StageTimes(lambda: 0.0)
    times.end_trial()
    times.end_trial()
    assert times.per_trial() == {}


def test_the_sparkline_rises_where_more_perplexity_buys_speed():
    points = [(2.0, 100.0), (2.5, 150.0), (3.0, 200.0)]
    assert sparkline(points, 3.0, 8, "012") == "00011112"
    assert sparkline([(2.0, 100.0)], 3.0, 4, "01") == "0000"


@pytest.mark.parametrize("width", [60, 100])
def test_the_screen_shows_where_the_search_stands_at_any_width(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=30, color_system=None)
    screen = Screen(console)
    screen.opened(10, 200)
    for trial in range(5):
        screen.stage(trial, FRONT[0].setting, "speed", 3, 24)
        screen.finished(outcome(trial, tps=120.0 + trial), 11 + trial, FRONT)
    screen.finished(outcome(5, state="PRUNED", ppl=2.6, reason="over the ceiling"), 16, FRONT)
    screen.close()
    seen = Console(file=io.StringIO(), width=width, color_system=None)
    with seen.capture() as captured:
        seen.print(screen._screen())
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "16/200 trials, about" in text and "5 passed, 1 pruned" in text
    assert "trial 4: window 128, top-k 31, K 3, timing prompts 4/24" in text
    assert "trial 3: window 128, top-k 31, K 3: 200.0 tok/s, perplexity 2.4100" in text
    assert re.search("front 100 [▁▂▃▄▅▆▇█]{24} 200 tok/s", text)


def simulated_run(python, tmp_path, study_folder, trials=8):
    return [python, "-m", "search.run", "--engine", "simulated", "--study", study_folder, "--trials", str(trials)]


def test_a_file_gets_plain_lines(python, tmp_path, study_folder):
    command = simulated_run(python, tmp_path, study_folder)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "\x1b" not in done.stdout and "\r" not in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("[8/8] trial")]


def in_a_terminal(python, tmp_path, study_folder, **environment):
    """What a search writes to a terminal of 60 columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "60", "LINES": "30"} | environment
    command = simulated_run(python, tmp_path, study_folder, 30)
    process = subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return shown.decode()


@pytest.mark.parametrize("no_color", [True, False])
def test_a_terminal_gets_one_screen_without_colours_if_asked(python, tmp_path, study_folder, no_color, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = in_a_terminal(python, tmp_path, study_folder, **({"NO_COLOR": "1"} if no_color else {}))
    assert "30 trials stand finished" in text and "Traceback" not in text
    assert "[30/30]" not in text  # a screen, not lines
    colours = re.findall(r"\x1b\[[0-9;]*3[0-7]m|\x1b\[38;", text)
    assert bool(colours) != no_color
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is given back


def test_a_terminal_that_knows_no_unicode_gets_letters_it_has(python, tmp_path, study_folder):
    text = in_a_terminal(python, tmp_path, study_folder, PYTHONIOENCODING="ascii")
    assert "30 trials stand finished" in text and "Traceback" not in text and text.isascii()


def test_the_end_says_in_four_lines_what_was_found_and_what_to_type():
    unconfirmed = summary()
    lines = [*closing.found(unconfirmed), *closing.next_steps(unconfirmed, " --study x")]
    assert len(lines) == 4
    assert "45 passed the gate, 15 were pruned" in lines[0] and "200.0 tok/s [196.0, 204.0], 2.00 ×" in lines[1]
    assert "--confirm 3" in lines[2] and "python -m search.export --study x --out manifest --unverified" in lines[2]
    assert "python -m search.report --study x" in lines[3]

    won = summary(confirmed=[confirmed()], winner=confirmed())
    lines = closing.next_steps(won, "")
    assert "It may claim 190.0: a re-run is at most 5 % below that with a chance of 98.0%." in lines[0]
    assert lines[1] == "Next: python -m search.export --out manifest"
    assert len(lines) == 3


def test_the_end_says_so_where_nothing_passed_or_was_borne_out():
    nothing = summary(best=None, counts={"complete": 0, "pruned": 60, "failed": 0})
    assert "there is no best trial" in closing.found(nothing)[-1]
    refuted = confirmed()
    refuted.eligible = False
    assert "nothing can be claimed" in closing.next_steps(summary(confirmed=[refuted]), "")[0]
