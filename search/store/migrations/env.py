"""Run by Alembic, inside the transaction that `search.store.schema` opened."""

from alembic import context

from search.store.models import Base
from search.store.schema import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, version_table=VERSION_TABLE
)
with context.begin_transaction():
    context.run_migrations()
