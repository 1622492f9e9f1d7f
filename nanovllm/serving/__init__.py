"""Serving: the asynchronous engine, streams, replicas, and HTTP."""
