"""HTTP: an API as OpenAI's clients expect it, and a page to chat on."""
