"""Other objectives than TPS and perplexity: the figures that a front may be made of."""

import sqlalchemy as sa
from alembic import op

FIGURES = "ttft_s", "itl_p95_s", "peak_bytes", "energy_j"
revision, down_revision = "0006", "0005"


def upgrade() -> None:
    """Add them; trials of before find theirs in their measurements, unless these are on another card's scale."""
    for table in ("outcome", "front"):
        op.add_column(f"pareto_{table}", sa.Column("figures", sa.JSON()))
    outcome = _table("outcome", "study", "trial", "reused_from", "tps", "card_tps")
    measured = _table("measurement", "study", "trial", "stage", "status")
    timed = sa.select(measured).where(measured.c.stage == "speed", measured.c.status == "done")
    connection = op.get_bind()
    for row in connection.execute(timed).all():
        its = sa.or_(outcome.c.trial == row.trial, outcome.c.reused_from == row.trial)
        one_scale = sa.or_(outcome.c.card_tps.is_(None), outcome.c.card_tps == outcome.c.tps)
        found = {name: row.figures.get(name) for name in FIGURES}
        connection.execute(sa.update(outcome).where(outcome.c.study == row.study, its, one_scale).values(figures=found))


def _table(name: str, *columns: str) -> sa.TableClause:
    return sa.table(f"pareto_{name}", *map(sa.column, columns), sa.column("figures", sa.JSON))
