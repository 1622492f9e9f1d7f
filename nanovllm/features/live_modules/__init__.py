"""Live modules: an engine notices the changes that the owner of its model makes."""

NEEDS = ()
