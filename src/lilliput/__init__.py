"""Many small machines hold one giant language model."""
