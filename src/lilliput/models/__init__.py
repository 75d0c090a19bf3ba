"""From a model's files to a span of its blocks."""
