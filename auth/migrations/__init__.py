"""Alembic migrations of the database of tenants and keys; `auth.database.Database.migrate` runs them."""
