"""Measurements: ratios inside one run, saved as they come."""
