"""One environment."""
