"""Text on both sides of the engine: prompts, answers, grammars and calls of tools."""
