"""Why a trial failed, what is wrong with a model that was measured, and which processes may be running."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    """Add them; trials of before have none."""
    for name, size in (("failure", 20), ("failed_stage", 10), ("log", 500), ("warning", 500)):
        op.add_column("pareto_outcome", sa.Column(name, sa.String(size)))
    op.create_table(
        "pareto_process",
        sa.Column("mark", sa.String(16), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("what", sa.String(20), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("mark"),
    )
