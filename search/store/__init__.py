"""The study store: what was measured, in the database that Optuna's own tables live in.

`load(url)` reads a study as pandas DataFrames; that is the interface for notebooks and scripts.
"""

from search.store.database import (
    cause_of,
    engine_options,
    full_url,
    open_engine,
    optuna_options,
    safe_url,
    sqlite_file,
    study_names,
)
from search.store.frames import Frames, load
from search.store.front import pareto_front
from search.store.models import (
    Confirmation,
    Environment,
    Export,
    FrontPoint,
    Measurement,
    Outcome,
    PromptTimingRow,
)
from search.store.patience import patiently, server_lost
from search.store.slots import REFERENCE
from search.store.spool import Spool
from search.store.store import Store, setting_key

__all__ = [
    "REFERENCE",
    "Confirmation",
    "Environment",
    "Export",
    "Frames",
    "FrontPoint",
    "Measurement",
    "Outcome",
    "PromptTimingRow",
    "Spool",
    "Store",
    "cause_of",
    "engine_options",
    "full_url",
    "load",
    "open_engine",
    "optuna_options",
    "pareto_front",
    "patiently",
    "safe_url",
    "server_lost",
    "setting_key",
    "sqlite_file",
    "study_names",
]
