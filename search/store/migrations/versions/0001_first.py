"""The tables as the first studies were written with."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None


def _study() -> sa.Column[str]:
    return sa.Column("study", sa.String(200), nullable=False)


def _created() -> sa.Column[object]:
    return sa.Column("created_at", sa.DateTime(timezone=True), nullable=False)


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "pareto_definition",
        _study(),
        sa.Column("definition", sa.JSON(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        _created(),
        sa.PrimaryKeyConstraint("study"),
    )
    op.create_table(
        "pareto_slot",
        _study(),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("trial", sa.Integer()),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("study", "ordinal"),
    )
    op.create_table(
        "pareto_environment",
        sa.Column("id", sa.Integer(), nullable=False),
        _study(),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.Column("model_hash", sa.String(16), nullable=False),
        sa.Column("drafter_hash", sa.String(16)),
        sa.Column("build_hash", sa.String(16), nullable=False),
        sa.Column("native", sa.JSON(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("start_s", sa.Double(), nullable=False),
        _created(),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "pareto_measurement",
        sa.Column("id", sa.Integer(), nullable=False),
        _study(),
        sa.Column("trial", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), sa.ForeignKey("pareto_environment.id"), nullable=False),
        sa.Column("stage", sa.String(10), nullable=False),
        sa.Column("status", sa.String(12), nullable=False),
        sa.Column("setting", sa.JSON(), nullable=False),
        sa.Column("effective", sa.JSON(), nullable=False),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.Column("wall_s", sa.Double(), nullable=False),
        _created(),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "pareto_record_score",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("gate_key", sa.String(16), nullable=False),
        sa.Column("record", sa.String(200), nullable=False),
        sa.Column("nll", sa.Double(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("gate_key", "record"),
    )
    op.create_table(
        "pareto_prompt_timing",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("measurement_id", sa.Integer(), sa.ForeignKey("pareto_measurement.id"), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("prompt", sa.String(200), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("latency_s", sa.Double(), nullable=False),
        sa.Column("drift", sa.Double(), nullable=False),
        sa.Column("output_hash", sa.String(16), nullable=False),
        sa.Column("drafts", sa.Integer(), nullable=False),
        sa.Column("draft_tokens", sa.Integer(), nullable=False),
        sa.Column("accepted_per_pos", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "pareto_outcome",
        _study(),
        sa.Column("trial", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("setting", sa.JSON(), nullable=False),
        sa.Column("setting_key", sa.String(200), nullable=False),
        *(sa.Column(name, sa.Double()) for name in ("ppl", "ceiling", "excess", "tps", "tps_low", "tps_high")),
        sa.Column("prompts", sa.Integer()),
        sa.Column("reused_from", sa.Integer()),
        sa.Column("reason", sa.String(1000)),
        sa.Column("wall_s", sa.Double(), nullable=False),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        _created(),
        sa.PrimaryKeyConstraint("study", "trial"),
    )
    op.create_table(
        "pareto_confirmation",
        _study(),
        sa.Column("trial", sa.Integer(), nullable=False),
        sa.Column("setting", sa.JSON(), nullable=False),
        sa.Column("eligible", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(1000)),
        *(sa.Column(name, sa.Double()) for name in ("claimed", "mean", "low", "high", "p_pass")),
        sa.Column("figures", sa.JSON(), nullable=False),
        _created(),
        sa.PrimaryKeyConstraint("study", "trial"),
    )
    op.create_table(
        "pareto_front",
        _study(),
        sa.Column("trial", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("tps", "tps_low", "tps_high", "ppl")),
        sa.Column("setting", sa.JSON(), nullable=False),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("study", "trial"),
    )
    for table, column in (
        ("environment", "study"),
        ("measurement", "study"),
        ("measurement", "trial"),
        ("record_score", "gate_key"),
        ("prompt_timing", "measurement_id"),
        ("outcome", "setting_key"),
    ):
        op.create_index(f"ix_pareto_{table}_{column}", f"pareto_{table}", [column])
