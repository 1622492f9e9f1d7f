"""The same tokens, faster: which ways to compute a step an engine takes."""
