"""Names of implementations that are elsewhere here; see docs/differences.md."""
