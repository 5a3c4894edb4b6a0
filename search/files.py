"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, making its folder; what stood there before stays until all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)  # a temporary file is its owner's alone
    os.replace(file.name, path)
