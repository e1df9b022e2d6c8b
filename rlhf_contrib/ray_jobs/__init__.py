"""Stages as jobs of a Ray cluster."""
