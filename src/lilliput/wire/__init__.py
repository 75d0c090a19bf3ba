"""What crosses the network: messages, tensors, codecs, limits. Knows nothing of models."""
