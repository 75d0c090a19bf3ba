"""How a server computes: pages, batches, the scheduler, the worker thread. Knows no network."""
