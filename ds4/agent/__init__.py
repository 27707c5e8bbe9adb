"""The local coding agent: loop, tools, compaction, sessions, terminal."""
