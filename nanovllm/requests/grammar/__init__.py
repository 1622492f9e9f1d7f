"""Grammars of structured output: compiled with the request, followed token by token during sampling."""
