"""What clients send and get over HTTP: OpenAI's request, answer, chunk and error shapes. Knows nothing of Ray."""
