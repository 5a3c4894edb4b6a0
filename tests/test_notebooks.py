"""The notebooks run, on whatever a search has found."""

from pathlib import Path

import nbclient
import nbformat
import pytest
from made_studies import measured_reference, outcome

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def executed(path, url, monkeypatch):
    """The texts of each code cell's outputs."""
    monkeypatch.setenv("PARETO_STORAGE", url)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    return [str(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_runs_on_a_searched_study_and_every_cell_shows_something(path, searched, monkeypatch):
    outputs = executed(path, searched, monkeypatch)
    assert all(len(output) > len("[]") for output in outputs[1:])
    assert any("application/vnd.plotly" in output for output in outputs)


def test_each_runs_on_a_study_of_one_trial(tmp_path, monkeypatch):
    store = measured_reference(tmp_path)
    store.finish(outcome(0, tps=120.0))
    for path in NOTEBOOKS:
        executed(path, f"sqlite:///{tmp_path}/s.db", monkeypatch)


def test_they_are_kept_without_outputs():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert cells and all(not cell.outputs and cell.execution_count is None for cell in cells)
