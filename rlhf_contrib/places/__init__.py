"""Generate the files for running profiles elsewhere."""
