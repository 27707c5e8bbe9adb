"""Capability regression: cases, extractors, runner, TUI."""
