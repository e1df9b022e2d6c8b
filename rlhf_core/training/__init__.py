"""What models are trained for, and the engines and loops that do it."""
