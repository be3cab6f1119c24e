"""Requests and answers in the form of the OpenAI API, and what runs them: a file of requests (batch)."""
