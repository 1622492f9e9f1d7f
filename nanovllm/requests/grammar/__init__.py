"""Grammars of structured output: compiled where a request is made, followed token by token where it is sampled."""
