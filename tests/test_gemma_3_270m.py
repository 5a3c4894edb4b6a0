"""The study of Gemma 3 270M, as far as it can be looked at without the weights (see its README)."""

import json
import shutil

from conftest import ROOT

from search.inputs import check_inputs
from search.spec import read_study

STUDY = ROOT / "studies" / "gemma-3-270m"
CONFIG = {  # what convert.py finds in the GGUF, as far as a study hangs on it
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
}


def test_its_texts_fit_the_model_and_are_longer_than_its_window(tmp_path):
    for name in ("study.yaml", "prompts.jsonl", "records.jsonl"):
        shutil.copy(STUDY / name, tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    spec = read_study(tmp_path)
    check_inputs(spec)
    assert len(spec.held_out_prompts()) >= 2 and len(spec.held_out_records()) >= 2
    assert all(len(r.context) >= CONFIG["sliding_window"] for r in spec.records() + spec.held_out_records())


def test_what_is_committed_of_it_is_small_and_no_weights():
    kept = [path for path in STUDY.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 1 << 20
    assert "/studies/gemma-3-270m/model/" in (ROOT / ".gitignore").read_text().splitlines()
