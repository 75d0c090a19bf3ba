"""A node that serves a span of blocks."""
