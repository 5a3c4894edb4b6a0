"""What was exported, and each engine's log."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    """Add them; engines of before have no log, and exports of before are not known."""
    op.add_column("pareto_environment", sa.Column("log", sa.String(500)))
    op.create_table(
        "pareto_export",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study", sa.String(200), nullable=False),
        sa.Column("trial", sa.Integer(), nullable=False),
        sa.Column("folder", sa.String(500), nullable=False),
        sa.Column("manifest", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_pareto_export_study", "pareto_export", ["study"])
