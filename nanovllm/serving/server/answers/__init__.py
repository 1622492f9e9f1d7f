"""The text of an answer taken apart: thought, content and tool calls, in the formats of model families."""
