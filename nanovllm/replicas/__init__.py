"""Data-parallel replicas: engine processes, the front that routes requests among them, and what crosses between."""
