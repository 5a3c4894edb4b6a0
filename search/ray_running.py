"""Ray for one command: a local one, or a cluster's."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from search.errors import SearchError
from search.fleet import Fleet
from search.interrupt import SIGNALS

OBJECT_STORE_BYTES = 100 << 20  # a few messages


@contextmanager
def ray_running(fleet: Fleet, logs: Path) -> Iterator[None]:
    """Inside, Ray runs: a local one of this process, or a cluster's. What it prints goes to ray.log in `logs`.

    Raises:
        SearchError: it does not start, or is not to be reached.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # says nothing to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15, otherwise: whatever else runs would slow what is timed
    import ray

    handlers = {sign: signal.getsignal(sign) for sign in SIGNALS}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if fleet.address is not None:
            ray.init(address=fleet.address, **quiet)
        else:
            if fleet.gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, fleet.gpus))
            count = fleet.cpus or len(fleet.gpus)
            ray.init(
                address="local",
                _node_ip_address="127.0.0.1",  # nobody else has business here
                num_cpus=count,
                num_gpus=len(fleet.gpus),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **quiet,
            )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where = f"Ray at {fleet.address} cannot be reached" if fleet.address is not None else "Ray does not start here"
        raise SearchError(f"{where}: {str(error).strip().splitlines()[0]}") from error
    finally:
        for sign, handler in handlers.items():  # Ray puts its own in place
            signal.signal(sign, handler)
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "ray.log").open("a") as log, redirect_stdout(log):
        try:
            yield
        finally:
            ray.shutdown()
