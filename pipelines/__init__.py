"""Flows, deployments and the command line: the only package that imports Prefect."""
