"""What the stages are configured with: pydantic alone, so that a pipeline is planned without the stages' own imports."""
