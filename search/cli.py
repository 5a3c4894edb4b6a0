"""What the commands share: finding the study, and turning errors into one sentence and an exit code."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from search.errors import SearchError, UsageError

DEFAULT_STUDY, GPU_STUDY = "miniature", "gemma-4-e4b-a10g"
DEFAULT_STORAGE = "sqlite:///study.db"
PACKAGE = Path(__file__).resolve().parent
STUDY_FOLDERS = (PACKAGE.parent / "studies", PACKAGE / "studies")  # a checkout, an installed wheel


def add_study_arguments(parser: argparse.ArgumentParser) -> None:
    """`--study` and `--storage`, alike in every command."""
    parser.add_argument("--study", metavar="NAME|PATH", help="a bundled study, a study file or its folder")
    parser.add_argument("--storage", metavar="URL", help="study database (default sqlite:///study.db)")


def add_output_arguments(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    """`--debug` and, unless a command has no document to print, `--json`; alike in every command."""
    if json:
        parser.add_argument("--json", action="store_true", help="progress to stderr, one JSON object to stdout")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def find_study(name: str | None) -> tuple[Path, str]:
    """The study file, and in a few words why it is this one.

    Raises:
        UsageError: there is no such study.
    """
    if name is None:
        name, why = _default_study()
    else:
        why = "as asked"
    folders = [Path(name), *(folder / name for folder in STUDY_FOLDERS)]
    for path in folders:
        file = path / "study.yaml" if path.is_dir() else path
        if file.is_file():
            return file, why
    bundled = sorted({p.parent.name for folder in STUDY_FOLDERS for p in folder.glob("*/study.yaml")})
    raise UsageError(f"There is no study {name!r}: no such file or folder; bundled are {', '.join(bundled)}.")


def _default_study() -> tuple[str, str]:
    """The study taken where none is named, and why: the GPU's, where there is a GPU and the study's texts are there."""
    from search.engine.gpu import first_gpu

    gpu = first_gpu()
    texts = ("prompts.jsonl", "records.jsonl")
    ready = any(all((f / GPU_STUDY / name).is_file() for name in texts) for f in STUDY_FOLDERS)
    if gpu is not None and ready:
        return GPU_STUDY, f"as no --study was given and there is a GPU, {gpu['name']}"
    lacks = "no NVIDIA GPU is seen" if gpu is None else f"{GPU_STUDY} has no prompts and records yet"
    return DEFAULT_STUDY, f"the bundled one, as no --study was given and {lacks}"


def study_arguments(study: str | None, storage: str) -> str:
    """What to type after a command's name for the same study in the same database; a password is left out."""
    from search.store import safe_url

    where = ["--study", study] if study else []
    if storage != DEFAULT_STORAGE:
        where += ["--storage", safe_url(storage)]
    return "".join(f" {shlex.quote(word)}" for word in where)


def fail(what: str) -> NoReturn:
    """Refuse an argument."""
    raise UsageError(what)


@contextmanager
def set_up_errors(debug: bool) -> Iterator[None]:
    """Print a `SearchError` as its sentence and exit with its code; with `debug`, let it through."""
    try:
        yield
    except SearchError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
