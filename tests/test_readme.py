"""What the README says is so: its commands run, its study file is the miniature's, its links lead somewhere."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import MINIATURE, ROOT
from readme import README, command, commands
from sqlalchemy import inspect

from search.spec import read_study
from search.store import open_engine

# Each of its commands, and what runs it. Those on a real vLLM: test_vllm.py, in this order, with fewer trials.
RUN_BY = {
    "git clone … && cd vllm-pareto": "whoever reads this",
    "make search": "test_make_search_runs_the_search",
    "source .venv/bin/activate": "every test, which runs in that environment",
    "python -m search.run --trials 200": "test_vllm.py",
    "python -m search.run --gpus 0,1": "test_vllm.py, with two shares of a processor instead of two GPUs",
    "python -m search.export --out manifest": "test_vllm.py",
    "python -m search.verify manifest": "test_vllm.py",
    "python -m search.report": "test_the_report_is_written_where_the_readme_says",
    "python -m search.dashboard": "test_dashboard.py",
    "python manifest/serve.py": "search.verify, which starts it so",
    "curl localhost:8000/effective": "search.verify, which asks for it",
}


def test_every_command_of_the_readme_is_run_by_a_test():
    assert commands() == list(RUN_BY)


def test_make_search_runs_the_search():
    asked = [*command("make search"), "--dry-run", f"VENV={sys.prefix}", "TRIALS=5", "CONFIRM=0"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"{sys.prefix}/bin/python -m search.run --trials 5 --confirm 0" in done.stdout.splitlines()


def test_the_report_is_written_where_the_readme_says(searched, python, tmp_path):
    shutil.copyfile(searched.removeprefix("sqlite:///"), tmp_path / "study.db")
    _, *words = command("python -m search.report")
    subprocess.run([python, *words], cwd=tmp_path, check=True, timeout=120)
    assert "SIMULATED" in (tmp_path / "report.html").read_text()


def test_its_python_runs(searched, tmp_path, monkeypatch):
    (block,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = {}
    exec(block.replace("sqlite:///study.db", searched), names)
    assert len(names["study"].trials) >= 60


def yaml_blocks():
    return re.findall(r"^```yaml\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_its_other_knobs_are_read(study_folder):
    _, block = yaml_blocks()
    engine, knobs = block.split("knobs:\n")
    file = study_folder / "study.yaml"
    text = file.read_text().replace("engine:\n", engine)
    file.write_text(text.replace("knobs:\n", f"knobs:\n{knobs}"))
    names = [knob.name for knob in read_study(study_folder).build_knobs]
    assert names == ["method", "speculation.prompt_lookup_min", "max_num_batched_tokens"]


def test_its_study_file_is_the_miniatures():
    block, _ = yaml_blocks()
    assert block == (MINIATURE / "study.yaml").read_text().partition("\n")[2]  # but for what it says of itself


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_what_is_named_is_there(file):
    text = (ROOT / file).read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
    for path in re.findall(r"`((?:search|tests|kernels|studies|notebooks)/[\w/.-]+)`", text):
        assert "NAME" in path or (ROOT / path).exists(), path


def test_the_tables_it_names_are_there(tmp_path):
    named = set(re.findall(r"`(pareto_\w+)`", README.read_text()))
    assert named <= set(inspect(open_engine(f"sqlite:///{tmp_path}/s.db")).get_table_names())
