"""The importable library under the stages: types, store, losses, engines behind protocols."""
