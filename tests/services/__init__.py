"""Tests over real services: Redis, and whatever else a test starts for itself."""
