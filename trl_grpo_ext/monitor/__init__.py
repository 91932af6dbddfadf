"""Metrics, reports and plots of a run."""
