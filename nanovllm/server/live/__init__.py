"""The live view: a page that shows the running engine."""
