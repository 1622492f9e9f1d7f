"""Paged attention: the layout of a step's rows, the forms that compute it, and the operator that models call."""
