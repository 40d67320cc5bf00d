"""What a backend is asked for each op, and what it answers: records, choices, names of metrics."""
