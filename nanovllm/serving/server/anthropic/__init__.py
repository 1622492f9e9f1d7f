"""The API of Anthropic: /v1/messages and its token count, translated to chat requests."""
