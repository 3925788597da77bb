"""Slow and obvious re-computations in float64, written from the papers, to hold the package against."""
