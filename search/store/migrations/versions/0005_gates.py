"""Gates beside perplexity: what each found, how records agree with the reference, and how tasks were answered."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0005", "0004"


def upgrade() -> None:
    """Add them; studies of before have the perplexity gate alone."""
    op.add_column("pareto_outcome", sa.Column("gates", sa.JSON()))
    for name, kind in (("top1", sa.Integer()), ("kl", sa.Double()), ("distributions", sa.LargeBinary())):
        op.add_column("pareto_record_score", sa.Column(name, kind))
    op.create_table(
        "pareto_task_answer",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("gate_key", sa.String(16), nullable=False),
        sa.Column("task", sa.String(200), nullable=False),
        sa.Column("matched", sa.Boolean(), nullable=False),
        sa.Column("answer", sa.String(500), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("gate_key", "task"),
    )
    op.create_index("ix_pareto_task_answer_gate_key", "pareto_task_answer", ["gate_key"])
