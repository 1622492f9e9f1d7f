"""Plain data that every room reads: options, requests, sequences, batches, outputs, errors."""
