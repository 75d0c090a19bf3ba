"""Routes, sessions, the remote span as a module, generation."""
