"""The files that Optuna Dashboard offers beside a study: exported manifests and the workers' logs. Read only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from optuna.artifacts.exceptions import ArtifactNotFound

from search.secrets import redact
from search.store import Store

LOG_TAIL = 4 << 20  # bytes of a log that are shown, its last ones


@dataclass(frozen=True)
class Attachment:
    """One file: of a trial, or of the whole study where `trial` is None."""

    trial: int | None
    filename: str
    mimetype: str
    source: Path | str  # a log on this machine, or the text itself

    @property
    def id(self) -> str:
        """Hexadecimal digits, as the dashboard's addresses want them."""
        return hashlib.sha256(f"{self.trial} {self.filename} {self.source}".encode()).hexdigest()[:32]

    @property
    def described(self) -> str:
        """What Optuna keeps of an artifact, as JSON."""
        names = {"artifact_id": self.id, "filename": self.filename, "mimetype": self.mimetype, "encoding": None}
        return json.dumps(names)

    def read(self) -> bytes:
        """Its bytes; of a log the end, with whatever looks like a secret taken out.

        Raises:
            OSError: the log is not there any more.
        """
        if isinstance(self.source, str):
            return self.source.encode()
        with self.source.open("rb") as file:
            file.seek(max(0, self.source.stat().st_size - LOG_TAIL))
            return redact(file.read().decode(errors="replace")).encode()


def attachments(store: Store) -> list[Attachment]:
    """The study's exported manifests, the log of each engine and that of each failed trial, as far as they exist."""
    found = [
        Attachment(e.trial, f"manifest-{e.id}.json", "application/json", json.dumps(e.manifest, indent=2))
        for e in store.exports()
    ]
    logs: list[tuple[int | None, str | None]] = [(None, e.log) for e in store.environments()]
    logs += [(o.trial, o.log) for o in store.outcomes() if o.state == "FAIL"]
    for trial, log in logs:
        if log and log.endswith(".log") and Path(log).is_file():  # whatever else a database may name is not shown
            found.append(Attachment(trial, Path(log).name, "text/plain", Path(log)))
    return found


class Attachments:
    """An artifact store, as Optuna wants one, of attachments by their id."""

    def __init__(self) -> None:
        self.by_id: dict[str, Attachment] = {}

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """The bytes of one.

        Raises:
            ArtifactNotFound: there is none of that id, or its file is gone.
        """
        try:
            return BytesIO(self.by_id[artifact_id].read())
        except (KeyError, OSError) as error:
            raise ArtifactNotFound(f"There is no artifact {artifact_id}.") from error

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        """Refuse: nothing is uploaded here."""
        raise PermissionError("vllm-pareto's dashboard takes no uploads.")

    def remove(self, artifact_id: str) -> None:
        """Leave the file where it is: it is the search's, not the dashboard's."""
