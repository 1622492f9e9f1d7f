"""Heads: layers of a checkpoint that predict further tokens (multi-token prediction, MTP), as a source of drafts."""
