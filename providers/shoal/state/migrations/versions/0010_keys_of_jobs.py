"""Keys that bind metrics, studies, usage and promotions to the attempts of jobs.

Rows that belong to no attempt are kept: a usage or promotion without the number of the attempt, metrics and entries of
studies in a table of their own.
"""

import logging

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

log = logging.getLogger("shoal.store")

_KEYS = (
    ("job_metrics", "attempt", "CASCADE"),
    ("study_logs", "first", "CASCADE"),
    ("usage", "first", "SET NULL"),
    ("promotions", "attempt", None),
)


def upgrade() -> None:
    with op.batch_alter_table("promotions") as promotions:
        promotions.alter_column("attempt", existing_type=sa.Integer(), nullable=True)
    for table in ("study_logs", "usage"):
        op.add_column(table, sa.Column("first", sa.Integer(), nullable=table == "usage", server_default="1"))
    for table, attempt, ondelete in _KEYS:
        job = f"SELECT 1 FROM jobs WHERE jobs.id = {table}.job_id AND jobs.attempt = {table}.{attempt}"
        lost = f"{table}.job_id IS NOT NULL AND {table}.{attempt} IS NOT NULL AND NOT EXISTS ({job})"
        if found := op.get_bind().execute(sa.text(f"SELECT count(*) FROM {table} WHERE {lost}")).scalar():
            _keep(table, attempt, lost, found)
        with op.batch_alter_table(table) as batch:
            batch.create_foreign_key(
                f"fk_{table}_jobs",
                "jobs",
                ["job_id", attempt],
                ["id", "attempt"],
                ondelete=ondelete,
                deferrable=True,
                initially="DEFERRED",
            )


def _keep(table: str, attempt: str, lost: str, found: int) -> None:
    """Keep rows that belong to no attempt."""
    if table in ("usage", "promotions"):
        op.execute(f"UPDATE {table} SET {attempt} = NULL WHERE {lost}")
        log.info("%d rows of %s belong to jobs that were deleted: they keep only the job's id", found, table)
        return
    op.execute(f"CREATE TABLE {table}_without_job AS SELECT * FROM {table} WHERE {lost}")
    op.execute(f"DELETE FROM {table} WHERE {lost}")
    log.warning(
        "%d rows of %s belong to attempts that do not exist: they are in the table %s_without_job, which may be dropped",
        found,
        table,
        table,
    )


def downgrade() -> None:
    for table, _, _ in _KEYS:
        with op.batch_alter_table(table) as batch:
            batch.drop_constraint(f"fk_{table}_jobs", type_="foreignkey")
    for table in ("study_logs", "usage"):
        op.drop_column(table, "first")
