"""Studies that tests run on: small synthetic texts with the simulated engine, and the real miniature."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MINIATURE = ROOT / "studies" / "miniature"

STUDY = """\
name: synthetic
engine:
  model: example/model
  drafter: example/drafter
  args: {max_model_len: 1024, max_num_seqs: 1, max_num_batched_tokens: 512}
knobs:
  sliding_window: {low: 32, high: 512, step: 32}
  centroid_top_k: {low: 1, high: 128, log: true}
  num_speculative_tokens: {low: 0, high: 10, default: 4}
workload:
  prompts: prompts.jsonl
  output_tokens: 64
  control: {prompts: 3}
  warmup: {prompts: 64, max_tokens: 1, seed: 42}
gate: {records: records.jsonl, ceiling: {ratio: 1.05}}
"""


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_texts(folder: Path) -> None:
    """24 tune prompts, 2 held-out ones and 16 records of random tokens."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(4096) for _ in range(count)]

    splits = ["tune"] * 24 + ["held-out"] * 2
    write_lines(
        folder / "prompts.jsonl",
        [{"id": f"p{i}", "split": split, "prompt_token_ids": tokens(400)} for i, split in enumerate(splits)],
    )
    write_lines(
        folder / "records.jsonl",
        [{"id": f"r{i}", "context_token_ids": tokens(32), "target_token_ids": tokens(16)} for i in range(16)],
    )


@pytest.fixture
def study_folder(tmp_path: Path) -> Path:
    """A study folder with the texts of `write_texts`."""
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "study.yaml").write_text(STUDY)
    write_texts(folder)
    return folder


@pytest.fixture
def edit_study(study_folder: Path) -> Callable[[str, str], Path]:
    """Replace a piece of the study file; the piece must be there."""

    def edit(old: str, new: str) -> Path:
        file = study_folder / "study.yaml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        return study_folder

    return edit


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., Any]:
    """Options of a search of so many trials, with changes."""
    from search.study import Options

    def make(trials: int, **changes: Any) -> Options:
        values = {
            "trials": trials,
            "confirm": 0,
            "storage": f"sqlite:///{tmp_path}/study.db",
            "engine": "simulated",
            "sampler": "tpe",
            "seed": 0,
            "timeout_s": None,
            "logs": tmp_path / "logs",
        }
        return Options(**(values | changes))

    return make


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The database of a simulated study of 60 trials."""
    from test_study import Silent

    from search.spec import read_study
    from search.study import Options, search

    folder = tmp_path_factory.mktemp("searched")
    (folder / "study.yaml").write_text(STUDY)
    write_texts(folder)
    url = f"sqlite:///{folder}/study.db"
    search(read_study(folder), Options(60, 0, url, "simulated", "tpe", 0, None, folder / "logs"), Silent())
    return url


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A real PostgreSQL server, from the package pgserver.

    It runs as another user than root does, for whom the next pytest to begin closes the folder of all pytests.
    """
    pgserver = pytest.importorskip("pgserver")
    with tempfile.TemporaryDirectory(prefix="vllm-pareto-pg-", ignore_cleanup_errors=True) as folder:
        server = pgserver.get_server(Path(folder) / "pg")
        yield server
        server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/study.db"
    server, name = request.getfixturevalue("postgres"), f"test_{uuid.uuid4().hex}"
    server.psql(f"CREATE DATABASE {name}")
    return str(server.get_uri(name))


@pytest.fixture(scope="session")
def python() -> str:
    return sys.executable
