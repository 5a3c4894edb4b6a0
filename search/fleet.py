"""Which cards a search is spread over, as the command line says it, and whether they and its database will do."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from search.engine import gpu
from search.errors import UsageError
from search.store import sqlite_file

CPU = "cpu:"


@dataclass(frozen=True)
class Fleet:
    """Where searchers run, one a card.

    `gpus` are indices on this host; `cpus` so many searchers on processors; `address` is a Ray cluster's, where
    without `cpus` every GPU gets one, or `searchers` in all do, as soon as there is a GPU for each.
    """

    gpus: tuple[int, ...] = ()
    cpus: int = 0
    address: str | None = None
    searchers: int | None = None


def read_fleet(gpus: str | None, address: str | None, searchers: int | None) -> Fleet:
    """The fleet that `--gpus`, `--cluster` and `--searchers` ask for.

    Raises:
        UsageError: they cannot be read, or do not go together.
    """
    if searchers is not None and (address is None or gpus is not None or searchers < 1):
        raise UsageError(
            "--searchers N, at least 1, goes with --cluster alone: elsewhere --gpus says how many there are."
        )
    if gpus is not None and gpus.startswith(CPU):
        count = gpus.removeprefix(CPU)
        if not count.isdecimal() or int(count) < 1:
            raise UsageError(f"--gpus {gpus}: after cpu: stands how many searchers, at least 1.")
        return Fleet(cpus=int(count), address=address)
    if gpus is None:
        return Fleet(address=address, searchers=searchers)
    if address is not None:
        raise UsageError(
            "--gpus with indices is for this host; a cluster's GPUs are found by Ray (--searchers N limits them)."
        )
    indices = gpus.split(",")
    if not all(index.isdecimal() for index in indices) or len(set(indices)) < len(indices):
        raise UsageError(
            f"--gpus {gpus}: write indices like 0,1,2, each once, or cpu:2 for two searchers on this processor."
        )
    return Fleet(gpus=tuple(map(int, indices)))


def check_fleet(fleet: Fleet, storage: str) -> None:
    """Check what can be told before Ray starts.

    Raises:
        UsageError: Ray is missing, a GPU is not there, or the database cannot be shared by several hosts.
    """
    if fleet.address is not None and sqlite_file(storage) is not None:
        raise UsageError(
            "--cluster needs a database server, as SQLite is a file of one host and its locks do not hold over a "
            "network: start PostgreSQL and give --storage postgresql://USER@HOST/DATABASE (see studies/cluster.md)."
        )
    if find_spec("ray") is None:
        raise UsageError("--gpus and --cluster need Ray: pip install 'vllm-pareto[cluster]'.")
    if fleet.gpus and (missing := sorted(set(fleet.gpus) - set(gpu.visible_indices()))):
        seen = ", ".join(map(str, gpu.visible_indices())) or "none"
        raise UsageError(f"--gpus: there is no GPU {missing[0]} here (seen: {seen}).")
