"""Many searchers on one study: who is at work, what each has claimed, and which card a figure was measured on."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0004", "0003"


def upgrade() -> None:
    """Add them; what was measured before was measured on one card, which is not named."""
    op.create_table(
        "pareto_searcher",
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("study", sa.String(200), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("renewed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("owner"),
    )
    op.create_index("ix_pareto_searcher_study", "pareto_searcher", ["study"])
    op.add_column("pareto_slot", sa.Column("setting_key", sa.String(200)))
    op.add_column("pareto_outcome", sa.Column("card_tps", sa.Double()))
    for table in ("environment", "outcome", "front"):
        op.add_column(f"pareto_{table}", sa.Column("card", sa.String(200)))
