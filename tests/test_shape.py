"""The dry-run study of gemma-4-E4B-it's shape, as far as it can be looked at without a GPU."""

import subprocess
import sys

from conftest import ROOT

from search.inputs import check_models, check_texts
from search.spec import read_study

STUDY = ROOT / "studies" / "gemma-4-e4b-a10g"


def test_the_dry_run_is_a_study_that_fits_and_asks_what_the_real_one_asks(tmp_path):
    folder = tmp_path / "shape"
    subprocess.run([sys.executable, STUDY / "make_shape.py", folder], cwd=ROOT, check=True)
    dry, real = read_study(folder), read_study(STUDY)
    check_texts(dry, check_models(dry))
    assert dry.knobs == real.knobs
    assert {name: dry.engine.args[name] for name in real.engine.args} == real.engine.args
    assert dry.workload.output_tokens == real.workload.output_tokens
