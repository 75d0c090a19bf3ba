"""A node that serves a span of blocks: life cycle, RPC, admission, sessions."""
