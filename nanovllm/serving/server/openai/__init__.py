"""OpenAI's API: endpoints, request models and answers."""
