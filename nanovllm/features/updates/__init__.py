"""Updates: new weights for a model that serves, written into every copy that the engine keeps."""

NEEDS = ("features.adapters", "models")
