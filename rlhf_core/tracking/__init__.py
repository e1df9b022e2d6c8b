"""Record runs in MLflow, or in memory for tests. The store, not the tracker, is the source of truth."""
