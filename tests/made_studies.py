"""Studies that are written straight into a store, for what reads them."""

from datetime import UTC, datetime, timedelta

from sqlalchemy import select

from search.store import REFERENCE, Confirmation, Environment, Outcome, Store, open_engine, pareto_front, setting_key
from search.store.store import _front_point

CEILING = 2.42


def outcome(trial, state="COMPLETE", tps=None, ppl=2.3, **more):
    """A trial's outcome; what is not given follows from its number."""
    setting = {
        "sliding_window": 64 + 4 * (trial % 100),
        "centroid_top_k": 1 + trial % 40,
        "num_speculative_tokens": trial % 11,
    }
    values = {
        "study": "s",
        "trial": trial,
        "state": state,
        "setting": setting,
        "setting_key": f"{setting_key(setting)} {trial}",
        "ppl": ppl,
        "ceiling": CEILING,
        "excess": None if ppl is None else ppl - CEILING,
        "tps": tps,
        "tps_low": tps and tps * 0.98,
        "tps_high": tps and tps * 1.02,
        "wall_s": 2.0,
        "simulated": False,
        "created_at": datetime(2026, 11, 30, tzinfo=UTC) + timedelta(seconds=2 * trial),
    }
    return Outcome(**(values | more))


def measured_reference(folder):
    """The store of a study with its reference measured, and nothing else."""
    store = Store(open_engine(f"sqlite:///{folder}/s.db"), "s")
    store.define({}, {"engine": "vllm", "sampler": "tpe", "seed": 0, "trials": 200})
    hashes = {"model_hash": "aa", "drafter_hash": "bb", "build_hash": "cc"}
    facts = {"vllm": "0.32.0", "processor": "a <script>alert(1)</script> processor"}
    store.add_environment(Environment(study="s", simulated=False, native={}, facts=facts, start_s=30.0, **hashes))
    store.finish(outcome(REFERENCE, tps=100.0, ppl=2.3))
    return store


def fill(store, trials):
    """Add many trials, a quarter of them over the ceiling."""
    with store._session() as session, session.begin():
        for trial in range(trials):
            over = trial % 4 == 0
            session.add(
                outcome(trial, state="PRUNED", ppl=2.5 + trial % 7 / 50)
                if over
                else outcome(trial, tps=100 + trial % 97, ppl=2.30 + trial % 89 / 1000)
            )
        session.flush()
        session.add_all(map(_front_point, pareto_front(session.scalars(select(Outcome).where(Outcome.trial >= 0)))))
    store.finish(outcome(trials, tps=90.0, ppl=2.41))


def confirm(store, trial):
    """Add a confirmation of one trial, which may win."""
    figures = {"ppl": 2.31, "tune_tps": 141.0, "held_out_tps": 139.0, "gap": 0.01, "identity": {"rate": 1.0}}
    values = {"claimed": 138.0, "mean": 139.0, "low": 136.0, "high": 142.0, "p_pass": 0.973}
    setting = store.outcome(trial).setting
    store.add_confirmation(
        Confirmation(study="s", trial=trial, setting=setting, eligible=True, figures=figures, **values)
    )
