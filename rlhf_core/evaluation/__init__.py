"""Numbers with intervals, figures and reports for people."""
