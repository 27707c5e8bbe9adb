"""Conversation types and one renderer per model syntax."""
