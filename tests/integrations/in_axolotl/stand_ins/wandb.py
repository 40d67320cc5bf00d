"""A service that logs runs."""
