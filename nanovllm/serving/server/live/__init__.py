"""Live view: a page that shows the running engine."""
