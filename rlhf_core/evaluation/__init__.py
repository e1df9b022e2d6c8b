"""Evaluate policies and reward models: metrics with intervals, figures and reports."""
