"""Microbenchmarks: `python -m bench --help`. Every figure is of a variant that agreed with the reference first."""
