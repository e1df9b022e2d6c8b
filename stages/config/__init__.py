"""Configurations of the stages. They need only pydantic, so a pipeline is planned without the stages' imports."""
