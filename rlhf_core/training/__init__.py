"""Train models: objectives, engines and training loops."""
