"""Metrics of generated text, which these trainings do not have."""
