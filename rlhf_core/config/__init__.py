"""Configuration models. Importable without torch: pydantic and the standard library only."""
