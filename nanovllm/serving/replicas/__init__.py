"""Data-parallel replicas: engine processes, the front that routes requests to them, and the messages between."""
