"""Other objectives than TPS and perplexity: the figures that a front may be made of."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0006", "0005"


def upgrade() -> None:
    """Add them; trials of before keep theirs in their measurements alone."""
    for table in ("outcome", "front"):
        op.add_column(f"pareto_{table}", sa.Column("figures", sa.JSON()))
