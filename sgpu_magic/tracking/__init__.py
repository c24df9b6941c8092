"""Runs in MLflow: the one process that writes, and what a rank's own MLflow does."""
